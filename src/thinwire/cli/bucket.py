"""The flags of `thinwire train --bucket`."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from thinwire.errors import ConfigurationError

if TYPE_CHECKING:
    from thinwire.train.workers.bucket import BucketConfig


@dataclass(frozen=True, kw_only=True)
class BucketFlags:
    """Makes this process one worker of a run over an object store; each has its own --out."""

    bucket: str | None = None
    """Train one of --workers that share this s3://, gs://, az:// or file:// place."""
    worker: int | None = None
    """This worker's number, from 0."""

    def config(self, run_name: str | None) -> BucketConfig | None:
        """Which worker this is, or None without --bucket.

        Args:
            run_name: that of --run-name.

        Raises:
            ConfigurationError: a flag is missing, or means nothing without --bucket.
        """
        if self.bucket is None:
            if self.worker is not None:
                raise ConfigurationError(
                    "use --worker without --bucket",
                    because="it says which worker this is of a run over an object store",
                    do="add --bucket URL, or leave --worker out",
                )
            return None
        for flag, value in {"--worker": self.worker, "--run-name": run_name}.items():
            if value is None:
                raise ConfigurationError(
                    f"use --bucket without {flag}",
                    because="messages of a run are told apart by its name and the worker's number",
                    do="pass --worker 0 (1, 2, ...) and --run-name NAME",
                )
        from thinwire.train.workers.bucket import BucketConfig

        assert self.worker is not None
        assert run_name is not None
        return BucketConfig(url=self.bucket, worker=self.worker, run=run_name)
