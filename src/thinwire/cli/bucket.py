"""The flags of `thinwire train --bucket`."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, final

from thinwire.errors import ConfigurationError

if TYPE_CHECKING:
    from thinwire.train.workers.bucket import BucketConfig

__all__ = ["BucketFlags"]


@final
@dataclass(frozen=True, kw_only=True)
class BucketFlags:
    """Makes this process one worker of a run over an object store; each has its own --out."""

    bucket: str | None = None
    """s3://, gs://, az:// or file:// place that all workers reach: train one of --workers."""
    worker: int | None = None
    """This worker's number, from 0."""
    run_name: str | None = None
    """Of the run in that place, the same on all workers and no other run's."""

    def config(self) -> BucketConfig | None:
        """Which worker this is, or None without --bucket.

        Raises:
            ConfigurationError: a flag is missing, or means nothing without --bucket.
        """
        given = {"--worker": self.worker, "--run-name": self.run_name}
        if self.bucket is None:
            for flag, value in given.items():
                if value is not None:
                    raise ConfigurationError(
                        f"use {flag} without --bucket",
                        because="it says which worker this is of a run over an object store",
                        do=f"add --bucket URL, or leave {flag} out",
                    )
            return None
        for flag, value in given.items():
            if value is None:
                raise ConfigurationError(
                    f"use --bucket without {flag}",
                    because="messages of a run are told apart by its name and the worker's number",
                    do="pass --worker 0 (1, 2, ...) and --run-name NAME",
                )
        from thinwire.train.workers.bucket import BucketConfig

        assert self.worker is not None
        assert self.run_name is not None
        return BucketConfig(url=self.bucket, worker=self.worker, run=self.run_name)
