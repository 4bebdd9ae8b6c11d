"""`thinwire COMMAND`."""

import signal
import sys
from collections.abc import Mapping, Sequence
from contextlib import nullcontext
from typing import Annotated, Any, Final, Union

import tyro

from thinwire.cli.asynchronous import ServeCommand, WorkCommand
from thinwire.cli.compare import CompareCommand
from thinwire.cli.doctor import DoctorCommand
from thinwire.cli.hub import HubCommand
from thinwire.cli.output import lasting_output
from thinwire.cli.plan import PlanCommand
from thinwire.cli.report import ReportCommand
from thinwire.cli.status import StatusCommand
from thinwire.cli.train import JoinCommand, Train
from thinwire.errors import RunStopped, ThinwireError, UnknownNameError, unknown_name

COMMANDS: Final[Mapping[str, type]] = {
    "train": Train,
    "compare": CompareCommand,
    "report": ReportCommand,
    "plan": PlanCommand,
    "hub": HubCommand,
    "join": JoinCommand,
    "status": StatusCommand,
    "doctor": DoctorCommand,
    "serve": ServeCommand,
    "work": WorkCommand,
}
"""All commands by their names: dataclasses that tyro builds, with a method main(console)."""

_GOES_ON: Final = {
    "train": "; to go on: the same thinwire train with --resume and --out FOLDER",
    "join": "; to go on: the same thinwire join with --resume and --out FOLDER",
    "compare": "; to go on: the same thinwire compare with --out FOLDER",
    "serve": "; to go on: the same thinwire serve with --out FOLDER",
    "work": "; to go on: the same thinwire work",
    "hub": "; to go on: the same thinwire hub",
}
"""Commands whose result is in a folder, or that they run: they outlive the terminal."""

_OVERVIEW: Final = """\
Train language models on machines that are joined by slow links.

$ thinwire compare --steps 100 --out runs/first     # three methods, one minute
$ thinwire report runs/first --out first.html       # its results, a page that opens offline
$ thinwire train --method muloco --workers 4        # one run, four workers in this process
$ thinwire doctor                                   # whether this machine can train
$ thinwire COMMAND --help                           # the flags of a command
"""
_MISTYPED: Final = 2
_REPLACED: Final = (
    (
        "lighthouse",
        "workers meet in an object store from 0.3 on",
        "start thinwire hub on one machine, or take a bucket or a shared folder; then thinwire "
        "join STORE --run-name NAME on every worker",
    ),
    (
        "--bucket",
        "--elastic has a fixed number of workers, too, from 0.3 on",
        "pass --elastic in its place, with the same --run-name, --worker and --workers",
    ),
)
"""Commands and flags of earlier versions: why they are gone, and what to do."""


def run(arguments: list[str] | None = None) -> int:
    """Run a command; returns the exit status: 2 where a name that was typed does not exist.

    Args:
        arguments: without the program's name; default those of this process.

    Raises:
        SystemExit: the flags are wrong (status 2), or it was help that was asked for (status 0).
    """
    typed = sys.argv[1:] if arguments is None else arguments
    name = typed[0] if typed else "--help"
    try:
        with lasting_output():
            command = _read(name, typed[1:])
        with lasting_output() if name in _GOES_ON else nullcontext():
            from rich.console import Console

            command.main(Console())
    except RunStopped as stopped:
        return _ended(str(stopped), 128 + signal.SIGTERM)
    except ThinwireError as error:
        return _ended(f"error: {error}", _MISTYPED if isinstance(error, UnknownNameError) else 1)
    except OSError as error:
        do = "see to the file, disk or address that it names, and repeat the command"
        return _ended(f"error: cannot finish the command; because {error}; do: {do}", 1)
    except KeyboardInterrupt:
        return _ended(f"stopped{_GOES_ON.get(name, '')}", 128 + signal.SIGINT)
    return 0


def _read(name: str, arguments: Sequence[str]) -> Any:
    """The command that was typed; does not return where help was asked for, or flags are wrong."""
    for old, because, do in _REPLACED:
        if name == old or any(each.split("=")[0] == old for each in arguments):
            raise UnknownNameError(f"use {old}", because=because, do=do)
    if name not in COMMANDS and not name.startswith(("-h", "--help", "--tyro-")):
        do = "see thinwire --help"
        raise unknown_name(f"run thinwire {name}", name, COMMANDS, do=do)
    for before, argument in zip((name, *arguments), arguments, strict=False):
        if not argument or (argument.startswith("--") and argument.endswith("=")):
            raise UnknownNameError(
                f"run thinwire {name} with {argument or before} that is empty",
                because="an empty text names nothing, as that of a shell variable that is not set",
                do="pass a value, or leave it out",
            )
    config = (tyro.conf.DisallowNone,)
    if name in COMMANDS:
        return tyro.cli(COMMANDS[name], prog=f"thinwire {name}", args=arguments, config=config)
    kinds = [
        Annotated[kind, tyro.conf.subcommand(each, description=(kind.__doc__ or "").split("\n")[0])]
        for each, kind in COMMANDS.items()
    ]
    union: Any = Union[tuple(kinds)]  # noqa: UP007 - as many as there are
    args = [name, *arguments]
    return tyro.cli(union, prog="thinwire", description=_OVERVIEW, args=args, config=config)


def _ended(why: str, status: int) -> int:
    with lasting_output():
        sys.stderr.write(f"{why}\n")
    return status
