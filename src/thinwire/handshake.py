"""Descriptions of runs, which all workers compare before the first step."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

from thinwire.checksums import anchor_digest
from thinwire.errors import MismatchError
from thinwire.live_weights import whole_tensor

_WEIGHTS = "initial weights"
_FROZEN = "frozen weights"
_CONSEQUENCES = (_WEIGHTS, _FROZEN, "wire order", "fragment sizes")
# Column sums are hashed block by block, so that reordered rows change the digest.
_BLOCK = 1 << 20


def digest(tensors: Mapping[str, Tensor]) -> str:
    """SHA-256 of names, shapes and fp32 values, in the order of the names.

    A DTensor counts as the whole tensor, which is gathered: all its ranks must call this.

    >>> digest({"w": torch.zeros(2)})[:12]
    '9cc212800a75'
    """
    total = hashlib.sha256()
    for name in sorted(tensors):
        values = _as_real(whole_tensor(tensors[name])).float().cpu().contiguous()
        total.update(f"{name}{tuple(values.shape)}".encode())
        total.update(values.numpy().data)
    return total.hexdigest()


def weights_digest(tensors: Mapping[str, Tensor]) -> str:
    """A digest of weights at the speed of memory; `digest` hashes all bytes.

    SHA-256 of names, shapes and the column sums of every 2^20 numbers, in the order of the names.
    It detects no adversary. fp16 and bf16 are converted to fp32, since workers may hold frozen
    weights in either; other numbers are digested as bytes.

    Args:
        tensors: tensors by name, of any dtype and on any device.

    >>> weights_digest({"w": torch.zeros(2)}) == weights_digest({"w": torch.zeros(2).bfloat16()})
    True
    """
    total = hashlib.sha256()
    for name in sorted(tensors):
        values = _as_real(tensors[name])
        total.update(f"{name}{tuple(values.shape)}".encode())
        is_short = values.dtype in (torch.float16, torch.bfloat16)
        for block in values.reshape(-1).split(_BLOCK):
            total.update(anchor_digest(block.float() if is_short else block))
    return total.hexdigest()


def _as_real(values: Tensor) -> Tensor:
    values = values.detach()
    # Frozen weights may be complex, and float() would drop half of them.
    return torch.view_as_real(values.resolve_conj()) if values.is_complex() else values


def flatten_description(value: Any, path: str = "") -> dict[str, str]:
    """Nested data as one text per leaf, keyed by its path.

    >>> flatten_description({"outer": {"lr": 0.7}})
    {'outer.lr': '0.7'}
    """
    if not isinstance(value, Mapping | list):
        return {path: str(value)}
    items = value.items() if isinstance(value, Mapping) else enumerate(value)
    leaves: dict[str, str] = {}
    for key, item in items:
        leaves |= flatten_description(item, f"{path}.{key}" if path else str(key))
    return leaves


def encode_description(
    description: Mapping[str, Any],
    weights: Mapping[str, Tensor] | None = None,
    frozen: Mapping[str, Tensor] | None = None,
) -> bytes:
    """Encode the description of a worker's run; equal workers have equal bytes.

    Args:
        description: description of the run, nested.
        weights: initial weights; only their digest is sent.
        frozen: weights that are not trained; only their digest is sent.
    """
    flat = flatten_description(description)
    if weights is not None:
        flat[_WEIGHTS] = weights_digest(weights)
    if frozen:
        flat[_FROZEN] = weights_digest(frozen)
    return json.dumps(flat, sort_keys=True).encode()


def check_descriptions(by_rank: Mapping[int, bytes]) -> None:
    """Raise `MismatchError` naming the first field in which two workers differ, and both values."""
    first_rank, first = min(by_rank.items())
    for rank, encoded in sorted(by_rank.items()):
        if encoded != first:
            a, b = _decode(first_rank, first), _decode(rank, encoded)
            field = str(first_difference(a, b))
            raise MismatchError(
                f"start: workers {first_rank} and {rank} differ in {field}",
                because=f"worker {first_rank} has {a.get(field, 'none')} and "
                f"worker {rank} has {b.get(field, 'none')}",
                do="seed all workers alike before building the model, or load the same weights"
                if field in (_WEIGHTS, _FROZEN)
                else "start all workers from the same script, arguments and thinwire version",
            )


def _decode(rank: int, encoded: bytes) -> dict[str, str]:
    try:
        return json.loads(encoded)
    except ValueError as error:
        raise MismatchError(
            f"start: the description of worker {rank} cannot be read",
            because="it is sealed and this worker has no token, or another program sent it",
            do="set THINWIRE_TOKEN to the same on all workers, or on none",
        ) from error


def first_difference(a: Mapping[str, str], b: Mapping[str, str]) -> str | None:
    """The most telling field in which two flat descriptions differ; None if they are equal.

    >>> first_difference({"kind": "SGD", "lr": "1"}, {"kind": "AdamW", "eps": "0.1", "lr": "1"})
    'kind'
    """
    differing = [field for field in a.keys() | b.keys() if a.get(field) != b.get(field)]
    # Different shapes imply different weights and order, and a different class different fields.
    # Consequences come last, so that the cause is named.
    return min(
        differing,
        key=lambda f: (f.startswith(_CONSEQUENCES), f not in a or f not in b, f),
        default=None,
    )


def check_same(
    theirs: Mapping[str, str], mine: Mapping[str, str], *, cannot: str, whose: str, do: str
) -> None:
    """Raise `MismatchError` naming the field in which two flat descriptions differ.

    Args:
        theirs: the saved description.
        mine: this run's description.
        cannot: what cannot be done, for the error message.
        whose: name of what was saved, for the error message.
        do: advice, for the error message.
    """
    field = first_difference(theirs, mine)
    if field is not None:
        raise MismatchError(
            f"{cannot}: {field} differs",
            because=f"{whose} has {theirs.get(field, 'none')} and this run "
            f"{mine.get(field, 'none')}",
            do=do,
        )


def check_same_run(theirs: Mapping[str, str], mine: Mapping[str, str]) -> None:
    """Raise `MismatchError` unless both describe one run, with any numbers of workers.

    >>> check_same_run({"method.sync_every": "5", "workers": "2"}, {"method.sync_every": "5"})
    """
    check_same(
        {field: value for field, value in theirs.items() if field != "workers"},
        {field: value for field, value in mine.items() if field != "workers"},
        cannot="take over this state",
        whose="the state",
        do="start all workers from the same script, arguments and thinwire version",
    )
