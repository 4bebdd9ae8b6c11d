"""What `thinwire`, `thinwire --help` and `thinwire COMMAND --help` print."""

from __future__ import annotations

import inspect
import os
import shutil
import sys
import textwrap
from collections.abc import Iterator, Mapping, Sequence
from typing import Final

from thinwire.cli.flag_descriptions import FlagDescription, describe_flags, group_names

_WIDEST: Final = 100
_NARROWEST: Final = 40
_BESIDE: Final = 70
"""Columns from which on a flag's text stands beside it, and not below."""
_LONGEST: Final = 22
"""Characters of a flag with its metavar, beyond which its text begins on the next line."""

_FIRST_STEPS: Final = """\
thinwire trains language models on machines that are joined by slow links.

  thinwire compare --steps 100 --out runs/first     a first comparison: three methods, one minute
  thinwire report runs/first --out first.html       its results, a page that opens offline
  thinwire train --method muloco --workers 4        one run, four workers in this process
  thinwire plan --parameters 10B --layers 48 --workers 2 --step-time 0.8s --bandwidth 10Gbit/s
                                                    what a link allows, before you rent it
  thinwire doctor                                   whether this machine has what it takes

thinwire --help lists all commands, thinwire COMMAND --help the flags of one. Over a network:
thinwire lighthouse --help, thinwire join --help. Documentation: README.md and docs/index.md.
"""


def first_steps() -> str:
    """What a newcomer can do next."""
    return _FIRST_STEPS


def overview(commands: Mapping[str, Mapping[str, type]]) -> str:
    """All commands, one line each.

    Args:
        commands: heading to name to the class that tyro builds.
    """
    lines = ["usage: thinwire COMMAND [flags]", ""]
    column = 2 + max(len(name) for group in commands.values() for name in group) + 2
    for heading, group in commands.items():
        lines.append(_bold(heading))
        for name, command in group.items():
            first = _paragraphs(command)[0]
            lines += _beside(f"  {name}", first.partition(". ")[0].rstrip("."), column)
        lines.append("")
    lines.append("thinwire COMMAND --help shows the flags of one, with the values in force.")
    return "\n".join(lines) + "\n"


def command_help(
    name: str, command: type, in_force: Mapping[str, str], *, where_from: str = ""
) -> str:
    """What a command is for, its flags in groups, and examples.

    Args:
        name: of the command.
        command: the class that tyro builds.
        in_force: by the name of a flag, what holds without it, where the field's own default does
            not say so.
        where_from: what these values come from.
    """
    flags = describe_flags(command)
    positional = [flag for flag in flags.values() if flag.is_positional]
    typed = "".join(
        f" {flag.metavar}" if flag.is_required else f" [{flag.metavar}]" for flag in positional
    )
    texts = _paragraphs(command)
    examples = [text for text in texts if text.startswith("thinwire ")]
    lines = [f"usage: thinwire {name}{typed} [flags]"]
    for text in [*(text for text in texts if text not in examples), where_from]:
        lines += ["", *textwrap.wrap(text, _width(), break_on_hyphens=False)] if text else []
    lines += [line for flag in positional for line in ("", *_flag_lines(flag, in_force))]
    for group in group_names():
        members = [f for f in flags.values() if f.group == group and not f.is_positional]
        if members:
            lines += ["", _bold(group)]
            lines += [line for flag in members for line in _flag_lines(flag, in_force)]
    if examples:
        lines += ["", _bold("examples")]
        lines += [f"  {line}" for text in examples for line in text.splitlines()]
    return "\n".join(lines) + "\n"


def _flag_lines(flag: FlagDescription, in_force: Mapping[str, str]) -> Sequence[str]:
    typed = flag.typed if flag.is_positional or flag.is_switch else f"{flag.typed} {flag.metavar}"
    said = flag.text.rstrip(".")
    default = in_force.get(flag.name, "")
    if (
        not default
        and not flag.is_switch
        and not flag.is_required
        and flag.default not in (None, ())
    ):
        default = str(flag.default)
    if flag.is_required and not flag.is_positional:
        said += " (required)"
    elif default:
        said += f" (default: {default})"
    return _beside(f"  {typed}", said, _LONGEST + 4)


def _beside(typed: str, said: str, column: int) -> list[str]:
    """`typed`, and what is said of it, beside it where there is room."""
    width = _width()
    if width < _BESIDE:
        return [typed, *_wrapped(said, width, indent=6)]
    lines = _wrapped(said, width, indent=column)
    if len(typed) + 2 > column:
        # A longer one still stands on one line with its text where both fit.
        together = f"{typed}  {said}"
        return [together] if len(together) <= width else [typed, *lines]
    return [typed.ljust(column) + lines[0].lstrip(), *lines[1:]] if lines else [typed]


def _wrapped(text: str, width: int, *, indent: int) -> list[str]:
    space = " " * indent
    return textwrap.wrap(
        text,
        width,
        initial_indent=space,
        subsequent_indent=space,
        break_on_hyphens=False,
        break_long_words=False,
    )


def _paragraphs(command: type) -> list[str]:
    """Those of a class's docstring; examples keep their lines, all else is on one."""
    return list(_joined(inspect.getdoc(command) or ""))


def _joined(doc: str) -> Iterator[str]:
    for paragraph in doc.split("\n\n"):
        text = textwrap.dedent(paragraph).strip()
        yield text if text.startswith("thinwire ") else " ".join(text.split())


def _width() -> int:
    columns = shutil.get_terminal_size((_WIDEST, 24)).columns
    return max(_NARROWEST, min(columns, _WIDEST))


def _bold(text: str) -> str:
    plain = (
        not sys.stdout.isatty() or os.environ.get("NO_COLOR") or os.environ.get("TERM") == "dumb"
    )
    return text if plain else f"\x1b[1m{text}\x1b[0m"
