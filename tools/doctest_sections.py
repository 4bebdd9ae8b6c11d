"""Shows doctests as examples on the site: an extension of griffe, which parses docstrings there.

A docstring ends in `>>>` lines without a heading, which Markdown takes for nested quotations. So
they get a heading before they are parsed.
"""

import re
import textwrap
from typing import Any

from griffe import Extension, Object

DOCTEST = re.compile(r"^>>> ", re.MULTILINE)


class DoctestSections(Extension):
    """Gives every docstring with a doctest a section of examples."""

    def on_instance(self, *, obj: Object, **_: Any) -> None:
        """Put the heading into one object's docstring."""
        if obj.docstring is not None:
            obj.docstring.value = with_heading(obj.docstring.value)


def with_heading(text: str) -> str:
    """The docstring with `Examples:` before its first doctest."""
    first = DOCTEST.search(text)
    if first is None:
        return text
    return text[: first.start()] + "Examples:\n" + textwrap.indent(text[first.start() :], "    ")
