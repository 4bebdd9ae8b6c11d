"""`thinwire COMMAND`."""

from __future__ import annotations

import inspect
import os
import shutil
import signal
import sys
from collections.abc import Mapping, Sequence
from contextlib import nullcontext
from dataclasses import fields, make_dataclass
from typing import Annotated, Any, Final, Union, get_type_hints

import tyro

from thinwire.cli.compare import CompareCommand
from thinwire.cli.doctor import DoctorCommand
from thinwire.cli.flags import RARE, flag, from_toml
from thinwire.cli.hub import HubCommand
from thinwire.cli.output import lasting_output
from thinwire.cli.plan import PlanCommand
from thinwire.cli.report import ReportCommand
from thinwire.cli.status import StatusCommand
from thinwire.cli.train import JoinCommand, ServeCommand, Train
from thinwire.errors import RunStopped, ThinwireError, UnknownNameError, unknown_name
from thinwire.version import __version__

COMMANDS: Final[Mapping[str, Any]] = {
    "train": Train,
    "join": JoinCommand,
    "hub": HubCommand,
    "serve": ServeCommand,
    "status": StatusCommand,
    "compare": CompareCommand,
    "report": ReportCommand,
    "plan": PlanCommand,
    "doctor": DoctorCommand,
}
"""All commands by their names: dataclasses that tyro builds, with a method main(console)."""

_TO_CONTINUE: Final = {
    "train": "; to continue: the same thinwire train with --resume and --out FOLDER",
    "join": "; to continue: the same thinwire join with --resume and --out FOLDER",
    "compare": "; to continue: the same thinwire compare with --out FOLDER",
    "serve": "; to continue: the same thinwire serve with --out FOLDER",
    "hub": "; to continue: the same thinwire hub",
}
"""Commands that outlive their terminal, because their results go into a folder."""

_OVERVIEW: Final = """\
Train language models on machines that are joined by slow links.

$ thinwire compare --steps 100 --out runs/first     # three methods, one minute
$ thinwire report runs/first --out first.html       # its results, a page that opens offline
$ thinwire train --method muloco --workers 4        # one run, four workers in this process
$ thinwire doctor                                   # checks this machine
$ thinwire COMMAND --help                           # the flags of a command
"""
_MISTYPED: Final = 2
_NARROWEST: Final = 40
"""Columns; in far fewer, tyro never finishes laying out the help."""


def run(arguments: list[str] | None = None) -> int:
    """Run a command; returns the exit status: 2 for a name that does not exist.

    Args:
        arguments: without the program's name; default those of this process.

    Raises:
        SystemExit: wrong flags (status 2), or after showing help (status 0).
    """
    for stream in ("stdout", "stderr"):
        if getattr(sys, stream) is None:  # closed by whoever started this process
            setattr(sys, stream, open(os.devnull, "w"))  # noqa: SIM115 - as long as the process
    if shutil.get_terminal_size().columns < _NARROWEST:
        os.environ["COLUMNS"] = str(_NARROWEST)
    name, *typed = (sys.argv[1:] if arguments is None else arguments) or ["--help"]
    try:
        with lasting_output():
            command = _read(name, typed)
        with lasting_output() if name in _TO_CONTINUE else nullcontext():
            from rich.console import Console

            command.main(Console())
    except RunStopped as stopped:
        return _ended(str(stopped), 128 + signal.SIGTERM)
    except ThinwireError as error:
        why = f"error: {error}".replace("\n", " ")  # messages of libraries may have several lines
        return _ended(why, _MISTYPED if isinstance(error, UnknownNameError) else 1)
    except OSError as error:
        do = "see to the file, disk or address that it names, and repeat the command"
        return _ended(f"error: cannot finish the command; because {error}; do: {do}", 1)
    except KeyboardInterrupt:
        return _ended(f"stopped{_TO_CONTINUE.get(name, '')}", 128 + signal.SIGINT)
    return 0


def _ended(why: str, status: int) -> int:
    with lasting_output():
        sys.stderr.write(f"{why}\n")
    return status


def _read(name: str, arguments: Sequence[str]) -> Any:
    """The command with its flags; exits after help or version, or if flags are wrong."""
    config = (tyro.conf.DisallowNone,)
    if name == "--version":
        sys.stdout.write(f"{__version__}\n")
        sys.exit()
    if name.startswith(("-h", "--help", "--tyro-")):
        kinds = [
            Annotated[kind, tyro.conf.subcommand(each, description=_doc(kind).split("\n")[0])]
            for each, kind in COMMANDS.items()
        ]
        union: Any = Union[tuple(kinds)]  # noqa: UP007 - as many as there are
        args = [name, *arguments]
        return tyro.cli(union, prog="thinwire", description=_OVERVIEW, args=args, config=config)
    if name not in COMMANDS:
        raise unknown_name(f"run thinwire {name}", name, COMMANDS, do="see thinwire --help")
    for before, argument in zip((name, *arguments), arguments, strict=False):
        if not argument or (argument.startswith("--") and argument.endswith("=")):
            raise UnknownNameError(
                f"run thinwire {name} with {argument or before} that is empty",
                because="an empty text names nothing, as that of a shell variable that is not set",
                do="pass a value, or leave it out",
            )
    kind, prog = COMMANDS[name], f"thinwire {name}"
    if {"-h", "--help"} & {*arguments}:
        page = _without_rare(kind)
        return tyro.cli(page, prog=prog, args=arguments, config=config, description=_doc(kind))
    try:
        command = tyro.cli(kind, prog=prog, args=arguments, config=config)
        if (file := getattr(command, "config", None)) is not None:
            args = [*from_toml(file, kind), *arguments]
            command = tyro.cli(kind, prog=prog, args=args, config=config)
    except SystemExit:
        _explain(arguments, kind)
        raise
    return command


def _doc(kind: Any) -> str:
    return inspect.getdoc(kind) or ""


def _without_rare(kind: Any) -> Any:
    """`kind` without the flags that --help leaves out."""
    hidden = [
        (name, tyro.conf.Suppress[hint], None)
        for name, hint in get_type_hints(kind, include_extras=True).items()
        if RARE in getattr(hint, "__metadata__", ())
    ]
    return make_dataclass(kind.__name__, hidden, bases=(kind,), frozen=True, kw_only=True)


def _explain(arguments: Sequence[str], kind: Any) -> None:
    """Say where addresses belong, and flags that `kind` does not have."""
    own = {flag(field.name) for field in fields(kind)}
    given = {argument.partition("=")[0]: None for argument in arguments}
    if "--at" in given or ("--at" not in own and any("://" in each for each in given)):
        sys.stderr.write("the address of a run needs no flag: thinwire join ADDRESS\n")
    for typed in given.keys() - own - {"--at"}:
        if has := [n for n, k in COMMANDS.items() if typed in {flag(f.name) for f in fields(k)}]:
            sys.stderr.write(f"{typed} is a flag of thinwire {', '.join(has)}\n")
