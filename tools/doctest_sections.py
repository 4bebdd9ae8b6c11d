"""Examples in docstrings as examples on the site, for griffe, which reads docstrings there.

A docstring ends in `>>>` lines without a heading. Markdown takes these for nested quotations, so
text sections are cut at them, and what follows becomes a section of examples.
"""

from typing import Any

from griffe import (
    Docstring,
    DocstringSectionExamples,
    DocstringSectionKind,
    DocstringSectionText,
    Extension,
    Object,
)


class DoctestSections(Extension):
    """Gives every docstring with a doctest a section of examples."""

    def on_instance(self, *, obj: Object, **_: Any) -> None:
        """Replace the parsed sections of one object."""
        if obj.docstring is not None and ">>>" in obj.docstring.value:
            obj.docstring.__dict__["parsed"] = sections(obj.docstring)


def sections(docstring: Docstring) -> list[Any]:
    """The sections of a docstring, each doctest in text as examples."""
    found: list[Any] = []
    for section in docstring.parse(docstring.parser or "google"):
        if section.kind is not DocstringSectionKind.text or ">>>" not in section.value:
            found.append(section)
            continue
        text, mark, example = section.value.partition(">>>")
        if text.strip():
            found.append(DocstringSectionText(text.strip()))
        found.append(
            DocstringSectionExamples([(DocstringSectionKind.examples, mark + example.rstrip())])
        )
    return found
