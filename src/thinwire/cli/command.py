"""`thinwire COMMAND`."""

import io
import signal
import sys
from collections.abc import Mapping, Sequence
from contextlib import nullcontext, redirect_stderr
from typing import Annotated, Any, Final, Union, cast

import tyro

from thinwire.cli.asynchronous import ServeCommand, WorkCommand
from thinwire.cli.compare import CompareCommand
from thinwire.cli.doctor import DoctorCommand
from thinwire.cli.extras import install_text
from thinwire.cli.flag_descriptions import describe_flags
from thinwire.cli.help_text import command_help, first_steps, overview
from thinwire.cli.join import JoinCommand
from thinwire.cli.lighthouse import LighthouseCommand
from thinwire.cli.output import lasting_output
from thinwire.cli.plan import PlanCommand
from thinwire.cli.refusal import empty_value, refusal, unknown_command
from thinwire.cli.report import ReportCommand
from thinwire.cli.status import StatusCommand
from thinwire.cli.train import Train
from thinwire.errors import RunStopped, ThinwireError, UnknownNameError

_GROUPS: Final[Mapping[str, Mapping[str, type]]] = {
    "train, compare and plan": {
        "train": Train,
        "compare": CompareCommand,
        "report": ReportCommand,
        "plan": PlanCommand,
    },
    "workers that come and go, over the internet": {
        "lighthouse": LighthouseCommand,
        "join": JoinCommand,
        "status": StatusCommand,
        "doctor": DoctorCommand,
    },
    "workers that do not wait for each other": {"serve": ServeCommand, "work": WorkCommand},
}
COMMANDS: Final[Mapping[str, type]] = {
    name: command for group in _GROUPS.values() for name, command in group.items()
}
"""All commands by their names: dataclasses that tyro builds, with a method main(console)."""

# What they are run for lies in a folder, or is that they run.
_OUTLIVE_THE_TERMINAL: Final = (
    Train,
    JoinCommand,
    CompareCommand,
    ServeCommand,
    WorkCommand,
    LighthouseCommand,
)
_GOES_ON: Final[Mapping[type, str]] = {
    Train: "the same thinwire train with --resume and --out FOLDER",
    JoinCommand: "the same thinwire join with --resume and --out FOLDER",
    CompareCommand: "the same thinwire compare with --out FOLDER",
    ServeCommand: "the same thinwire serve with --out FOLDER",
    WorkCommand: "the same thinwire work",
}
_MISTYPED: Final = 2


def run(arguments: list[str] | None = None) -> int:
    """Run a command; returns the exit status: 2 where a name that was typed does not exist.

    Args:
        arguments: without the program's name; default those of this process.

    Raises:
        SystemExit: the flags are wrong (status 2), or it was help that was asked for (status 0).
    """
    typed = sys.argv[1:] if arguments is None else arguments
    try:
        command = _read(typed)
    except ThinwireError as error:
        return _ended(f"error: {error}", 1)
    try:
        with lasting_output() if isinstance(command, _OUTLIVE_THE_TERMINAL) else nullcontext():
            from rich.console import Console

            command.main(Console())
    except RunStopped as stopped:
        return _ended(str(stopped), 128 + signal.SIGTERM)
    except UnknownNameError as error:
        return _ended(f"error: {error}", _MISTYPED)
    except ThinwireError as error:
        return _ended(f"error: {error}", 1)
    except ModuleNotFoundError as error:
        do = install_text(error)
        return _ended(f"error: cannot finish the command; because {error}; do: {do}", 1)
    except OSError as error:
        do = "see to the file, disk or address that it names, and repeat the command"
        return _ended(f"error: cannot finish the command; because {error}; do: {do}", 1)
    except KeyboardInterrupt:
        do = next((do for kind, do in _GOES_ON.items() if isinstance(command, kind)), "")
        return _ended(f"stopped; to go on: {do}" if do else "stopped", 130)
    return 0


def _read(typed: Sequence[str]) -> Any:
    """The command that was typed; does not return where help was asked for, or flags are wrong."""
    if not typed:
        raise _shown(first_steps())
    name, *arguments = typed
    if name in ("-h", "--help"):
        raise _shown(overview(_GROUPS))
    if name.startswith("--tyro-"):  # completions for a shell
        return tyro.cli(_union(), prog="thinwire", args=list(typed))
    if name not in COMMANDS:
        raise _refused(unknown_command(name, COMMANDS))
    if "-h" in arguments or "--help" in arguments:
        raise _shown(_help(name, arguments))
    empty = empty_value(name, arguments)
    if empty is not None:
        raise _refused(empty)
    said = io.StringIO()
    try:
        with redirect_stderr(said):
            prog = f"thinwire {name}"
            command = tyro.cli(COMMANDS[name], prog=prog, args=arguments, add_help=False)
    except SystemExit as ended:
        why = refusal(name, COMMANDS, arguments)
        if why is None:
            sys.stderr.write(said.getvalue())
            raise
        raise _refused(why) from ended
    lists = [flag for flag in describe_flags(COMMANDS[name]).values() if flag.is_list]
    if any(flag.is_required and not getattr(command, flag.name) for flag in lists):
        # tyro takes no values for a list, too.
        why = refusal(name, COMMANDS, arguments)
        assert why is not None
        raise _refused(why)
    return command


def _help(name: str, arguments: Sequence[str]) -> str:
    command = cast(Any, COMMANDS[name])
    if not hasattr(command, "in_force"):
        return command_help(name, command, {})
    in_force, where_from = command.in_force(arguments)
    return command_help(name, command, in_force, where_from=where_from)


def _union() -> Any:
    named = [Annotated[kind, tyro.conf.subcommand(name)] for name, kind in COMMANDS.items()]
    return Union[tuple(named)]  # noqa: UP007 - as many as there are


def _shown(text: str) -> SystemExit:
    with lasting_output():
        sys.stdout.write(text)
        sys.stdout.flush()
    return SystemExit(0)


def _refused(error: ThinwireError) -> SystemExit:
    return SystemExit(_ended(f"error: {error}", _MISTYPED))


def _ended(why: str, status: int) -> int:
    with lasting_output():
        # The interpreter would try to write once more what could not be written before.
        sys.stdout.flush()
        sys.stderr.write(f"{why}\n")
    return status
