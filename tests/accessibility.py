"""Accessibility of a page in a browser, by axe: contrast of text, names of controls.

axe-core comes in the package axe-playwright-python; nothing is fetched.
"""

from importlib.resources import files
from typing import Any

import pytest

# What fades in is judged as it is in the end.
_STILL = "*, ::before, ::after { transition: none !important; animation: none !important; }"
_RUN = """
axe.run({ resultTypes: ["violations"], preload: false }).then((found) => found.violations.flatMap(
    ({ id, nodes }) => nodes.map(({ html, any, all, none }) =>
        [id, [...any, ...all, ...none].map((check) => check.message).join("; "),
            html.replace(/\\s+/g, " ").slice(0, 200)].join(": "))))
"""


def prepare(page: Any) -> None:
    """Put axe into a page that is loaded."""
    pytest.importorskip("axe_playwright_python", reason="axe-playwright-python is not installed")
    page.add_style_tag(content=_STILL)
    page.evaluate(files("axe_playwright_python").joinpath("axe.min.js").read_text("utf-8"))


def violations(page: Any) -> list[str]:
    """Rule, message and element of each violation on a page that is prepared."""
    return page.evaluate(_RUN)
