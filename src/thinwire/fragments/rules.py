"""Fragments: which parameters travel together, and after which inner steps."""

from abc import ABC, abstractmethod
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field

from thinwire.errors import ConfigurationError, check, check_whole, unknown_name
from thinwire.fragments.layers import WRAPPERS, Part


class Offsets(ABC):
    """A rule for the (offset, first step) of every fragment, in inner steps."""

    @abstractmethod
    def of(self, count: int, *, sync_every: int) -> tuple[tuple[int, int], ...]:
        """(t_p, first step) of each of `count` fragments.

        Fragment p is due after inner step t (from 1) when (t - t_p) mod H = 0 and t is not before
        its first step.

        Args:
            count: P, fragments.
            sync_every: H, inner steps from one exchange of a fragment to the next.

        Raises:
            ConfigurationError: the rule does not suit that number of fragments or that interval.
        """


@dataclass(frozen=True, kw_only=True, slots=True)
class Spread(Offsets):
    """t_p = floor(p H / P): evenly over the interval, and no exchange before step H.

    Raises:
        ConfigurationError: P > H, when `of` is called.

    >>> Spread().of(3, sync_every=10)
    ((0, 10), (3, 10), (6, 10))

    Source: Streaming DiLoCo (arXiv 2501.18512), section 3.
    """

    def of(self, count: int, *, sync_every: int) -> tuple[tuple[int, int], ...]:
        """Offsets of `count` fragments, no two of them equal."""
        check(
            count <= sync_every,
            f"spread {count} fragments over {sync_every} inner steps",
            because="two fragments would be due after the same step",
            do=f"pass sync_every >= {count}, or a rule that makes fewer fragments",
        )
        return tuple((p * sync_every // count, sync_every) for p in range(count))


@dataclass(frozen=True, kw_only=True, slots=True)
class At(Offsets):
    """Offsets given one by one; a fragment's first exchange is after t_p steps, not H + t_p.

    An offset of 0 means step H: at step 0 nothing has been trained.

    Args:
        steps: t_p in [0, H) for each fragment; equal ones are exchanged after the same step.

    Raises:
        ConfigurationError: an offset is negative or not an integer. From `of`: the offsets do not
            match the fragments in number, or one is not below H.

    >>> At(steps=(4, 0)).of(2, sync_every=10)
    ((4, 4), (0, 10))
    """

    steps: tuple[int, ...]

    def __post_init__(self) -> None:
        for step in self.steps:
            # No step would equal an offset of 1.5: its fragment would never be exchanged.
            check_whole("the offset of a fragment, in inner steps,", step, least=0)

    def of(self, count: int, *, sync_every: int) -> tuple[tuple[int, int], ...]:
        """The given offsets, checked against the number of fragments and the interval."""
        check(
            len(self.steps) == count,
            f"use {len(self.steps)} offsets ({', '.join(map(str, self.steps))})",
            because=f"this model has {count} fragments",
            do="pass one offset for each fragment",
        )
        for p, step in enumerate(self.steps):
            check_whole(f"the offset of fragment {p}", step, least=0, most=sync_every - 1)
        return tuple((step, step or sync_every) for step in self.steps)


@dataclass(frozen=True, kw_only=True, slots=True)
class Fragment:
    """Parameters that are exchanged together, every `sync_every` inner steps.

    Args:
        index: place in the plan and in the state of the outer loop.
        names: parameter names, in the order in which they are laid out on the wire.
        offset_steps: t_p; the fragment is due when (t - t_p) mod H = 0.
        first_step: the first inner step, counted from 1, after which it may be due.

    >>> fragment = Fragment(index=0, names=("w",), offset_steps=3, first_step=10)
    >>> [step for step in range(40) if fragment.is_due(step=step, sync_every=10)]
    [13, 23, 33]
    """

    index: int
    names: tuple[str, ...]
    offset_steps: int
    first_step: int

    @property
    def name(self) -> str:
        """Index, size and first parameter, for error messages."""
        return f"fragment {self.index} ({len(self.names)} parameters from {self.names[0]!r})"

    def is_due(self, *, step: int, sync_every: int) -> bool:
        """True if the fragment is sent after inner step `step` (counted from 1).

        Source: Streaming DiLoCo (arXiv 2501.18512), Algorithm 2.
        """
        return step >= self.first_step and (step - self.offset_steps) % sync_every == 0


class Fragments(ABC):
    """A rule that puts each parameter into exactly one fragment."""

    @abstractmethod
    def plan(self, parts: Sequence[Part], *, sync_every: int) -> tuple[Fragment, ...]:
        """The fragments of a model whose trainable parameters are `parts`.

        Args:
            parts: in the order of names in a fragment; sizes are those of whole tensors,
                so that all ranks of a sharded worker plan alike.
            sync_every: H, inner steps from one exchange of a fragment to the next.

        Raises:
            ConfigurationError: the rule does not fit this model or this interval.
        """


@dataclass(frozen=True, kw_only=True, slots=True)
class Whole(Fragments):
    """One fragment that holds the whole model, as in DiLoCo (arXiv 2311.08105).

    >>> Whole().plan([Part(name="w", aliases=("w",), numel=6, layer=None)], sync_every=30)
    (Fragment(index=0, names=('w',), offset_steps=0, first_step=30),)
    """

    def plan(self, parts: Sequence[Part], *, sync_every: int) -> tuple[Fragment, ...]:
        """One fragment without an offset, whatever the interval."""
        return _fill(parts, {part.name: 0 for part in parts}, 1, Spread(), sync_every)


@dataclass(frozen=True, kw_only=True, slots=True)
class _ByLayers(Fragments):
    layers: int = 3
    offsets: Offsets = field(default_factory=Spread)

    def __post_init__(self) -> None:
        check_whole(f"layers of {type(self).__name__}", self.layers)

    @abstractmethod
    def _fragment_of(self, layer: int, count: int) -> int:
        """The fragment of a layer, of `count` fragments."""

    def plan(self, parts: Sequence[Part], *, sync_every: int) -> tuple[Fragment, ...]:
        """Fragments of layers, and one of the parameters outside of the stack, if any."""
        layers = _layers(type(self).__name__, parts)
        count = -(-len(set(layers.values())) // self.layers)
        home = dict.fromkeys((part.name for part in parts), count)
        home |= {name: self._fragment_of(layer, count) for name, layer in layers.items()}
        return _fill(parts, home, max(home.values()) + 1, self.offsets, sync_every)


@dataclass(frozen=True, kw_only=True, slots=True)
class Strided(_ByLayers):
    """Layer l of L goes to fragment l mod n, n = ceil(L / layers); the rest is the last fragment.

    The rest is everything outside of the stack: embedding, final norm and head. Layers without
    trainable parameters do not count.

    Args:
        layers: the most layers in a fragment.
        offsets: when the fragments are due.

    Raises:
        ConfigurationError: layers < 1; a model without a stack of layers, when it is planned.

    >>> from torch import nn
    >>> from thinwire.fragments.layers import parts_of
    >>> model = nn.Sequential(*(nn.Linear(1, 1, bias=False) for _ in range(5)))
    >>> [f.names for f in Strided().plan([*parts_of(model).values()], sync_every=30)]
    [('0.weight', '2.weight', '4.weight'), ('1.weight', '3.weight')]

    Source: Streaming DiLoCo (arXiv 2501.18512), section 3: three layers, strided.
    """

    def _fragment_of(self, layer: int, count: int) -> int:
        return layer % count


@dataclass(frozen=True, kw_only=True, slots=True)
class Sequential(_ByLayers):
    """Layer l goes to fragment floor(l / layers); parameters outside of the stack are the last one.

    Layers without trainable parameters do not count.

    Args:
        layers: layers in a fragment; the last fragment of layers may have fewer.
        offsets: when the fragments are due.

    Raises:
        ConfigurationError: layers < 1; a model without a stack of layers, when it is planned.

    >>> from torch import nn
    >>> from thinwire.fragments.layers import parts_of
    >>> model = nn.Sequential(*(nn.Linear(1, 1, bias=False) for _ in range(5)))
    >>> [f.names for f in Sequential().plan([*parts_of(model).values()], sync_every=30)]
    [('0.weight', '1.weight', '2.weight'), ('3.weight', '4.weight')]

    Source: Streaming DiLoCo (arXiv 2501.18512), section 3, the alternative to strided.
    """

    def _fragment_of(self, layer: int, count: int) -> int:
        return layer // self.layers


@dataclass(frozen=True, kw_only=True, slots=True)
class Balanced(Fragments):
    """`count` fragments of about equal size, whatever the model: the largest tensor first.

    Each tensor goes to the fragment that is lightest so far, so the largest fragment is at most the
    mean plus one tensor. Deltas are fp32 for every parameter, so sizes are elements.

    Args:
        count: fragments.
        offsets: when the fragments are due.

    Raises:
        ConfigurationError: count < 1; more fragments than tensors, when a model is planned.

    >>> sizes = {"a": 5, "b": 4, "c": 3, "d": 3}
    >>> parts = [Part(name=n, aliases=(n,), numel=size, layer=None) for n, size in sizes.items()]
    >>> [f.names for f in Balanced(count=2).plan(parts, sync_every=30)]
    [('a', 'd'), ('b', 'c')]

    Source: R. L. Graham, Bounds on multiprocessing timing anomalies (1969), for the rule.
    """

    count: int = 4
    offsets: Offsets = field(default_factory=Spread)

    def __post_init__(self) -> None:
        check_whole("count of Balanced", self.count)

    def plan(self, parts: Sequence[Part], *, sync_every: int) -> tuple[Fragment, ...]:
        """Tensors from the largest to the smallest, each into the lightest fragment."""
        if len(parts) < self.count:
            raise ConfigurationError(
                f"cut a model into {self.count} fragments",
                because=f"it has {len(parts)} trainable tensors, and every fragment needs one",
                do=f"pass count <= {len(parts)}",
            )
        # By size, then by count: otherwise tensors without elements could leave a fragment empty.
        load = [(0, 0)] * self.count
        home: dict[str, int] = {}
        for part in sorted(parts, key=lambda part: -part.numel):
            lightest = load.index(min(load))
            home[part.name] = lightest
            numel, tensors = load[lightest]
            load[lightest] = numel + part.numel, tensors + 1
        return _fill(parts, home, self.count, self.offsets, sync_every)


@dataclass(frozen=True, kw_only=True, slots=True)
class ByModule(Fragments):
    """Fragments listed by hand, by names of modules or parameters.

    Names are those of the model before it was wrapped: the `module.` of DistributedDataParallel and
    the `_orig_mod.` of torch.compile can be left out.

    Args:
        modules: for each fragment, its modules (with all they hold) and parameters.
        offsets: when the fragments are due.

    Raises:
        ConfigurationError: a fragment without names. When a model is planned: a name that matches
            nothing trainable, or a parameter that is in no fragment or in two.

    >>> parts = [Part(name=n, aliases=(n,), numel=1, layer=None) for n in ("a.w", "a.b", "c.w")]
    >>> [f.names for f in ByModule(modules=(("c", "a.b"), ("a.w",))).plan(parts, sync_every=30)]
    [('a.b', 'c.w'), ('a.w',)]
    """

    modules: tuple[tuple[str, ...], ...]
    offsets: Offsets = field(default_factory=Spread)

    def __post_init__(self) -> None:
        for index, names in enumerate(self.modules):
            wrong: object = names
            # A str is a sequence too: each letter would be taken for a module.
            if isinstance(wrong, str) or not names:
                raise ConfigurationError(
                    f"make fragment {index} of {wrong!r}",
                    because="a fragment is a tuple of at least one name",
                    do='write it like ("model.embed_tokens", "lm_head"), with a comma after one',
                )

    def plan(self, parts: Sequence[Part], *, sync_every: int) -> tuple[Fragment, ...]:
        """Each parameter in the fragment that lists its module."""
        spellings = _spellings(parts)
        found: dict[str, tuple[int, str]] = {}
        for index, names in enumerate(self.modules):
            for wanted in names:
                for name, spelling in _named(index, wanted, spellings).items():
                    other, earlier = found.setdefault(name, (index, spelling))
                    if other != index:
                        raise ConfigurationError(
                            f"exchange {earlier!r} in fragment {other} and {spelling!r} in "
                            f"fragment {index}",
                            because="they are one parameter"
                            + (", tied under two names" * (earlier != spelling)),
                            do="leave it out of one of the two fragments",
                        )
        forgotten = [part.name for part in parts if part.name not in found]
        if forgotten:
            more = f" and {len(forgotten) - 1} more" if len(forgotten) > 1 else ""
            raise ConfigurationError(
                f"leave parameter {forgotten[0]!r}{more} out of every fragment",
                because="parameters that are never exchanged drift apart between workers",
                do="list its module in a fragment, or freeze it",
            )
        home = {name: index for name, (index, _) in found.items()}
        return _fill(parts, home, len(self.modules), self.offsets, sync_every)


def _named(index: int, wanted: str, spellings: Mapping[str, tuple[str, ...]]) -> dict[str, str]:
    """The parameters called `wanted` or held by a module of that name, with their spellings."""
    hits = {
        name: spelling
        for name, known in spellings.items()
        for spelling in known
        if spelling == wanted or spelling.startswith(f"{wanted}.")
    }
    if hits:
        return hits
    known = {
        ".".join(path[:depth])
        for path in (spelling.split(".") for known in spellings.values() for spelling in known)
        for depth in range(1, len(path) + 1)
    }
    raise unknown_name(
        f"put {wanted!r} into fragment {index}",
        wanted,
        sorted(known),
        because="no trainable parameter has that name or lies in a module that has it",
        do="take a name from model.named_modules()",
    )


def _spellings(parts: Iterable[Part]) -> dict[str, tuple[str, ...]]:
    """Accepted names of each part: all aliases, with and without the names of wrappers."""
    bare = {
        part.name: [
            ".".join(piece for piece in alias.split(".") if piece not in WRAPPERS)
            for alias in part.aliases
        ]
        for part in parts
    }
    # "module." is a wrapper only if it holds every parameter.
    while all(name.startswith("module.") for names in bare.values() for name in names) and bare:
        bare = {key: [n.removeprefix("module.") for n in names] for key, names in bare.items()}
    return {part.name: (*part.aliases, *bare[part.name]) for part in parts}


def _layers(rule: str, parts: Iterable[Part]) -> dict[str, int]:
    """The layer of each part in the stack, counting only layers that have parts."""
    layers = {part.name: part.layer for part in parts if part.layer is not None}
    if not layers:
        raise ConfigurationError(
            f"cut this model into fragments by its layers, as {rule} does",
            because="no trainable parameter lies in a stack of layers (an nn.ModuleList, or an "
            "nn.Sequential or nn.ModuleDict of modules of one class)",
            do="use Balanced(), which needs no layers, or ByModule() with your own list",
        )
    place = {layer: index for index, layer in enumerate(sorted(set(layers.values())))}
    return {name: place[layer] for name, layer in layers.items()}


def _fill(
    parts: Sequence[Part], home: Mapping[str, int], count: int, offsets: Offsets, sync_every: int
) -> tuple[Fragment, ...]:
    names: list[list[str]] = [[] for _ in range(count)]
    for part in parts:
        names[home[part.name]].append(part.name)
    due = offsets.of(count, sync_every=sync_every)
    return tuple(
        Fragment(index=index, names=tuple(mine), offset_steps=offset, first_step=first)
        for index, (mine, (offset, first)) in enumerate(zip(names, due, strict=True))
    )
