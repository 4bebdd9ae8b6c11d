"""The papers' tables: each preset fills the slots of a `Method` and computes nothing.

Every field of `Method` can be given as a keyword and then replaces the paper's value.
"""

from collections.abc import Callable, Mapping
from difflib import get_close_matches
from typing import TypedDict, Unpack

from thinwire import inner, outer
from thinwire.aggregate import Aggregate
from thinwire.codecs import CastBF16, Codec, Identity
from thinwire.errors import ConfigurationError
from thinwire.feedback import Feedback
from thinwire.fragments import Fragments
from thinwire.inner import InnerOptimizer
from thinwire.method import Method
from thinwire.outer import OuterOptimizer

__all__ = ["MethodFields", "by_name", "ddp", "diloco", "muloco", "names"]


class MethodFields(TypedDict, total=False):
    """The fields of a `Method`, all optional."""

    name: str
    inner: InnerOptimizer
    sync_every: int
    outer: OuterOptimizer
    codec: Codec
    feedback: Feedback
    fragments: Fragments
    aggregate: Aggregate


def ddp(**fields: Unpack[MethodFields]) -> Method:
    """Data parallelism: the workers' gradients are averaged at every step.

    g = (1/K) sum_k g_k; theta = AdamW(theta, g)

    Raises:
        ConfigurationError: an unknown field, or one that does not fit.

    >>> ddp().sync_every
    1
    """
    return _compose(
        {"name": "ddp", "inner": inner.AdamW(), "sync_every": 1, "outer": outer.Direct()}, fields
    )


def diloco(**fields: Unpack[MethodFields]) -> Method:
    """DiLoCo: H steps of AdamW, then one step of Nesterov momentum on the mean displacement.

    Delta = (1/K) sum_k (theta - theta_k); m = mu m + Delta; theta = theta - eta (Delta + mu m)

    Settings: inner AdamW 4e-4 with weight decay 0.1 and, for K = 2 to 7, outer (0.7, 0.9) from
    DiLoCo (arXiv 2311.08105); H = 30 from its scaling laws (arXiv 2503.09799); the other rows of
    the outer table from MuLoCo (arXiv 2505.23725).

    Raises:
        ConfigurationError: an unknown field, or one that does not fit.

    >>> diloco().outer.at(4)
    SGD(lr=0.7, momentum=0.9, nesterov=True)
    """
    return _compose(
        {
            "name": "diloco",
            "inner": inner.AdamW(lr=4e-4, weight_decay=0.1),
            "sync_every": 30,
            "outer": _nesterov_per_workers(
                (1, 0.7, 0.8), (2, 0.7, 0.9), (8, 0.9, 0.9), (16, 1, 0.9)
            ),
        },
        fields,
    )


def muloco(*, bits: int | None = None, **fields: Unpack[MethodFields]) -> Method:
    """MuLoCo: DiLoCo with Muon as the inner optimizer.

    Settings: Muon with momentum 0.9 and scale sqrt(fan_out/fan_in), H = 30, inner lr and outer
    table of MuLoCo (arXiv 2505.23725): less outer momentum than DiLoCo wants.

    Args:
        bits: width of a number on the wire: None or 32 for fp32, 16 for bf16.
        fields: fields of `Method`.

    Raises:
        ConfigurationError: an unknown field, one that does not fit, `bits` without a codec, or both
            `bits` and `codec`.

    >>> muloco(bits=16).codec
    CastBF16()
    """
    if bits is not None:
        fields = _with_codec(bits, fields)
    return _compose(
        {
            "name": "muloco",
            "inner": inner.Muon(lr=0.0156),
            "sync_every": 30,
            "outer": _nesterov_per_workers((1, 0.7, 0.6), (8, 0.9, 0.8), (16, 1, 0.9)),
        },
        fields,
    )


_PRESETS: Mapping[str, Callable[..., Method]] = {"ddp": ddp, "diloco": diloco, "muloco": muloco}


def names() -> tuple[str, ...]:
    """The names of all presets.

    >>> names()
    ('ddp', 'diloco', 'muloco')
    """
    return tuple(_PRESETS)


def by_name(name: str) -> Callable[..., Method]:
    """The preset called `name`.

    Raises:
        ConfigurationError: there is none.

    >>> by_name("diloco") is diloco
    True
    """
    if name not in _PRESETS:
        raise _unknown("use method", name, names())
    return _PRESETS[name]


def _nesterov_per_workers(*rows: tuple[int, float, float]) -> OuterOptimizer:
    return outer.PerWorkers(
        table=tuple((k, outer.SGD(lr=lr, momentum=mu, nesterov=True)) for k, lr, mu in rows)
    )


def _with_codec(bits: int, fields: MethodFields) -> MethodFields:
    codecs: dict[int, Codec] = {16: CastBF16(), 32: Identity()}
    if bits not in codecs or "codec" in fields:
        raise ConfigurationError(
            f"send {bits} bits a number" + (" and a codec too" if "codec" in fields else ""),
            because=f"there are codecs for {', '.join(map(str, codecs))} bits, and one can be used",
            do="pass one of these as bits, or codec= alone",
        )
    return {**fields, "codec": codecs[bits]}


def _compose(paper: MethodFields, fields: MethodFields) -> Method:
    for field in fields:
        if field not in MethodFields.__annotations__:
            raise _unknown(f"build {paper.get('name')} with", field, MethodFields.__annotations__)
    return Method(**{**paper, **fields})  # pyright: ignore[reportArgumentType]


def _unknown(cannot: str, name: str, known: Mapping[str, object] | tuple[str, ...]) -> Exception:
    close = get_close_matches(name, list(known), n=1)
    return ConfigurationError(
        f"{cannot} {name!r}",
        because=f"there are only {', '.join(known)}",
        do=f"did you mean {close[0]!r}?" if close else "pass one of these",
    )
