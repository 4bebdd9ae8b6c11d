"""The records of the last rounds, for workers that missed them."""

import copy
import threading
from collections import deque

import torch

from thinwire.errors import ConfigurationError
from thinwire.membership import RoundRecord

# Facts take memory, too, and the names of all messages of an answer go into one file header.
_MOST_RECORDS = 1024


class RoundLog:
    """Keeps the records of the last rounds, without a gap; safe from any thread.

    Args:
        largest_bytes: of all messages together; the oldest records go first. At most 1024 stay.

    Raises:
        ConfigurationError: `largest_bytes` is negative.

    >>> round_log = RoundLog(100)
    >>> for version in (1, 2, 3):
    ...     messages = [torch.zeros(40, dtype=torch.uint8)]
    ...     round_log.append(RoundRecord(version=version, facts={}, messages=messages))
    >>> [record.version for record in round_log.after(1)], round_log.after(0)
    ([2, 3], None)
    """

    def __init__(self, largest_bytes: int) -> None:
        if largest_bytes < 0:
            raise ConfigurationError(
                "keep a log of rounds",
                because=f"it may hold {largest_bytes} bytes",
                do="pass 0 or more; with 0, workers that lag take a whole snapshot",
            )
        self._largest_bytes = largest_bytes
        self._records: deque[RoundRecord] = deque()
        self._last: int | None = None
        self._bytes = 0
        self._lock = threading.Lock()

    def append(self, record: RoundRecord) -> None:
        """Keep a copy of `record`; if it does not follow the last one, forget all before it."""
        kept = RoundRecord(
            version=record.version,
            facts=copy.deepcopy(dict(record.facts)),
            messages=[
                message.detach().to("cpu", copy=True, memory_format=torch.contiguous_format)
                for message in record.messages
            ],
        )
        with self._lock:
            if self._last is None or record.version != self._last + 1:
                self._forget()
            self._records.append(kept)
            self._last = record.version
            self._bytes += _nbytes(kept)
            while self._bytes > self._largest_bytes or len(self._records) > _MOST_RECORDS:
                self._bytes -= _nbytes(self._records.popleft())

    def after(self, version: int) -> list[RoundRecord] | None:
        """The records of all rounds since `version`, oldest first; None if not all are here.

        They are shared: do not change them.
        """
        with self._lock:
            if self._last is None:
                return None
            missed = self._last - version
            if missed > len(self._records):
                return None
            return list(self._records)[len(self._records) - missed :]

    def oldest(self, version: int) -> int:
        """The lowest version from which the records here lead to `version`.

        >>> RoundLog(100).oldest(7)
        7
        """
        with self._lock:
            if self._last != version:
                return version
            return version - len(self._records)

    def clear(self) -> None:
        """Forget all records, as after taking over another worker's state."""
        with self._lock:
            self._forget()

    def _forget(self) -> None:
        self._records.clear()
        self._last, self._bytes = None, 0


def _nbytes(record: RoundRecord) -> int:
    return sum(message.nbytes for message in record.messages)
