"""Accessibility of a page in a browser, by axe: contrast of text, names of controls.

The package axe-playwright-python ships axe-core; nothing is fetched.
"""

from importlib.resources import files
from typing import Any

import pytest

# Elements that fade in are judged in their final state.
_STILL = "*, ::before, ::after { transition: none !important; animation: none !important; }"
_RUN = """
axe.run({ resultTypes: ["violations"], preload: false }).then((found) => found.violations.flatMap(
    ({ id, nodes }) => nodes.map(({ html, any, all, none }) =>
        [id, [...any, ...all, ...none].map((check) => check.message).join("; "),
            html.replace(/\\s+/g, " ").slice(0, 200)].join(": "))))
"""


def prepare(page: Any) -> None:
    """Inject axe into a loaded page."""
    pytest.importorskip("axe_playwright_python", reason="axe-playwright-python is not installed")
    page.add_style_tag(content=_STILL)
    page.evaluate(files("axe_playwright_python").joinpath("axe.min.js").read_text("utf-8"))


def violations(page: Any) -> list[str]:
    """Rule, message and element of each violation on a prepared page."""
    return page.evaluate(_RUN)
