"""A method is a frozen choice for each slot of the one outer step.

    Delta   = anchor - local              outer optimizer (what it wants averaged)
    e       = feedback + Delta            feedback
    payload = encode(e)                   codec
    mean    = aggregate(decode(payloads)) exchange, aggregate
    anchor  = outer(anchor, mean)         outer optimizer
    local   = merge(local, anchor)        overlap

every `sync_every` inner steps, fragment by fragment (fragments). State and
connection live elsewhere.
"""

import dataclasses
import hashlib
import json
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, final

from thinwire.aggregate import Aggregate, MeanOverWorkers
from thinwire.codecs import Codec, Identity
from thinwire.errors import ConfigurationError
from thinwire.exchange import Automatic, Exchange
from thinwire.feedback import Feedback, NoFeedback
from thinwire.fragments import Fragments, Whole
from thinwire.inner import InnerOptimizer
from thinwire.outer import Delay, OuterOptimizer, Overlap

__all__ = ["Method", "describe"]


def describe(value: Any) -> Any:
    """`value` as JSON-able data: an object becomes its kind and its fields.

    Equal descriptions must mean equal behaviour on every worker, so nothing that differs between
    processes (an address in memory) may get in.

    >>> describe(Whole())
    {'kind': 'Whole'}
    """
    if value is None or isinstance(value, str | int | float):
        return value
    if isinstance(value, list | tuple):
        return [describe(item) for item in value]
    if isinstance(value, Mapping):
        return {str(key): describe(item) for key, item in value.items()}
    if callable(value):
        return getattr(value, "__qualname__", type(value).__name__)
    return {"kind": type(value).__name__} | describe(_fields(value))


def _fields(value: Any) -> Mapping[str, Any]:
    if dataclasses.is_dataclass(value):
        # What must not change the mathematics (where a state lives) is not part of a description.
        counted = (f for f in dataclasses.fields(value) if f.metadata.get("describe", True))
        return {field.name: getattr(value, field.name) for field in counted}
    return getattr(value, "__dict__", {})


@final
@dataclass(frozen=True, kw_only=True, slots=True)
class Method:
    """What a family of papers disagrees about, as slots.

    Args:
        name: shown in tables; two methods that differ only in it are the same.
        inner: builds each worker's own optimizer.
        sync_every: H, inner steps from one exchange of a fragment to the next.
        outer: moves the outer parameters.
        codec: what travels.
        feedback: what a round leaves for the next one.
        fragments: what travels together, and when.
        overlap: how long it may travel, and how the answer is merged.
        aggregate: one pseudo-gradient from all workers'.
        exchange: who combines what.

    Raises:
        ConfigurationError: H < 1, a slot filled with the wrong kind of thing, or slots that do not
            fit each other.

    >>> import dataclasses, thinwire as tw
    >>> method = tw.presets.diloco(sync_every=15)
    >>> dataclasses.replace(method, codec=tw.codecs.CastBF16()).codec
    CastBF16()
    """

    name: str
    inner: InnerOptimizer
    sync_every: int
    outer: OuterOptimizer
    codec: Codec = field(default_factory=Identity)
    feedback: Feedback = field(default_factory=NoFeedback)
    fragments: Fragments = field(default_factory=Whole)
    overlap: Overlap = field(default_factory=Delay)
    aggregate: Aggregate = field(default_factory=MeanOverWorkers)
    exchange: Exchange = field(default_factory=Automatic)

    def __post_init__(self) -> None:
        for slot, kind in _SLOTS.items():
            self._check_slot(slot, kind)
        if self.sync_every < 1:
            raise ConfigurationError(
                f"build method {self.name!r} with sync_every={self.sync_every}",
                because="a worker trains at least one inner step between two exchanges",
                do="pass sync_every >= 1",
            )
        self.overlap.check(sync_every=self.sync_every)
        self.outer.check(sync_every=self.sync_every, overlap=self.overlap)

    def _check_slot(self, slot: str, kind: type) -> None:
        value: object = getattr(self, slot)
        # bool is an int to Python, but True inner steps are a slip.
        if isinstance(value, kind) and not isinstance(value, bool):
            return
        raise ConfigurationError(
            f"build method {self.name!r} with {slot}={value!r}",
            because=f"{slot} takes {kind.__name__}, not {type(value).__name__}",
            do=f"pass an instance of {kind.__name__}",
        )

    def describe(self) -> dict[str, Any]:
        """The method as JSON-able data, without its name."""
        return {key: value for key, value in describe(self).items() if key not in {"kind", "name"}}

    def fingerprint(self) -> str:
        """SHA-256 of the description: equal methods have equal fingerprints."""
        return hashlib.sha256(json.dumps(self.describe(), sort_keys=True).encode()).hexdigest()


_SLOTS: dict[str, type] = {
    "name": str,
    "inner": InnerOptimizer,
    "sync_every": int,
    "outer": OuterOptimizer,
    "codec": Codec,
    "feedback": Feedback,
    "fragments": Fragments,
    "overlap": Overlap,
    "aggregate": Aggregate,
    "exchange": Exchange,
}
