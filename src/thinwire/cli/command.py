"""`thinwire COMMAND`."""

import signal
import sys
from contextlib import nullcontext
from typing import Annotated, Final, TypeAlias

import tyro

from thinwire.cli.asynchronous import ServeCommand, WorkCommand
from thinwire.cli.bench import BenchCommand
from thinwire.cli.compare import CompareCommand
from thinwire.cli.doctor import DoctorCommand
from thinwire.cli.extras import install_text
from thinwire.cli.join import JoinCommand
from thinwire.cli.lighthouse import LighthouseCommand
from thinwire.cli.output import lasting_output
from thinwire.cli.plan import PlanCommand
from thinwire.cli.report import ReportCommand
from thinwire.cli.status import StatusCommand
from thinwire.cli.train import Train
from thinwire.errors import RunStopped, ThinwireError

__all__ = ["Command", "run"]

Command: TypeAlias = (
    Annotated[Train, tyro.conf.subcommand("train")]
    | Annotated[JoinCommand, tyro.conf.subcommand("join")]
    | Annotated[CompareCommand, tyro.conf.subcommand("compare")]
    | Annotated[PlanCommand, tyro.conf.subcommand("plan")]
    | Annotated[ReportCommand, tyro.conf.subcommand("report")]
    | Annotated[BenchCommand, tyro.conf.subcommand("bench")]
    | Annotated[ServeCommand, tyro.conf.subcommand("serve")]
    | Annotated[WorkCommand, tyro.conf.subcommand("work")]
    | Annotated[LighthouseCommand, tyro.conf.subcommand("lighthouse")]
    | Annotated[StatusCommand, tyro.conf.subcommand("status")]
    | Annotated[DoctorCommand, tyro.conf.subcommand("doctor")]
)

# What they are run for lies in a folder, or is that they run.
_OUTLIVE_THE_TERMINAL: Final = (
    Train,
    JoinCommand,
    CompareCommand,
    ServeCommand,
    WorkCommand,
    LighthouseCommand,
)


def run(arguments: list[str] | None = None) -> int:
    """Run a command; returns the exit status.

    Args:
        arguments: without the program's name; default those of this process.
    """
    command = tyro.cli(Command, prog="thinwire", args=arguments)  # pyright: ignore
    try:
        with lasting_output() if isinstance(command, _OUTLIVE_THE_TERMINAL) else nullcontext():
            from rich.console import Console

            command.main(Console())
    except RunStopped as stopped:
        return _ended(str(stopped), 128 + signal.SIGTERM)
    except ThinwireError as error:
        return _ended(f"error: {error}", 1)
    except ModuleNotFoundError as error:
        do = install_text(error)
        return _ended(f"error: cannot finish the command; because {error}; do: {do}", 1)
    except OSError as error:
        do = "see to the file, disk or address that it names, and repeat the command"
        return _ended(f"error: cannot finish the command; because {error}; do: {do}", 1)
    except KeyboardInterrupt:
        do = (
            "the same thinwire train with --resume and --out FOLDER, "
            "or the same thinwire compare with --out FOLDER"
        )
        return _ended(f"stopped; to go on: {do}", 130)
    return 0


def _ended(why: str, status: int) -> int:
    with lasting_output():
        # The interpreter would try to write once more what could not be written before.
        sys.stdout.flush()
        sys.stderr.write(f"{why}\n")
    return status
