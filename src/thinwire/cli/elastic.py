"""The flags of `thinwire train --elastic`."""

from __future__ import annotations

from dataclasses import dataclass, fields
from pathlib import Path
from typing import TYPE_CHECKING, Any

from thinwire.cli.tickets import address_in, is_store
from thinwire.errors import ConfigurationError

if TYPE_CHECKING:
    from thinwire.train.workers.elastic import ElasticConfig


@dataclass(frozen=True, kw_only=True)
class ElasticFlags:
    """Makes this process one worker of an elastic run; each has its own --out."""

    elastic: str | None = None
    """Train one worker of a run in which workers join and leave, at thinwire lighthouse or in an
    object store; --workers then says for how many the global batch is meant."""
    identity: str | None = None
    """This worker's name; default that of --out and of this host."""
    token_file: Path | None = None
    """Holds the run's token, which a lighthouse needs; default THINWIRE_TOKEN."""
    patience: float | None = None
    """Share of a round that a slow worker is waited for."""
    min_workers: int | None = None
    """With fewer workers a round waits for more."""

    def config(self, run_name: str | None) -> ElasticConfig | None:
        """How this worker takes part, or None without --elastic.

        Args:
            run_name: that of --run-name.

        Raises:
            ConfigurationError: a flag is missing, or means nothing there.
        """
        given = {f.name: v for f in fields(self) if (v := getattr(self, f.name)) is not None}
        where = given.pop("elastic", None)
        if where is not None:
            return _at(where, run_name, given)
        if given:
            flag = "--" + next(iter(given)).replace("_", "-")
            raise ConfigurationError(
                f"use {flag} without --elastic",
                because="it says how a worker takes part in an elastic run",
                do=f"add --elastic HOST:PORT, or leave {flag} out",
            )
        return None


def _at(where: str, run_name: str | None, given: dict[str, Any]) -> ElasticConfig:
    if is_store(where):
        if run_name is None:
            raise ConfigurationError(
                f"take part in a run in {where} without --run-name",
                because="runs in one place are told apart by their names",
                do="pass --run-name NAME, the same on all workers",
            )
        from thinwire.train.workers.elastic import ElasticBucketConfig

        return ElasticBucketConfig(url=where, run=run_name, **given)
    if run_name is not None:
        raise ConfigurationError(
            "use --run-name with the address of a lighthouse",
            because="it names a run in an object store, and a lighthouse has one run",
            do="leave --run-name out, or pass the URL of a store, such as s3://BUCKET/PREFIX",
        )
    from thinwire.train.workers.elastic import LighthouseConfig

    return LighthouseConfig(lighthouse=address_in(where), **given)
