"""The documentation site builds, fits a phone, and asks no other host for anything."""

import json
import os
import shutil
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from accessibility import prepare, violations

ROOT = Path(__file__).parents[2]
CHROMIUM = shutil.which("chromium") or shutil.which("google-chrome")
# A report has tests of its own, and a server shows the other one in the place of what is missing.
ELSEWHERE = {"report-example.html", "404.html"}
NOT_COPIED = {".git", ".venv", ".cache", "build", "dist", "runs", "site"}


def test_every_page_is_in_the_navigation() -> None:
    pytest.importorskip("griffe", reason="the extra docs is not installed")
    import docs_site

    assert docs_site.pages_out_of_navigation() == set()


@pytest.fixture(scope="module")
def site(tmp_path_factory) -> Path:
    """Built without a dead link, and with a docstring for each object of the reference."""
    pytest.importorskip("zensical")
    copy = tmp_path_factory.mktemp("docs") / "copy"
    shutil.copytree(
        ROOT, copy, ignore=lambda folder, _: NOT_COPIED if Path(folder) == ROOT else {"__pycache__"}
    )
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


@pytest.mark.slow
@pytest.mark.timeout(1800)  # minutes, and more on a busy machine
@pytest.mark.parametrize("scheme", ["light", "dark"])
def test_every_built_page_fits_can_be_read_and_asks_nothing(site: Path, scheme: str) -> None:
    sync_api = pytest.importorskip("playwright.sync_api", reason="playwright is not installed")
    if CHROMIUM is None:
        pytest.skip("chromium is not installed")
    files = [file for file in sorted(site.rglob("*.html")) if file.name not in ELSEWHERE]
    assert len(files) > 40
    with sync_api.sync_playwright() as playwright:
        browser = playwright.chromium.launch(
            executable_path=CHROMIUM, args=["--no-sandbox", "--disable-gpu"]
        )
        context = browser.new_context(color_scheme=scheme)
        flaws = [f"{f.relative_to(site)}: {flaw}" for f in files for flaw in flaws_of(f, context)]
        browser.close()
    assert flaws == []


def flaws_of(file: Path, context: Any) -> Iterator[str]:
    page, logged = context.new_page(), []
    page.on("console", lambda message: logged.append(message.text))
    page.on("pageerror", lambda error: logged.append(str(error)))
    page.on("request", lambda request: logged.append(request.url))
    page.set_viewport_size({"width": 1600, "height": 900})
    page.goto(file.as_uri(), wait_until="networkidle")
    prepare(page)
    for width in (1600, 800, 400):
        page.set_viewport_size({"width": width, "height": 900})
        page.wait_for_timeout(100)  # its script finds out what scrolls now
        wide = page.evaluate("document.documentElement.scrollWidth")
        if wide > width:
            yield f"is {wide} wide in a window of {width}"
        if width != 800:
            yield from (f"{width} wide: {flaw}" for flaw in violations(page))
    yield from (text for text in logged if not text.startswith(("file:", "data:", "blob:")))
    page.close()


@pytest.mark.slow
def test_every_object_of_the_reference_is_in_the_index_of_the_search(site: Path) -> None:
    import docs_site

    index = json.loads((site / "search.json").read_text(encoding="utf-8"))
    found = {item["location"].partition("#")[2] for item in index["items"]}
    assert [name for name in docs_site.identifiers() if name not in found] == []
