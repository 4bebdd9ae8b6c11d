"""A run over an object store, seen from outside: only objects are read."""

from __future__ import annotations

import time
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from urllib.parse import urlsplit
from urllib.request import url2pathname

from thinwire.elastic.loop_thread import run_to_end
from thinwire.elastic.roll import View, WorkerReport, latest_calls
from thinwire.elastic.run_objects import RunObjects
from thinwire.errors import ConfigurationError
from thinwire.membership import WorkerMetrics
from thinwire.security.token import Token
from thinwire.transport.object_store import ObjectStore, together

_PATIENCE_S = 30.0


@dataclass(frozen=True, kw_only=True, slots=True)
class BucketStatus:
    """State of a run in its store.

    Args:
        roll: the newest one; None before the first.
        roll_age_s: seconds since it was written, by the store's clock and this machine's.
        calls: reports of workers before the next roll, one per identity.
        signs_s: age of each worker's last sign of life, by its name.
        metrics: each worker's metrics, by its name; those of the last round once the run is over.
    """

    roll: View | None
    roll_age_s: float | None
    calls: tuple[WorkerReport, ...]
    signs_s: Mapping[str, float] = field(default_factory=dict)
    metrics: Mapping[str, WorkerMetrics] = field(default_factory=dict)


class BucketWatch:
    """Reads the state of a run, without taking part and without permission to write.

    Args:
        url: the store, as `tw.transport.Elastic` takes it.
        run: name of the run there.
        token: the run's token, if it has one.

    Raises:
        ConfigurationError: obstore is missing, or the URL names no store.
    """

    def __init__(self, url: str, *, run: str, token: Token | None) -> None:
        self._url, self._run = url, run
        folder = urlsplit(url)
        # Reading must not create the folder, as opening it does.
        if folder.scheme == "file" and not Path(url2pathname(folder.path)).is_dir():
            raise self._nothing("there is no such folder")
        store = ObjectStore(url, token=token)
        self._url = store.url
        self._objects = RunObjects(store, run, token, patience_s=_PATIENCE_S)
        self._number = 0

    def look(self) -> BucketStatus:
        """Read the present state.

        Raises:
            ConfigurationError: the store has nothing of that run. MismatchError: it was written
                with another token. ExchangeError: the store cannot be read.
        """
        return run_to_end(self._look())

    async def _look(self) -> BucketStatus:
        objects, until_s = self._objects, self._objects.until_s()
        self._number = await objects.newest_roll(self._number, until_s)
        roll, roll_age_s = None, None
        if self._number:
            roll = await objects.roll(self._number, until_s)
            stamp = await objects.store.stamp(objects.roll_key(self._number), until_s)
            # Clocks may differ.
            roll_age_s = None if stamp is None else max(0.0, time.time() - stamp[1])
        calls: list[WorkerReport] = []
        if roll is None or not roll.is_over:
            keys = await objects.call_keys(self._number + 1, until_s)
            calls = latest_calls(await objects.calls(keys, until_s))
        if roll is None and not calls:
            raise self._nothing(
                "nothing of that name is there, or none of it opens with this token"
            )
        last = roll
        if roll is not None and roll.is_over:
            last = await objects.roll(self._number - 1, until_s)
        names = sorted({*(() if last is None else last.names), *(call.name for call in calls)})
        stamps = await together(*(objects.sign_of_life(name, until_s) for name in names))
        told = await together(*(objects.metrics(name, until_s) for name in names))
        return BucketStatus(
            roll=roll,
            roll_age_s=roll_age_s,
            calls=tuple(calls),
            signs_s={n: time.time() - s[1] for n, s in zip(names, stamps, strict=True) if s},
            metrics=dict(zip(names, told, strict=True)),
        )

    def _nothing(self, because: str) -> ConfigurationError:
        return ConfigurationError(
            f"show run {self._run!r} in {self._url}",
            because=because,
            do="correct the address, or start the first worker",
        )
