"""`thinwire COMMAND`."""

from typing import Annotated, TypeAlias

import tyro
from rich.console import Console

from thinwire.cli.bench import Bench
from thinwire.cli.compare import Compare
from thinwire.cli.doctor import Doctor
from thinwire.cli.lighthouse import Lighthouse
from thinwire.cli.plan import Plan
from thinwire.cli.report import Report
from thinwire.cli.train import Train
from thinwire.errors import ThinwireError

__all__ = ["Command", "run"]

Command: TypeAlias = (
    Annotated[Train, tyro.conf.subcommand("train")]
    | Annotated[Compare, tyro.conf.subcommand("compare")]
    | Annotated[Plan, tyro.conf.subcommand("plan")]
    | Annotated[Report, tyro.conf.subcommand("report")]
    | Annotated[Bench, tyro.conf.subcommand("bench")]
    | Annotated[Lighthouse, tyro.conf.subcommand("lighthouse")]
    | Annotated[Doctor, tyro.conf.subcommand("doctor")]
)


def run(arguments: list[str] | None = None) -> int:
    """Run a command; returns the exit status.

    Args:
        arguments: without the program's name; default those of this process.
    """
    command = tyro.cli(Command, prog="thinwire", args=arguments)  # pyright: ignore
    try:
        command.main(Console())
    except ThinwireError as error:
        Console(stderr=True).print(f"error: {error}", highlight=False, markup=False, soft_wrap=True)
        return 1
    except KeyboardInterrupt:
        Console(stderr=True).print(
            "stopped; to go on: the same thinwire train with --resume and --out FOLDER, "
            "or the same thinwire compare with --out FOLDER"
        )
        return 130
    return 0
