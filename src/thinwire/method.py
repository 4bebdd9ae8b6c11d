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
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from types import ModuleType
from typing import Any, Final, cast

from thinwire import aggregate, codecs, exchange, feedback, fragments, inner, outer
from thinwire.aggregate import Aggregate, MeanOverWorkers
from thinwire.codecs import Codec, Identity
from thinwire.errors import ConfigurationError, ThinwireError, check, check_whole
from thinwire.exchange import Automatic, Exchange, Pairs, ReduceScatter
from thinwire.exchange.state import warn_of_sharding_loss
from thinwire.feedback import Feedback, NoFeedback
from thinwire.fragments import Fragments, Whole
from thinwire.handshake import first_difference, flatten_description
from thinwire.inner import InnerOptimizer
from thinwire.outer import Delay, OuterOptimizer, Overlap

RENAMED_SLOTS = {
    "Direct": "GradientAveraging",
    "PerWorkers": "ByWorkerCount",
    "Machine": "Runtime",
    "Periods": "Intervals",
}
"""Class names in descriptions of earlier versions, and their current names."""

# Slots added later, by (kind, slot): the kind that earlier versions always used there.
_SLOTS_ADDED = {("MedianNormClip", "aggregate"): "MeanOverWorkers"}


def describe(value: Any) -> Any:
    """`value` as JSON-able data: an object becomes its class name and its fields.

    Workers compare descriptions, so they must not hold anything that differs between processes,
    such as an address in memory.

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


def migrate_names(description: Any) -> Any:
    """A description written by an earlier version, with current class names and slots.

    Args:
        description: nested, as `describe` returns it, or flat, keyed by paths such as "outer.kind".

    >>> migrate_names({"outer": {"kind": "Direct"}})
    {'outer': {'kind': 'GradientAveraging'}}
    """
    if isinstance(description, Mapping):
        items = cast(Mapping[str, Any], description).items()
        present = {
            key: RENAMED_SLOTS.get(value, value)
            if key.rpartition(".")[2] == "kind" and isinstance(value, str)
            else migrate_names(value)
            for key, value in items
        }
        for (kind, slot), held in _SLOTS_ADDED.items():
            if present.get("kind") == kind:
                present.setdefault(slot, {"kind": held})
            for key in [key for key, value in present.items() if value == kind and "." in key]:
                present.setdefault(f"{key.removesuffix('kind')}{slot}.kind", held)
        return present
    if isinstance(description, list):
        return [migrate_names(item) for item in cast(list[Any], description)]
    return description


def _fields(value: Any) -> Mapping[str, Any]:
    if not dataclasses.is_dataclass(value):
        return getattr(value, "__dict__", {})
    # Left out: fields that do not change the numbers (where a state lives), and defaults of fields
    # that earlier versions' descriptions lack.
    return {
        f.name: getattr(value, f.name)
        for f in dataclasses.fields(value)
        if f.metadata.get("describe", True)
        and (f.metadata.get("describe_default", True) or getattr(value, f.name) != f.default)
    }


@dataclass(frozen=True, kw_only=True, slots=True)
class Method:
    """A training method: one choice for every slot of the outer step.

    Args:
        name: shown in tables; methods that differ only in name are the same.
        inner: builds each worker's own optimizer.
        sync_every: H, inner steps from one exchange of a fragment to the next.
        outer: moves the outer parameters.
        codec: the byte format on the wire.
        feedback: what a worker keeps of a round's encoding error.
        fragments: which parameters are exchanged together, and when.
        overlap: how many steps an exchange may take, and how its result is merged.
        aggregate: makes one pseudo-gradient from all workers'.
        exchange: how payloads reach the other workers: gather, reduce-scatter, pairs, or automatic.

    Raises:
        ConfigurationError: H < 1, a slot holds an object of the wrong class, or slots do not fit
            each other.

    Warns:
        LossyReduceScatterWarning: a `ReduceScatter` without owner feedback whose codec loses much
            of a mean, such as Top-k or one bit. `Automatic` warns when it takes one.

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
        for slot in dataclasses.fields(self):
            value, kind = getattr(self, slot.name), cast(type, slot.type)
            check(
                kind is int or isinstance(value, kind),
                f"build method {self.name!r} with {slot.name}={value!r}",
                because=f"{slot.name} takes {kind.__name__}, not {type(value).__name__}",
                do=f"pass an instance of {kind.__name__}",
            )
        check_whole("sync_every", self.sync_every)
        self.overlap.check(sync_every=self.sync_every)
        self.outer.check(sync_every=self.sync_every, overlap=self.overlap)
        check(
            self.feedback.gives_momentum == self.outer.takes_momentum,
            f"step {self.outer} with {self.feedback}",
            because="only DecoupledNesterov applies the momentum of DecoupledMomentum",
            do="pass both, or neither",
        )
        needs_all = self.aggregate.needs_all_numbers or self.outer.averages_weights
        check(
            not (needs_all and self.codec.is_sparse),
            f"combine what {self.codec} sends by {self.aggregate} for {self.outer}",
            because="it would keep the zeros of numbers that few workers send",
            do="take a codec that sends every number, such as Quantise(bits=2) or CastBF16()",
        )
        check(
            isinstance(self.aggregate, MeanOverWorkers) or not self.outer.averages_weights,
            f"combine weights by {self.aggregate}",
            because="zeros, norms or order say nothing about weights",
            do="leave aggregate out: the mean over workers is what weights need",
        )
        check(
            self.outer.has_own_anchors or not isinstance(self.exchange, Pairs),
            f"average in pairs with {self.outer}",
            because="nothing would pull the outer parameters of different pairs together",
            do="pass outer=tw.outer.Gossip(), or another exchange, such as tw.Gather()",
        )
        its = self.exchange.otherwise if isinstance(self.exchange, Automatic) else self.exchange
        check(
            not (isinstance(its, ReduceScatter) and its.owner_feedback.gives_momentum),
            f"encode the mean of a shard in {self.exchange}",
            because="no answer comes back for the momentum to absorb",
            do="pass owner_feedback=ErrorFeedback()",
        )
        if isinstance(self.exchange, ReduceScatter):
            self._check_reduce_scatter(self.exchange)

    def _check_reduce_scatter(self, exchange: ReduceScatter) -> None:
        check(
            self.aggregate.allows_shards,
            f"combine shards separately by {self.aggregate}",
            because="it needs whole tensors, and the owner of a shard has only a part of them",
            do="leave exchange out, or pass exchange=Gather()",
        )
        # The caller of Method(): __init__ and __post_init__ lie between.
        warn_of_sharding_loss(f"method {self.name!r}", self.codec, exchange, stacklevel=4)

    def describe(self) -> dict[str, Any]:
        """The method as JSON-able data, without its name."""
        return {key: value for key, value in describe(self).items() if key not in {"kind", "name"}}

    def check_elastic(self, *, is_divided: bool = False) -> None:
        """Raise `ConfigurationError` if workers that come and go cannot train by this method.

        Args:
            is_divided: whether a worker's ranks divide its payloads among them.
        """
        check(
            not is_divided,
            "divide what an elastic worker sends among its ranks",
            because="a part that did not reach all ranks would be waited for",
            do="leave out ddp_group: every rank then sends all",
        )
        refusal = self.outer.elastic_refusal
        if self.outer.has_own_anchors:
            refusal = "every worker has its own outer parameters, and a newcomer would take one's"
        check(
            refusal is None,
            f"train by {type(self.outer).__name__} where workers come and go",
            because=f"{refusal}",
            do="take a method whose workers share outer parameters, such as diloco",
        )
        self.overlap.check_cancellable()

    @classmethod
    def from_dict(cls, description: Mapping[str, Any]) -> "Method":
        """Build a method from its `describe(method)`, perhaps read from JSON.

        Args:
            description: the description, including the method's name.

        Raises:
            ConfigurationError: something in it is not part of this package, or belongs to another
                version of it.

        >>> import thinwire as tw
        >>> method = tw.presets.muloco(sync_every=7)
        >>> Method.from_dict(describe(method)) == method
        True
        """
        description = migrate_names(description)
        try:
            fields = {
                slot: _build(value, _MODULES.get(slot, ()))
                for slot, value in description.items()
                if slot != "kind"
            }
            method = cls(**fields)
            # A field added later has a default, which may not be what the run used.
            read = {key: value for key, value in description.items() if key not in {"kind", "name"}}
            mine, theirs = flatten_description(method.describe()), flatten_description(read)
            different = first_difference(mine, theirs)
            if different is not None:
                raise ValueError(f"its {different} differs")
        except (LookupError, TypeError, ValueError, AttributeError, ThinwireError) as error:
            raise ConfigurationError(
                "read the method of a run",
                because=f"it is of another version of this package: {error}",
                do="read it with the version of thinwire that wrote it",
            ) from error
        return method


# -- from a description back to the method ---------------------------------------------------------

# An inner and an outer optimizer may share a name, so each slot has its own modules.
_MODULES: Final[Mapping[str, Sequence[ModuleType]]] = {
    "inner": (inner,),
    "outer": (outer,),
    "overlap": (outer,),
    "codec": (codecs,),
    "feedback": (feedback,),
    "fragments": (fragments,),
    "aggregate": (aggregate,),
    "exchange": (exchange, feedback),
}


def _build(value: Any, modules: Sequence[ModuleType]) -> Any:
    if isinstance(value, Mapping) and "kind" in value:
        fields = {name: _build(held, modules) for name, held in value.items() if name != "kind"}
        return _class_of(value["kind"], modules)(**fields)
    if isinstance(value, list | tuple):
        return tuple(_build(item, modules) for item in value)
    return value


def _class_of(kind: str, modules: Sequence[ModuleType]) -> Any:
    # Only descriptions are built, whatever the file: a run folder may come from anywhere.
    for module in modules:
        found = None if kind.startswith("_") else getattr(module, kind, None)
        if isinstance(found, type) and dataclasses.is_dataclass(found):
            return found
    raise LookupError(f"{kind} is no part of this package")
