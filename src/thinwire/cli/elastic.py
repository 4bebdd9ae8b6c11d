"""The flags of `thinwire train --elastic`."""

from dataclasses import dataclass, fields
from pathlib import Path
from typing import final

from thinwire.errors import ConfigurationError
from thinwire.train.elastic import Membership

__all__ = ["ElasticFlags"]


@final
@dataclass(frozen=True, kw_only=True)
class ElasticFlags:
    """Makes this process one worker that may come and go; each has its own --out."""

    elastic: str | None = None
    """HOST:PORT of thinwire lighthouse: train one worker, of as many as there are. --workers then
    says for how many the global batch is meant."""
    identity: str | None = None
    """By which the others know this worker again; default the name of --out and of this host."""
    token_file: Path | None = None
    """Holds the run's token; default the environment variable THINWIRE_TOKEN."""
    patience: float | None = None
    """Share of a round that a slow worker is waited for."""
    min_workers: int | None = None
    """With fewer workers nobody goes on."""

    def membership(self) -> Membership | None:
        """What they say, or None without --elastic.

        Raises:
            ConfigurationError: a flag that means nothing without --elastic.
        """
        given = {f.name: v for f in fields(self) if (v := getattr(self, f.name)) is not None}
        lighthouse = given.pop("elastic", None)
        if lighthouse is not None:
            return Membership(lighthouse=lighthouse, **given)
        if given:
            flag = "--" + next(iter(given)).replace("_", "-")
            raise ConfigurationError(
                f"use {flag} without --elastic",
                because="only a worker of an elastic run takes part under a name, or waits",
                do=f"add --elastic HOST:PORT, or leave {flag} out",
            )
        return None
