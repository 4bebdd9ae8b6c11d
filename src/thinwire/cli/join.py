"""`thinwire join`."""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Annotated

import tyro

from thinwire.cli.train import Train
from thinwire.errors import ConfigurationError

if TYPE_CHECKING:
    from collections.abc import Sequence

    from rich.console import Console


@dataclass(frozen=True, kw_only=True)
class JoinCommand:
    """Take part in a run whose workers come and go: thinwire train --elastic, with all its flags.

    thinwire join 'thinwire://...' --method muloco --out runs/here
    thinwire join s3://my-bucket/runs --run-name first --method muloco --out runs/here
    """

    where: Annotated[str, tyro.conf.Positional, tyro.conf.arg(metavar="TICKET|URL")]
    """The ticket that thinwire lighthouse printed, in quotes, or its HOST:PORT; or the URL of an
    object store, with --run-name."""
    train: Annotated[Train, tyro.conf.arg(name="")] = field(default_factory=Train)

    @classmethod
    def in_force(cls, arguments: Sequence[str]) -> tuple[dict[str, str], str]:
        """As of thinwire train."""
        return Train.in_force(arguments)

    def main(self, console: Console) -> None:
        """Run the command."""
        if self.train.elastic.elastic is not None:
            raise ConfigurationError(
                "join with --elastic",
                because="where the run is has been said before",
                do="leave --elastic out",
            )
        elastic = replace(self.train.elastic, elastic=self.where)
        replace(self.train, elastic=elastic).main(console)
