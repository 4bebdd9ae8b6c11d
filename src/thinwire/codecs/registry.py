"""Codecs by id: from the name of a byte format to a codec that reads and writes it.

An id begins with its family, the text before the first "/", "(" or "-" and digit: `topk` of
`topk-64/sign-levels/chunk`, `per-role` of `per-role(default=cast/bf16)`. Each family has a function
that builds a codec from an id.
"""

import re
from collections.abc import Callable
from typing import Any

from thinwire.codecs.base import Codec, PerRole
from thinwire.codecs.cast import CastBF16, CastFP16, Identity
from thinwire.codecs.grouping import Blocks, Chunks, Grouping, Rows, Tensors
from thinwire.codecs.quantise import E3M0, Quantise
from thinwire.codecs.sparse import RandomK, TopK
from thinwire.codecs.transforms import DCT, Hadamard, Transform
from thinwire.codecs.values import BF16, F32, SignLevels, SignMean, TensorLevels, Values
from thinwire.errors import ConfigurationError, check

_FAMILY = re.compile(r"[^/(]*?(?=[/(]|-\d|$)")
_ELEMENTWISE: dict[str, Codec] = {c.id: c for c in (Identity(), CastBF16(), CastFP16())}
_GROUPS: dict[str, Grouping] = {g.id: g for g in (Tensors(), Rows(), Chunks(), Blocks())}
_VALUES: dict[str, Values] = {
    v.id: v for v in (SignMean(), SignLevels(), TensorLevels(), BF16(), F32())
}
_TRANSFORMS: dict[str, Transform] = {t.id: t for t in (DCT(), Hadamard())}
_ROLES = {"default", "embedding", "head", "vector"}


def from_id(id: str) -> Codec:
    """A codec that reads and writes the byte format `id`, with the default grid and rounding.

    What an encoder is free to choose (grid, rounding) is not in an id: decoding does not need it.

    Raises:
        ConfigurationError: no codec has this id.

    >>> from_id("topk-32/sign-mean/block")
    TopK(k=32, values=SignMean(), groups=Blocks(), transform=None)
    >>> from_id("per-role(default=table-2/row,vector=identity/f32)").vector
    Identity()
    """
    family = _family(id)
    if family not in _FAMILIES:
        raise _unknown(id, f"there are only the families {', '.join(sorted(_FAMILIES))}")
    try:
        codec = _FAMILIES[family](id)
    except ConfigurationError:
        raise
    except (LookupError, ValueError) as error:
        raise _unknown(id, f"it is not an id of the family {family!r}") from error
    if codec.id != id:
        raise _unknown(id, f"the codec that it describes has the id {codec.id!r}")
    return codec


def register(family: str, build: Callable[[str], Codec]) -> None:
    """Let `from_id` know another family of codecs.

    Args:
        family: what its ids begin with, before the first "/", "(" or "-" and digit.
        build: from an id to the codec that has it; a `ValueError` or `LookupError` means that no
            codec has it.

    Raises:
        ConfigurationError: the family is taken, or no id could begin so.

    >>> register("cast", lambda id: CastBF16())
    Traceback (most recent call last):
    thinwire.errors.ConfigurationError: cannot register codecs 'cast'; because the family is...
    """
    check(
        family not in {"", *_FAMILIES} and _family(family) == family,
        f"register codecs {family!r}",
        because="the family is taken, or no id begins so: it is what an id has before the first "
        '"/", "(" or "-" and digit, and must always name the same formats',
        do="pass another word, such as 'mine' for ids like 'mine-4/chunk'",
    )
    _FAMILIES[family] = build


def _family(id: str) -> str:
    match = _FAMILY.match(id)
    assert match is not None  # it matches the empty text
    return match[0]


def _unknown(id: str, because: str) -> ConfigurationError:
    return ConfigurationError(
        f"find the codec {id!r}",
        because=because,
        do="check the id against docs/wire-format.md, or register() the codec's family first",
    )


def _of_rows(id: str) -> Codec:
    """A codec of rows: RECORD[-NUMBER...][/VALUES]/GROUPS[/TRANSFORM]."""
    record, *parts = id.split("/")
    family, *numbers = record.split("-")
    options: dict[str, Any] = {}
    if family in ("topk", "randomk"):
        options["values"] = _VALUES[parts.pop(0)]
    if len(parts) > 1:
        options["transform"] = _TRANSFORMS[parts.pop()]
    (groups,) = parts
    options["groups"] = _GROUPS[groups]
    match family, numbers:
        case "e3m0", []:
            return E3M0(**options)
        case "topk", [k]:
            return TopK(k=int(k), **options)
        case "randomk", [k, "seed", seed]:
            return RandomK(k=int(k), seed=int(seed), **options)
        case "table" | "affine", [bits]:
            return Quantise(bits=int(bits), **options)
        case _:
            raise ValueError(record)


def _per_role(id: str) -> Codec:
    inside = id.removeprefix("per-role(").removesuffix(")")
    # A comma within parentheses belongs to the id of a codec.
    ids = dict(part.split("=", 1) for part in re.split(r",(?![^(]*\))", inside))
    if unknown := ids.keys() - _ROLES:
        raise ValueError(f"no such roles: {unknown}")
    codecs = {role: from_id(codec_id) for role, codec_id in ids.items()}
    return PerRole(default=codecs.pop("default"), **codecs)


_FAMILIES: dict[str, Callable[[str], Codec]] = {
    **dict.fromkeys(map(_family, _ELEMENTWISE), _ELEMENTWISE.__getitem__),
    **dict.fromkeys(("table", "affine", "e3m0", "topk", "randomk"), _of_rows),
    "per-role": _per_role,
}
