"""A run over an object store, looked at from outside: only objects are read."""

from __future__ import annotations

import asyncio
import time
from dataclasses import dataclass
from pathlib import Path
from urllib.parse import urlsplit
from urllib.request import url2pathname

from thinwire.elastic.bucket.roll import View, WorkerReport, latest_calls
from thinwire.elastic.bucket.run_objects import RunObjects
from thinwire.errors import ConfigurationError, MismatchError
from thinwire.security.token import Token
from thinwire.transport.bucket import check_run_name
from thinwire.transport.object_store import ObjectStore

_PATIENCE_S = 30.0


@dataclass(frozen=True, kw_only=True, slots=True)
class BucketStatus:
    """What lies in the store of a run.

    Args:
        roll: the newest one; None before the first.
        roll_age_s: since it was written, by the store's clock and this machine's.
        calls: what workers say before the next roll, one for each identity.
    """

    roll: View | None
    roll_age_s: float | None
    calls: tuple[WorkerReport, ...]


class BucketWatch:
    """Reads how far a run is; takes no part in it and needs no permission to write.

    Args:
        url: of the store, as `ElasticBucket` takes it.
        run: name of the run there.
        token: of the run, if it has one.

    Raises:
        ConfigurationError: obstore is missing, or there can be no such place.
    """

    def __init__(self, url: str, *, run: str, token: Token | None) -> None:
        check_run_name(run)
        self._url, self._run = url, run
        folder = urlsplit(url)
        # What only looks must not make the folder, as opening it does.
        if folder.scheme == "file" and not Path(url2pathname(folder.path)).is_dir():
            raise self._nothing("there is no such folder")
        self._objects = RunObjects(ObjectStore(url), run, token)
        self._number = 0

    def look(self) -> BucketStatus:
        """What lies there now.

        Raises:
            ConfigurationError: there is nothing of that run. MismatchError: it was written with
                another token. ExchangeError: the store cannot be read.
        """
        return asyncio.run(self._look())

    async def _look(self) -> BucketStatus:
        objects, until_s = self._objects, time.monotonic() + _PATIENCE_S
        self._number = await objects.newest_roll(self._number, until_s)
        roll, roll_age_s = None, None
        if self._number:
            try:
                roll = await objects.roll(self._number, until_s)
            except MismatchError as error:
                raise MismatchError(
                    f"show run {self._run!r} in {self._url}",
                    because=error.because,
                    do="set THINWIRE_TOKEN to the token of the run, or unset it if the run has "
                    "none; take the thinwire version of the workers",
                ) from error
            written_s = await objects.store.written_s(objects.roll_key(self._number), until_s)
            # Clocks may differ.
            roll_age_s = None if written_s is None else max(0.0, time.time() - written_s)
        calls: list[WorkerReport] = []
        if roll is None or not roll.is_over:
            calls = latest_calls(await objects.further_calls(self._number + 1, (), until_s))
        if roll is None and not calls:
            raise self._nothing(
                "nothing of that name is there, or none of it opens with this token"
            )
        return BucketStatus(roll=roll, roll_age_s=roll_age_s, calls=tuple(calls))

    def _nothing(self, because: str) -> ConfigurationError:
        return ConfigurationError(
            f"show run {self._run!r} in {self._url}",
            because=because,
            do="correct the URL or --run-name, or start the first worker",
        )
