"""The flags of `thinwire train --elastic`."""

from __future__ import annotations

from dataclasses import dataclass, fields
from pathlib import Path
from typing import TYPE_CHECKING, final

from thinwire.cli.tickets import address_in
from thinwire.errors import ConfigurationError

if TYPE_CHECKING:
    from thinwire.train.workers.elastic import ElasticConfig

__all__ = ["ElasticFlags"]


@final
@dataclass(frozen=True, kw_only=True)
class ElasticFlags:
    """Makes this process one worker of an elastic run; each has its own --out."""

    elastic: str | None = None
    """Ticket or HOST:PORT of thinwire lighthouse: train one worker, which may join and leave.
    --workers then says for how many workers the global batch is meant."""
    identity: str | None = None
    """This worker's name, the same after a restart; default the name of --out and of this host."""
    token_file: Path | None = None
    """Holds the run's token; default the environment variable THINWIRE_TOKEN."""
    patience: float | None = None
    """Share of a round that a slow worker is waited for."""
    min_workers: int | None = None
    """With fewer workers a round waits for more."""

    def config(self) -> ElasticConfig | None:
        """How this worker takes part, or None without --elastic.

        Raises:
            ConfigurationError: a flag that means nothing without --elastic.
        """
        given = {f.name: v for f in fields(self) if (v := getattr(self, f.name)) is not None}
        lighthouse = given.pop("elastic", None)
        if lighthouse is not None:
            from thinwire.train.workers.elastic import ElasticConfig

            return ElasticConfig(lighthouse=address_in(lighthouse), **given)
        if given:
            flag = "--" + next(iter(given)).replace("_", "-")
            raise ConfigurationError(
                f"use {flag} without --elastic",
                because="it says how a worker takes part in an elastic run",
                do=f"add --elastic HOST:PORT, or leave {flag} out",
            )
        return None
