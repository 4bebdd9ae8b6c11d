"""Every relative link of the Markdown files leads to a file and a heading that exist.

`python tools/check_links.py` looks at README.md, CONTRIBUTING.md, CHANGELOG.md and all of docs, and
exits with 1 if a link leads nowhere. Addresses of the web are not asked.
"""

import re
import sys
from collections.abc import Iterator
from pathlib import Path

ROOT = Path(__file__).parents[1]
LINK = re.compile(r"\[[^\]]*\]\(([^)\s]+)\)")
PICTURES = {".svg", ".png"}
CODE = re.compile(r"^```.*?^```", re.MULTILINE | re.DOTALL)


def pages(root: Path) -> list[Path]:
    """The files that people read, in order."""
    return sorted([*root.glob("*.md"), *root.glob("docs/**/*.md")])


def broken_links(root: Path) -> Iterator[tuple[Path, str]]:
    """Each link that leads to no file, or to no heading of one."""
    for page in pages(root):
        for target in LINK.findall(CODE.sub("", page.read_text(encoding="utf-8"))):
            if "://" not in target and not _exists(page, target):
                yield page.relative_to(root), target


def _exists(page: Path, target: str) -> bool:
    name, _, anchor = target.partition("#")
    file = page.parent / name if name else page
    # A picture's fragment says in which theme it is shown.
    is_page = bool(anchor) and file.suffix not in PICTURES
    return file.exists() and (not is_page or anchor in _anchors(file))


def _anchors(page: Path) -> set[str]:
    """The anchors of a page's headings, as GitHub makes them: lower case, no marks, hyphens."""
    text = CODE.sub("", page.read_text(encoding="utf-8"))
    headings = re.findall(r"^#+ (.*)$", text, re.MULTILINE)
    return {re.sub(r"[^\w\- ]", "", h.lower()).replace(" ", "-") for h in headings}


def main() -> int:
    """Print broken links; 1 if there are any."""
    broken = list(broken_links(ROOT))
    for page, target in broken:
        print(f"{page}: ({target}) leads nowhere")
    return 1 if broken else 0


if __name__ == "__main__":
    sys.exit(main())
