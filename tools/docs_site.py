"""Build the documentation site: `make docs`.

    python tools/docs_site.py            # pages in build/site-pages, the site in site/
    python tools/docs_site.py --stage    # the pages alone

Pages are staged first. Link targets outside docs/ become part of the site: README, changelog and
the like become pages, source files become pages that show them, and data become files. Notebooks
become Markdown with their outputs. Pages of methods get the settings of the preset that they name.
The build fails for a dead link or heading, for a page outside the navigation, and for an object on
a reference page that has no docstring.
"""

import argparse
import base64
import inspect
import json
import os
import re
import shutil
import subprocess
import sys
from collections.abc import Iterable, Iterator
from functools import partial
from html.parser import HTMLParser
from pathlib import Path
from urllib.parse import unquote, urlsplit

import griffe
from svg_canvas import THEMES

from thinwire import presets

ROOT = Path(__file__).parents[1]
STAGE = ROOT / "build" / "site-pages"
SITE = ROOT / "site"
ASSETS = ROOT / "tools" / "site_assets"
SHIM = "https://unpkg.com/iframe-worker/shim"  # the offline search would load this from the network
PROJECT_PAGES = {
    "README.md": "readme.md",
    "CHANGELOG.md": "changelog.md",
    "CONTRIBUTING.md": "contributing.md",
    "CODE_OF_CONDUCT.md": "code-of-conduct.md",
    "SECURITY.md": "vulnerabilities.md",  # security.md is a page of docs/
}
LANGUAGES = {
    ".md": "markdown",
    ".py": "python",
    ".sh": "bash",
    ".toml": "toml",
    ".yaml": "yaml",
    ".yml": "yaml",
}
FENCE = re.compile(r"^(```.*?^```)", re.MULTILINE | re.DOTALL)
LINK = re.compile(r"(\]\()([^)\s#]+)(#[^)\s]*)?(\))")
PRESET = re.compile(r"^<!-- (settings|sources): (\w+) -->$", re.MULTILINE)
IDENTIFIER = re.compile(r"^::: ([\w.]+)$", re.MULTILINE)


def place_of(path: str) -> str:
    """Path among the site's pages of a file of the repository."""
    if path in PROJECT_PAGES:
        return PROJECT_PAGES[path]
    if path.startswith("docs/"):
        return path.removeprefix("docs/").replace(".ipynb", ".md")
    is_shown = (ROOT / path).is_dir() or Path(path).suffix in LANGUAGES
    path = path.lstrip(".")  # the site would leave out a hidden folder
    return f"files/{path}.md" if is_shown else f"files/{path}"


def stage() -> None:
    """Write all pages."""
    shutil.rmtree(STAGE, ignore_errors=True)
    outside: set[str] = set()
    pages = [p.relative_to(ROOT).as_posix() for p in (ROOT / "docs").rglob("*") if p.is_file()]
    for path in [*pages, *PROJECT_PAGES]:
        file = ROOT / path
        target = STAGE / place_of(path)
        target.parent.mkdir(parents=True, exist_ok=True)
        if file.suffix in (".md", ".ipynb"):
            text = notebook_text(file) if file.suffix == ".ipynb" else file.read_text("utf-8")
            target.write_text(with_settings(relinked(text, path, outside)), encoding="utf-8")
        else:
            shutil.copy(file, target)
    for path in sorted(outside):
        _stage_file(path)
    shutil.copytree(ASSETS, STAGE / "assets")


def relinked(text: str, path: str, outside: set[str]) -> str:
    """A page's text with links as on the site; collects linked files outside docs/ in `outside`."""

    def link(match: re.Match[str]) -> str:
        before, target, anchor, after = match.groups(default="")
        if "://" in target or target.startswith("mailto:"):
            return match[0]
        led = os.path.normpath(os.path.join(os.path.dirname(path), target))
        if not led.startswith("docs/") and led not in PROJECT_PAGES:
            if not (ROOT / led).exists():
                return match[0]  # the build refuses this link
            outside.add(led)
        way = os.path.relpath(place_of(led), os.path.dirname(place_of(path)) or ".")
        return f"{before}{way}{anchor}{after}"

    parts = FENCE.split(text)
    return "".join(p if p.startswith("```") else LINK.sub(link, p) for p in parts)


def _stage_file(path: str) -> None:
    target = STAGE / place_of(path)
    target.parent.mkdir(parents=True, exist_ok=True)
    source = ROOT / path
    if source.is_dir():
        names = sorted(p.name for p in source.iterdir() if p.is_file())
        rows = "".join(f"* [{name}]({source.name}/{name})\n" for name in names)
        (target.parent / source.name).mkdir(exist_ok=True)
        for name in names:
            shutil.copy(source / name, target.parent / source.name / name)
        target.write_text(f"# {path}\n\n{rows}", encoding="utf-8")
    elif target.suffix == ".md":
        code = source.read_text(encoding="utf-8")
        language = LANGUAGES[source.suffix]
        target.write_text(f"# {path}\n\n````{language}\n{code}````\n", encoding="utf-8")
    else:
        shutil.copy(source, target)


def with_settings(text: str) -> str:
    """A page of a method, with comments replaced by the preset's settings and sources."""
    shown = {"settings": settings_table, "sources": sources_text}
    return PRESET.sub(lambda found: shown[found[1]](found[2]), text)


def sources_text(name: str) -> str:
    """The part of a preset's docstring about its sources, before its arguments."""
    text = re.split(r"^(?:Args|Raises):", inspect.getdoc(getattr(presets, name)) or "", flags=re.M)
    paragraphs = text[0].strip().split("\n\n")[1:]
    # Keep tables, which are indented; drop equations, which the page shows elsewhere.
    kept = (p for p in paragraphs if not re.match(r"\w[\w ]* +=|\s*every N-th: ", p))
    return "\n\n".join(kept).strip()


def settings_table(name: str) -> str:
    """A preset's slots, as a Markdown table."""
    method = getattr(presets, name)()
    slots = ("inner", "sync_every", "outer", "codec", "feedback", "aggregate", "exchange")
    slots += ("fragments", "overlap")
    rows = (f"| `{slot}` | `{getattr(method, slot)!r}` |\n" for slot in slots)
    return "| slot | setting |\n|---|---|\n" + "".join(rows)


def notebook_text(file: Path) -> str:
    """A notebook as Markdown, with the text and pictures that its cells output."""
    parts: list[str] = []
    for cell in json.loads(file.read_text(encoding="utf-8"))["cells"]:
        source = "".join(cell["source"]).rstrip()
        if cell["cell_type"] == "markdown":
            parts.append(source)
        elif cell["cell_type"] == "code":
            parts.append(f"```python\n{source}\n```")
            parts.extend(_output_text(output) for output in cell["outputs"])
    return "\n\n".join(parts) + "\n"


def _output_text(output: dict[str, object]) -> str:
    data: dict[str, list[str] | str] = output.get("data", {"text/plain": output.get("text", "")})  # type: ignore[assignment]
    for kind in ("image/svg+xml", "image/png", "text/html", "text/plain"):
        if kind not in data:
            continue
        value = "".join(data[kind])
        if kind == "image/png":
            return f"![Picture of the cell above](data:image/png;base64,{value.strip()})"
        if kind == "image/svg+xml":
            return in_both_themes(value)
        return value if kind == "text/html" else f"```text\n{value.rstrip()}\n```"
    return ""


def in_both_themes(svg: str) -> str:
    """Markdown of a light-theme picture and its dark counterpart."""
    title = re.search(r"<title>(.*?)</title>", svg)
    other = dict(zip(THEMES["light"], THEMES["dark"], strict=True))
    dark = re.sub(r"#[0-9a-f]{6}", lambda colour: other[colour[0]], svg)
    return "\n".join(
        f"![{title[1] if title else 'Picture'}](data:image/svg+xml;base64,"
        f"{base64.b64encode(drawn.encode()).decode()}#gh-{mode}-mode-only)"
        for mode, drawn in (("light", svg), ("dark", dark))
    )


def identifiers() -> list[str]:
    """The objects on the reference pages."""
    pages = sorted((ROOT / "docs" / "reference").glob("*.md"))
    return [name for page in pages for name in IDENTIFIER.findall(page.read_text("utf-8"))]


def object_flaws(names: Iterable[str]) -> Iterator[str]:
    """Objects, and their public members, that have no docstring or hide behind a module."""
    loader = griffe.GriffeLoader(search_paths=[ROOT / "src"])
    package = loader.load("thinwire")
    loader.resolve_aliases()
    for name in names:
        shown = package[name.removeprefix("thinwire.")]
        own = shown.final_target if shown.is_alias else shown
        if own.is_module:  # a page shows a module with everything in it
            yield f"{name}: is a module; name what is in it: {name}.{name.rpartition('.')[2]}"
        if not own.has_docstring and not own.is_attribute:
            yield f"{name}: has no docstring"
        if own.is_class:
            yield from (
                f"{name}.{member}: has no docstring"
                for member, value in own.members.items()
                if value.is_function and not member.startswith("_")
                if not value.has_docstring and not _inherits(own, member)
            )


def _inherits(owner: griffe.Class, member: str) -> bool:
    """True if the member overrides one of a base, whose docstring then applies."""
    return any(member in base.members for base in owner.mro())


class _Page(HTMLParser):
    """Links, anchors and loaded files of one built page."""

    def __init__(self) -> None:
        super().__init__()
        self.links: list[str] = []
        self.anchors: set[str] = set()
        self.loaded: list[str] = []

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        given = {name: value for name, value in attrs if value is not None}
        self.anchors |= {given[name] for name in ("id", "name") if name in given}
        if tag == "a" and "href" in given:
            self.links.append(given["href"])
        if tag in ("img", "script", "source", "iframe") and "src" in given:
            self.loaded.append(given["src"])
        if tag == "link" and given.get("rel") in ("stylesheet", "icon", "preload"):
            self.loaded.append(given["href"])


def _read(site: Path) -> dict[Path, _Page]:
    pages: dict[Path, _Page] = {}
    for file in sorted(site.rglob("*.html")):
        if file.name not in ("report-example.html", "404.html"):
            pages[file] = _Page()
            pages[file].feed(file.read_text(encoding="utf-8"))
    return pages


def flaws(site: Path) -> Iterator[str]:
    """Dead links of the built site, and files that it would load from other hosts."""
    pages = _read(site)
    for file, page in pages.items():
        at = file.relative_to(site)
        yield from (f"{at}: loads {u} from elsewhere" for u in page.loaded if "//" in u[:8])
        for link in {*page.links, *page.loaded}:
            parts = urlsplit(link)
            if parts.scheme or parts.netloc:
                continue
            name = unquote(parts.path)
            led = Path(os.path.normpath(file.parent / name)) if name else file
            if not led.is_file():
                yield f"{at}: ({link}) leads to no file"
            elif parts.fragment and led in pages:
                anchor = unquote(parts.fragment)
                if anchor not in pages[led].anchors and not anchor.startswith("__"):
                    yield f"{at}: ({link}) leads to no heading"


def pages_out_of_navigation() -> set[str]:
    """Pages of docs/ that are not in the navigation."""
    text = (ROOT / "mkdocs.yml").read_text(encoding="utf-8")
    named = set(re.findall(r"([\w/-]+\.md)$", text, re.MULTILINE))
    docs = ROOT / "docs"
    pages = [p.relative_to(ROOT).as_posix() for k in ("md", "ipynb") for p in docs.rglob(f"*.{k}")]
    return {place_of(path) for path in [*pages, *PROJECT_PAGES]} - named


def build() -> list[str]:
    """Build the site; returns what is wrong with it."""
    problems = [f"{name}: is in no navigation" for name in sorted(pages_out_of_navigation())]
    problems += object_flaws(identifiers())
    shutil.rmtree(SITE, ignore_errors=True)
    shutil.rmtree(ROOT / ".cache", ignore_errors=True)  # it ignores changes to docstrings
    command = [sys.executable, "-m", "zensical", "build", "--strict"]
    if subprocess.run(command, cwd=ROOT, check=False).returncode:
        return [*problems, "zensical found what it prints above"]
    for file in SITE.rglob("*.html"):
        if file.name == "report-example.html":
            continue
        text = file.read_text(encoding="utf-8")
        shim = os.path.relpath(SITE / "assets" / "iframe-worker-shim.js", file.parent)
        home = os.path.relpath(SITE / "index.html", file.parent)
        # The logo links to a folder, which shows its files if there is no server.
        text = re.sub(r'href="(\.|\./|\./\.\.|(\.\./)*\.\.)"', f'href="{home}"', text)
        text = re.sub(r"<th[^>]*></th>", "<td></td>", text)  # an empty heading is no heading
        # Entries below a heading of "On this page" are not landmarks.
        text = re.sub(r'(<nav class="md-nav") aria-label="[^"]*">', r'\1 role="none">', text)
        file.write_text(text.replace(SHIM, shim), encoding="utf-8")
    return [*problems, *sorted(flaws(SITE))]


def main() -> int:
    """Stage and build; 1 if anything is wrong."""
    parser = argparse.ArgumentParser(description="Build the documentation site.")
    parser.add_argument("--stage", action="store_true", help="write the pages, build nothing")
    only_stage = parser.parse_args().stage
    stage()
    problems = [] if only_stage else build()
    say = partial(print, file=sys.stderr)
    for problem in problems:
        say(problem)
    if not problems and not only_stage:
        print(f"open {SITE.relative_to(ROOT)}/index.html")
    return 1 if problems else 0


if __name__ == "__main__":
    sys.exit(main())
