"""Why a command line is refused, in the words of all other errors."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from typing import Final

from thinwire.cli.flag_descriptions import FlagDescription, describe_flags
from thinwire.errors import ConfigurationError, ThinwireError, unknown_name

_NUMBERS: Final = {int: "a whole number", float: "a number"}


def unknown_command(name: str, commands: Collection[str]) -> ThinwireError:
    """The error for a first word that is not a command.

    Args:
        name: as it was typed.
        commands: those there are.

    >>> unknown_command("trian", ["train", "plan"]).do
    "did you mean 'train'? otherwise see thinwire --help"
    """
    if _is_flag(name):
        return ConfigurationError(
            f"run thinwire {name}",
            because="flags come after a command",
            do="pass a command first; see thinwire --help",
        )
    because = f"the commands are {', '.join(commands)}"
    return unknown_name(
        f"run thinwire {name}", name, commands, because=because, do="see thinwire --help"
    )


def empty_value(command: str, arguments: Sequence[str]) -> ThinwireError | None:
    """The error for a value that is empty, as one of a shell's variable that is not set; or None.

    Args:
        command: its name.
        arguments: those after it.
    """
    for before, argument in zip(["", *arguments], arguments, strict=False):
        name, equals, value = argument.partition("=")
        if argument and not (equals and not value and _is_flag(name)):
            continue
        what = name or (before if _is_flag(before) else "an argument")
        return ConfigurationError(
            f"run thinwire {command} with {what} that is empty",
            because="an empty text names nothing",
            do="pass a value, or leave it out",
        )
    return None


def refusal(
    command: str, commands: Mapping[str, type], arguments: Sequence[str]
) -> ThinwireError | None:
    """What is wrong with the arguments of a command; None if it is something else.

    tyro decides whether a command line is refused; this only finds the words for it.

    Args:
        command: its name.
        commands: by their names, the classes that tyro builds.
        arguments: those after the command's name.
    """
    flags = describe_flags(commands[command])
    positional = [flag for flag in flags.values() if flag.is_positional]
    seen: set[str] = set()
    rest = list(arguments)
    while rest:
        argument = rest.pop(0)
        if not _is_flag(argument):
            if not positional:
                return _superfluous(command, argument)
            flag = positional[0]
            rest.insert(0, argument)
            if not flag.is_list:
                del positional[0]
        else:
            name, equals, value = argument[2:].partition("=")
            flag = flags.get(name.replace("_", "-"))
            if flag is None or flag.is_positional or not argument.startswith("--"):
                return _unknown_flag(command, commands, argument.partition("=")[0])
            if equals:
                rest.insert(0, value)
            if flag.is_switch:
                continue
        seen.add(flag.name)
        values = _taken(rest, flag)
        wrong = _wrong_values(command, flag, values)
        if wrong is not None:
            return wrong
    return _missing(command, [f for f in flags.values() if f.is_required and f.name not in seen])


def _is_flag(text: str) -> bool:
    if not text.startswith("-") or text == "-":
        return False
    try:
        float(text)
    except ValueError:
        return True
    return False  # a number below 0


def _taken(rest: list[str], flag: FlagDescription) -> list[str]:
    """The values of a flag, taken from the arguments that are left."""
    taken: list[str] = []
    while rest and not _is_flag(rest[0]) and (flag.is_list or not taken):
        taken.append(rest.pop(0))
    return taken


def _wrong_values(
    command: str, flag: FlagDescription, values: Sequence[str]
) -> ThinwireError | None:
    if not values:
        return ConfigurationError(
            f"run thinwire {command} with {flag.typed} alone",
            because="its value is missing",
            do=f"pass {flag.typed} {flag.metavar}",
        )
    for value in values:
        if flag.choices and value not in flag.choices:
            return unknown_name(f"take {value!r} as {flag.typed}", value, flag.choices)
        if flag.value_type in _NUMBERS:
            try:
                flag.value_type(value)
            except ValueError:
                return ConfigurationError(
                    f"take {value!r} as {flag.typed}",
                    because=f"it is not {_NUMBERS[flag.value_type]}",
                    do=f"pass {flag.typed} {flag.metavar}; see thinwire {command} --help",
                )
    return None


def _unknown_flag(command: str, commands: Mapping[str, type], typed: str) -> ThinwireError:
    name = typed.lstrip("-").replace("_", "-")
    others = [c for c, kind in commands.items() if name in describe_flags(kind)]
    because = f"it is a flag of thinwire {others[0]}" if others else "it has no such flag"
    own = [f"--{f.name}" for f in describe_flags(commands[command]).values() if not f.is_positional]
    return unknown_name(
        f"run thinwire {command} with {typed}",
        f"--{name}",
        own,
        because=because,
        do=f"see thinwire {command} --help",
    )


def _superfluous(command: str, argument: str) -> ThinwireError:
    return ConfigurationError(
        f"run thinwire {command} with {argument!r}",
        because="no flag before it takes it, and the command takes no more values of its own",
        do=f"leave it out, or put its flag before it; see thinwire {command} --help",
    )


def _missing(command: str, missing: Sequence[FlagDescription]) -> ThinwireError | None:
    if not missing:
        return None
    flag = missing[0]
    typed = flag.typed if flag.is_positional else f"{flag.typed} {flag.metavar}"
    return ConfigurationError(
        f"run thinwire {command} without {flag.typed}",
        because=f"the command needs it: {flag.text.rstrip('.')}",
        do=f"pass {typed}",
    )
