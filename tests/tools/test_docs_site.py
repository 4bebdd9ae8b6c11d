"""The documentation site: it builds, it fits a phone, and it asks no other host for anything."""

import base64
import functools
import http.server
import json
import os
import re
import shutil
import subprocess
import sys
import threading
from collections.abc import Generator, Iterator
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

from accessibility import prepare, violations

ROOT = Path(__file__).parents[2]
CHROMIUM = shutil.which("chromium") or shutil.which("google-chrome")
# A report has tests of its own, and a server shows the other one in the place of what is missing.
ELSEWHERE = {"report-example.html", "404.html"}
FINDS = {
    "OuterLoop": "reference/loop.html",
    "thinwire.transport.ElasticBucket": "reference/transport.html",
    "torchft is not installed": "troubleshooting.html",
    "pseudo-gradient": "tutorials/one-outer-step.html",
}
NOT_COPIED = {".git", ".venv", ".cache", "build", "dist", "runs", "site"}


@pytest.fixture(scope="module")
def tool() -> Generator[ModuleType]:
    pytest.importorskip("griffe", reason="the extra docs is not installed")
    sys.path.insert(0, str(ROOT / "tools"))
    try:
        import docs_site

        yield docs_site
    finally:
        sys.path.remove(str(ROOT / "tools"))


def write(folder: Path, **pages: str) -> Path:
    for name, text in pages.items():
        (folder / f"{name}.html").write_text(text)
    return folder


def test_a_link_to_a_page_and_its_heading_is_no_flaw(tool, tmp_path: Path) -> None:
    site = write(tmp_path, a='<a href="b.html#there">b</a>', b='<h2 id="there">b</h2>')
    assert list(tool.flaws(site)) == []


@pytest.mark.parametrize(
    ("text", "flaw"),
    [
        ('<a href="c.html">c</a>', "a.html: (c.html) leads to no file"),
        ('<a href="#there">c</a>', "a.html: (#there) leads to no heading"),
        ('<script src="https://x.org/s.js">', "a.html: loads https://x.org/s.js from elsewhere"),
    ],
)
def test_flaws_of_a_page_are_found(tool, tmp_path: Path, text: str, flaw: str) -> None:
    assert list(tool.flaws(write(tmp_path, a=text))) == [flaw]


def test_links_lead_to_where_files_lie_on_the_site(tool) -> None:
    outside: set[str] = set()
    text = (
        "[a](../README.md) [b](planner.md#x) [c](../examples/plain_pytorch.py) [d](https://x.org)"
    )
    assert tool.relinked(text, "docs/index.md", outside) == (
        "[a](readme.md) [b](planner.md#x) [c](files/examples/plain_pytorch.py.md) [d](https://x.org)"
    )
    assert outside == {"examples/plain_pytorch.py"}


def test_a_docstrings_table_is_shown_and_its_equation_is_not(tool) -> None:
    assert "inner lr   weight decay = base" in tool.sources_text("muloco")
    assert "Delta = " not in tool.sources_text("diloco")
    assert "every N-th: " not in tool.sources_text("async_diloco")


@pytest.mark.slow
def test_a_module_that_hides_a_function_of_its_name_is_found(tool) -> None:
    names = ["thinwire.report.run_page", "thinwire.report.run_page.run_page", "thinwire.OuterLoop"]
    (flaw,) = tool.object_flaws(names)
    assert flaw.endswith("name what is in it: thinwire.report.run_page.run_page")


def test_pictures_of_a_notebook_come_in_the_colours_of_both_themes(tool) -> None:
    text = tool.notebook_text(ROOT / "docs" / "tutorials" / "one-outer-step.ipynb")
    found = re.findall(r"!\[(.+?)\]\(data:image/svg\+xml;base64,(.+)#gh-(\w+)-mode-only\)", text)
    assert [mode for *_, mode in found] == ["light", "dark"] * 5
    for title, code, mode in found:
        svg = base64.b64decode(code).decode()
        assert f"<title>{title}</title>" in svg
        assert {*re.findall(r"#\w{6}", svg)} <= {*tool.THEMES[mode]}


def test_what_an_index_shows_is_no_page(tool) -> None:
    assert tool.pages_out_of_navigation() == set()
    assert "registry.md" not in (ROOT / "mkdocs.yml").read_text()


def without_what_was_built(folder: str, names: list[str]) -> set[str]:
    return NOT_COPIED & {*names} if Path(folder) == ROOT else {"__pycache__"}


@pytest.fixture(scope="module")
def site(tmp_path_factory) -> Path:
    pytest.importorskip("zensical")
    copy = tmp_path_factory.mktemp("docs") / "copy"
    shutil.copytree(ROOT, copy, ignore=without_what_was_built)
    built = subprocess.run(
        [sys.executable, "tools/docs_site.py"],
        cwd=copy,
        env=os.environ | {"PYTHONPATH": str(copy / "src")},
        capture_output=True,
        text=True,
        check=False,
    )
    assert built.returncode == 0, built.stdout + built.stderr
    return copy / "site"


@pytest.fixture(scope="module")
def browser() -> Generator[Any]:
    sync_api = pytest.importorskip("playwright.sync_api", reason="playwright is not installed")
    if CHROMIUM is None:
        pytest.skip("chromium is not installed")
    with sync_api.sync_playwright() as playwright:
        browser = playwright.chromium.launch(
            executable_path=CHROMIUM, args=["--no-sandbox", "--disable-gpu"]
        )
        yield browser
        browser.close()


@pytest.mark.slow
@pytest.mark.timeout(1800)  # minutes, and more on a busy machine
@pytest.mark.parametrize("scheme", ["light", "dark"])
def test_every_built_page_fits_can_be_read_and_says_nothing(
    site: Path, browser: Any, scheme: str
) -> None:
    files = [file for file in sorted(site.rglob("*.html")) if file.name not in ELSEWHERE]
    assert len(files) > 90
    context = browser.new_context(color_scheme=scheme)
    flaws = [f"{f.relative_to(site)}: {flaw}" for f in files for flaw in flaws_of(f, context)]
    context.close()
    assert flaws == []


def flaws_of(file: Path, context: Any) -> Iterator[str]:
    page, said = context.new_page(), []
    page.on("console", lambda message: said.append(message.text))
    page.on("pageerror", lambda error: said.append(str(error)))
    page.on("request", lambda request: said.append(request.url))
    page.set_viewport_size({"width": 1600, "height": 900})
    page.goto(file.as_uri(), wait_until="networkidle")
    prepare(page)
    for width in (1600, 800, 400):
        page.set_viewport_size({"width": width, "height": 900})
        page.wait_for_timeout(100)  # it finds out what scrolls now
        wide = page.evaluate("document.documentElement.scrollWidth")
        if wide > width:
            yield f"is {wide} wide in a window of {width}"
        if width != 800:
            yield from (f"{width} wide: {flaw}" for flaw in violations(page))
    yield from (text for text in said if not text.startswith(("file:", "data:", "blob:")))
    page.close()


@pytest.mark.slow
@pytest.mark.parametrize(("scheme", "is_seen"), [("light", "default"), ("dark", "slate")])
def test_a_page_comes_in_the_scheme_of_its_reader(
    site: Path, browser: Any, scheme: str, is_seen: str
) -> None:
    context = browser.new_context(color_scheme=scheme)
    page = context.new_page()
    page.goto((site / "index.html").as_uri())
    assert page.evaluate("document.body.dataset.mdColorScheme") == is_seen
    context.close()


@pytest.mark.slow
def test_every_object_of_the_reference_is_in_the_index_of_the_search(site: Path, tool) -> None:
    index = json.loads((site / "search.json").read_text(encoding="utf-8"))
    found = {item["location"].partition("#")[2] for item in index["items"]}
    assert [name for name in tool.identifiers() if name not in found] == []


@pytest.mark.slow
@pytest.mark.parametrize("is_served", [False, True])
def test_the_search_finds_names_and_errors(site: Path, browser: Any, is_served: bool) -> None:
    handler = functools.partial(QuietHandler, directory=site)
    with http.server.ThreadingHTTPServer(("127.0.0.1", 0), handler) as server:
        threading.Thread(target=server.serve_forever).start()
        try:
            home = f"http://127.0.0.1:{server.server_port}" if is_served else site.as_uri()
            page = browser.new_page()
            page.goto(f"{home}/methods/muloco.html", wait_until="networkidle")
            page.keyboard.press("Control+k")
            for words, place in FINDS.items():
                page.keyboard.press("Control+a")
                page.keyboard.type(words)
                page.locator(f'a[href*="/{place}?h="]').first.wait_for(timeout=20_000)
            page.close()
        finally:
            server.shutdown()


class QuietHandler(http.server.SimpleHTTPRequestHandler):
    def log_message(self, *args: object) -> None:
        pass
