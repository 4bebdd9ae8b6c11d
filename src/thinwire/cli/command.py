"""`thinwire COMMAND`."""

import re
import shlex
import signal
import sys
from collections.abc import Mapping, Sequence
from contextlib import nullcontext
from typing import Annotated, Any, Final, Union

import tyro

from thinwire.cli.asynchronous import ServeCommand
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
}
"""All commands by their names: dataclasses that tyro builds, with a method main(console)."""

_GOES_ON: Final = {
    "train": "; to go on: the same thinwire train with --resume and --out FOLDER",
    "join": "; to go on: the same thinwire join with --resume and --out FOLDER",
    "compare": "; to go on: the same thinwire compare with --out FOLDER",
    "serve": "; to go on: the same thinwire serve with --out FOLDER",
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
        "join s3://BUCKET/RUN, or the like, on every worker",
    ),
    (
        "work",
        "the workers of thinwire serve join its run from 0.3 on",
        "thinwire join 's3://BUCKET/RUN?workers=K&worker=0' --asynchronous, or the like",
    ),
)
"""Commands of earlier versions: why they are gone, and what to do."""

_OLDER: Final = ("--elastic", "--bucket", "--run-name", "--worker")
"""Flags of version 0.2 that are parts of an address now."""


def run(arguments: list[str] | None = None) -> int:
    """Run a command; returns the exit status: 2 where a name that was typed does not exist.

    Args:
        arguments: without the program's name; default those of this process.

    Raises:
        SystemExit: the flags are wrong (status 2), or it was help that was asked for (status 0).
    """
    typed = modern(sys.argv[1:] if arguments is None else arguments)
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
        if name == old:
            raise UnknownNameError(f"run thinwire {old}", because=because, do=do)
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


def modern(arguments: Sequence[str]) -> list[str]:
    """`arguments` with an address in place of the flags that version 0.2 had for it.

    >>> modern("train --elastic s3://b --run-name a --worker 1 --workers 2 --seed 3".split())
    ['join', 's3://b/a?workers=2&worker=1', '--seed', '3']
    >>> modern("status s3://b --run-name a".split())
    ['status', 's3://b/a']
    """
    name, *rest = arguments or [""]
    taken: dict[str, str] = {}
    kept: list[str] = []
    typed = iter(rest)
    for argument in typed:
        flag, equals, value = argument.partition("=")
        if flag in (*_OLDER, "--workers"):
            taken[flag] = value if equals else next(typed, "")
        else:
            kept.append(argument)
    place = taken.get("--elastic") or taken.get("--bucket")
    if place is None and kept and "://" in kept[0]:
        place = kept.pop(0)
    is_older = bool(place) and any(flag in taken for flag in _OLDER)
    if not is_older or name not in ("train", "join", "work", "serve", "status", "doctor"):
        return list(arguments)
    scheme, separator, where = str(place).partition("://")
    run = taken.get("--run-name")
    # The line that a hub prints has the run already.
    if run is not None and not (scheme == "hub" and where.endswith(f"/{run}")):
        where = f"{where.rstrip('/')}/{run}"
    workers = taken.get("--workers")
    if "--worker" in taken:
        count = "" if workers is None else f"workers={workers}&"
        where += f"?{count}worker={taken['--worker']}"
    elif workers is not None:
        kept += ["--workers", workers]
    command = "join" if name in ("train", "work") else name
    more = ["--asynchronous"] if name == "work" else []
    found = [command, f"{scheme}{separator}{where}", *more, *kept]
    shown = re.sub(r"(?<=hub://)[^@/]*@", "TOKEN@", shlex.join(found))
    sys.stderr.write(f"from 0.3 on: thinwire {shown}\n")
    return found


def _ended(why: str, status: int) -> int:
    with lasting_output():
        sys.stderr.write(f"{why}\n")
    return status
