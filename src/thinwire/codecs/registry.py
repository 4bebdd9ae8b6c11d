"""Codecs by id: from the name of a byte format to a codec that reads and writes it.

An id begins with its family, the text before the first "/", "(" or "-" and digit: `topk` of
`topk-64/sign-levels/chunk`, `per-role` of `per-role(default=cast/bf16)`. Each family has a function
that builds a codec from an id.
"""

import re
from collections.abc import Callable, Iterator, Mapping
from typing import TypedDict

from thinwire.codecs.base import Codec
from thinwire.codecs.cast import CastBF16, CastFP16, Identity
from thinwire.codecs.grouping import Blocks, Chunks, Grouping, Rows, Tensors
from thinwire.codecs.per_role import PerRole
from thinwire.codecs.quantise import E3M0, Quantise
from thinwire.codecs.sparse import RandomK, TopK
from thinwire.codecs.transforms import DCT, Hadamard, Transform
from thinwire.codecs.values import BF16, F32, SignLevels, SignMean, TensorLevels, Values
from thinwire.errors import ConfigurationError

_FAMILY = re.compile(r"[^/(]*?(?=[/(]|-\d|$)")
_GROUPS: Mapping[str, Grouping] = {g.id: g for g in (Tensors(), Rows(), Chunks(), Blocks())}
_VALUES: Mapping[str, Values] = {
    v.id: v for v in (SignMean(), SignLevels(), TensorLevels(), BF16(), F32())
}
_TRANSFORMS: Mapping[str, Transform] = {t.id: t for t in (DCT(), Hadamard())}
# These formats can be listed; the others have arbitrary numbers in their ids.
_WITHOUT_NUMBERS: Mapping[str, Codec] = {
    codec.id: codec
    for codec in (
        Identity(),
        CastBF16(),
        CastFP16(),
        *(
            codec
            for g in _GROUPS.values()
            for t in (None, *_TRANSFORMS.values())
            for codec in (
                E3M0(groups=g, transform=t),
                *(Quantise(bits=b, groups=g, transform=t) for b in (1, 2, 4, 8)),
            )
        ),
    )
}
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
    build = _FAMILIES.get(_family(id))
    if build is None:
        raise _unknown(id, f"there are only the families {', '.join(sorted(_FAMILIES))}")
    try:
        codec = build(id)
    except ConfigurationError:
        raise
    except (LookupError, ValueError) as error:
        raise _unknown(id, f"it is not an id of the family {_family(id)!r}") from error
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
    if not family or _family(family) != family:
        raise ConfigurationError(
            f"register codecs {family!r}",
            because='a family is the part before the first "/", "(" or "-" and digit of an id',
            do="pass a word, such as 'mine' for ids like 'mine-4/chunk'",
        )
    if family in _FAMILIES:
        raise ConfigurationError(
            f"register codecs {family!r}",
            because="the family is taken, and an id must always name the same format",
            do="choose another name",
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


def _topk(id: str) -> Codec:
    k, *parts = id.removeprefix("topk-").split("/")
    return TopK(k=int(k), **_sparse_parts(*parts))


def _randomk(id: str) -> Codec:
    numbers, *parts = id.removeprefix("randomk-").split("/")
    k, seed = numbers.split("-seed-")
    return RandomK(k=int(k), seed=int(seed), **_sparse_parts(*parts))


class _SparseParts(TypedDict):
    values: Values
    groups: Grouping
    transform: Transform | None


def _sparse_parts(*parts: str) -> _SparseParts:
    """What follows the numbers of an id."""
    values, groups, *transform = parts
    if len(transform) > 1:
        raise ValueError("an id has one transform at most")
    return {
        "values": _VALUES[values],
        "groups": _GROUPS[groups],
        "transform": _TRANSFORMS[transform[0]] if transform else None,
    }


def _per_role(id: str) -> Codec:
    inside = id.removeprefix("per-role(").removesuffix(")")
    codecs: dict[str, Codec] = {}
    for part in _split_outside_parentheses(inside):
        role, _, codec_id = part.partition("=")
        codecs[role] = from_id(codec_id)
    if unknown := codecs.keys() - _ROLES:
        raise ValueError(f"no such roles: {unknown}")
    return PerRole(default=codecs.pop("default"), **codecs)


def _split_outside_parentheses(text: str) -> Iterator[str]:
    """The parts of `text` between commas, where those within parentheses do not count."""
    depth = begin = 0
    for place, sign in enumerate(text):
        depth += (sign == "(") - (sign == ")")
        if sign == "," and depth == 0:
            yield text[begin:place]
            begin = place + 1
    yield text[begin:]


_FAMILIES: dict[str, Callable[[str], Codec]] = {
    **dict.fromkeys(map(_family, _WITHOUT_NUMBERS), _WITHOUT_NUMBERS.__getitem__),
    "topk": _topk,
    "randomk": _randomk,
    "per-role": _per_role,
}
