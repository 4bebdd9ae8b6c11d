"""The documentation site: it builds, it fits a phone, and it asks no other host for anything."""

import base64
import os
import re
import shutil
import subprocess
import sys
from collections.abc import Generator
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

ROOT = Path(__file__).parents[2]
CHROMIUM = shutil.which("chromium") or shutil.which("google-chrome")
PAGES = (
    "index.html",
    "tutorials/one-outer-step.html",
    "tutorials/own-loop.html",
    "methods/muloco.html",
    "reference/loop.html",
    "evidence.html",
)
NOT_COPIED = {".git", ".venv", ".cache", "build", "dist", "runs", "site"}
# As WCAG 2 defines the contrast of two colours of opaque text and background.
CONTRAST = """
(selector) => {
  const numbers = (text) => text.match(/[\\d.]+/g).map(Number);
  const over = (top, under) => {
    const [r, g, b, a = 1] = top;
    return [r, g, b].map((value, i) => a * value + (1 - a) * under[i]);
  };
  const luminance = (rgb) => {
    const [r, g, b] = rgb.map((v) => {
      const s = v / 255;
      return s <= 0.03928 ? s / 12.92 : ((s + 0.055) / 1.055) ** 2.4;
    });
    return 0.2126 * r + 0.7152 * g + 0.0722 * b;
  };
  const element = document.querySelector(selector);
  const behind = [];
  let opacity = 1;
  for (let e = element; e; e = e.parentElement) {
    behind.unshift(numbers(getComputedStyle(e).backgroundColor));
    opacity *= getComputedStyle(e).opacity;
  }
  const ground = behind.reduce((under, top) => over(top, under), [255, 255, 255]);
  const [r, g, b, a = 1] = numbers(getComputedStyle(element).color);
  const [x, y] = [luminance(over([r, g, b, a * opacity], ground)), luminance(ground)];
  return (Math.max(x, y) + 0.05) / (Math.min(x, y) + 0.05);
}
"""


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


@pytest.mark.parametrize("scheme", ["light", "dark"])
@pytest.mark.parametrize("name", PAGES)
def test_a_built_page_fits_a_phone_and_says_nothing(
    site: Path, browser: Any, name: str, scheme: str
) -> None:
    context = browser.new_context(viewport={"width": 400, "height": 800}, color_scheme=scheme)
    page, said = context.new_page(), []
    page.on("console", lambda message: said.append(message.text))
    page.on("pageerror", lambda error: said.append(str(error)))
    page.on("request", lambda request: said.append(request.url))
    page.goto((site / name).as_uri(), wait_until="networkidle")
    assert [text for text in said if not text.startswith(("file:", "data:", "blob:"))] == []
    assert page.evaluate("document.documentElement.scrollWidth <= window.innerWidth")
    assert page.evaluate("document.body.dataset.mdColorScheme") == (
        "slate" if scheme == "dark" else "default"
    )
    context.close()


@pytest.mark.parametrize("scheme", ["light", "dark"])
def test_small_text_of_a_built_page_can_be_read(site: Path, browser: Any, scheme: str) -> None:
    context = browser.new_context(viewport={"width": 1600, "height": 900}, color_scheme=scheme)
    page = context.new_page()
    page.goto((site / "reference" / "loop.html").as_uri(), wait_until="networkidle")
    for selector in (
        ".md-content p",
        ".doc-labels code",
        ".md-nav--primary a.md-nav__link--active .md-ellipsis",
    ):
        assert page.evaluate(CONTRAST, selector) >= 4.5, selector
    context.close()
