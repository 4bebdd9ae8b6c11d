"""Compare a kernel with the plain torch path on the CPU, in rows of every kind.

    THINWIRE_KERNELS=triton TRITON_INTERPRET=1 python tests/kernel_parity.py 1 e3m0

checks Triton's kernels for a format in its interpreter, without a GPU, with one seed. The
interpreter must be selected before triton is imported, hence a process of its own.
"""

import sys
from collections.abc import Callable, Iterator
from functools import partial

import torch
from torch import Tensor

from thinwire.codecs import E3M0, Quantise, SignLevels, SignMean, TopK
from thinwire.codecs.bits import pack
from thinwire.codecs.kernels import RowKernel, find_kernel
from thinwire.codecs.levels import RoundKey
from thinwire.codecs.row_format import GroupedCodec
from thinwire.errors import ExchangeError

CHUNK = 4096
DECAY, WEIGHT = 0.95, 1 / 3


def named(*several: GroupedCodec) -> dict[str, GroupedCodec]:
    return {codec.record_id: codec for codec in several}


DENSE = (E3M0(), *(Quantise(bits=bits) for bits in (1, 2, 4, 8)))
SPARSE = (TopK(k=2**b, values=v) for b in range(4, 12) for v in (SignLevels(), SignMean()))
CODECS = named(*DENSE, *SPARSE)


def rows_of_every_kind(seed: int) -> Tensor:
    """fp32 [14, 4096]."""
    generator = torch.Generator().manual_seed(seed)
    x = torch.randn(CHUNK, generator=generator)
    powers = torch.exp2(torch.randint(-9, 2, x.shape, generator=generator).float())
    return torch.stack(
        [
            x,
            x**3,
            (x * 2).round(),  # ties
            x * 0,  # zeros of both signs
            x * 1e37,
            x.sign() * torch.finfo(torch.float32).max / 2,
            x * 1e-38,
            x * 1e-44,
            x * 3e-40,
            torch.full_like(x, -0.3),
            (torch.arange(CHUNK) == 77) * -2.5,
            x.sign() * powers,
            x.abs() * (torch.rand(CHUNK, generator=generator) < 0.005),
            x.sign() * (1 + (powers < 1)) * (1 - 2**-24),  # just below levels
        ]
    )


def check(codec: GroupedCodec, kernel: RowKernel, device: str, *, seeds: int = 1) -> None:
    """Raise an AssertionError that names the first difference."""
    for seed in range(seeds):
        x = rows_of_every_kind(seed)
        generator = torch.Generator().manual_seed(1000 + seed)
        rest = torch.randn(x.shape, generator=generator) * (0.2 * x.abs().amax(1, keepdim=True))
        records: list[Tensor] = []
        for begin, end in ((0, 7), (7, 13), (13, 14)):
            part = slice(begin, end)
            records.append(_encode(codec, kernel, device, x[part], rest[part]))
        payload = torch.cat(records)
        _encode(codec, kernel, device, torch.cat([x[:2], 2 * x[5:6]]), None)
        _encode(codec, kernel, device, x[:0], x[:0])
        _encode_beside_what_is_not_finite(codec, kernel, device, x[:3])
        workers = [payload, payload.flip(0), payload.roll(5, 0)]
        for count in (1, 3):
            _add(codec, kernel, device, [w[:7] for w in workers[:count]])
        _add(codec, kernel, device, [payload[:0]])
        _largest(codec, kernel, device, payload)
        several = list(_damaged(codec, payload[:2], generator))
        words = "".join(_add(codec, kernel, device, [damaged]) for damaged in several)
        _add(codec, kernel, device, [payload[:2], several[-1], several[3]])
        if isinstance(codec, TopK):
            assert "another number of indices" in words


def _encode(
    codec: GroupedCodec, kernel: RowKernel, device: str, x: Tensor, rest: Tensor | None
) -> Tensor:
    """The reference's records of decay * rest + x, or of x."""
    expected = x.clone() if rest is None else rest * DECAY + x
    record = reference_encode(codec, expected)
    given = (x if rest is None else rest).to(device, copy=True)
    out = _odd(torch.full_like(record, 0xA5), device)
    kernel.encode(given, out, None if rest is None else x.to(device), DECAY)
    _same("records", out, record)
    _same("residuals", given, expected)
    return record


def _encode_beside_what_is_not_finite(
    codec: GroupedCodec, kernel: RowKernel, device: str, x: Tensor
) -> None:
    """A non-finite row may become anything, but the rows around it must not change."""
    x = x.clone()
    expected = torch.empty(3, codec.record_nbytes(CHUNK), dtype=torch.uint8)
    kept = [0, 2]
    residual = x[kept]
    expected[kept] = reference_encode(codec, residual)
    x[1, ::3], x[1, 1::3] = torch.nan, -torch.inf
    given, out = x.to(device, copy=True), _odd(torch.zeros_like(expected), device)
    kernel.encode(given, out, None, 1.0)
    _same("records", out[kept], expected[kept])
    _same("residuals", given[kept], residual)


def reference_encode(codec: GroupedCodec, x: Tensor) -> Tensor:
    """The codec's own records of `x`, from which their decoded numbers are subtracted."""
    records = codec.write(x, RoundKey())
    reference_add(codec, x, [records], -1.0)
    return records


def reference_add(
    codec: GroupedCodec,
    out: Tensor,
    records: list[Tensor],
    weight: float,
    counts: Tensor | None = None,
) -> None:
    """`RowKernel.add`, done by the codec itself."""
    for numbers in codec.read(records, CHUNK, RoundKey()):
        numbers.add_to(out, weight=weight)
        if counts is not None:
            numbers.add_to(counts, weight=None)


def _add(codec: GroupedCodec, kernel: RowKernel, device: str, records: list[Tensor]) -> str:
    """Check that both refuse the records with the same words, or add and count the same."""
    rows = len(records[0])
    start = torch.linspace(-1, 1, rows * CHUNK).view(rows, CHUNK)
    mean, counts = start.clone(), start.clone()
    placed = [_odd(r, device) for r in records]
    wanted = _refusal(reference_add, codec, mean, records, WEIGHT, counts)
    for counted in (start.to(device, copy=True), None):
        ours = start.to(device, copy=True)
        found = _refusal(kernel.add, ours, placed, WEIGHT, counted)
        assert found == wanted, f"refusals: {found} for {wanted}"
        if not wanted:
            _same("means", ours, mean)
        if not wanted and counted is not None:
            _same("counts", counted, counts)
    return wanted


def _largest(codec: GroupedCodec, kernel: RowKernel, device: str, records: Tensor) -> None:
    """Check the bound: at least the largest number, non-finite if a level is, 0 for no rows."""
    decoded = torch.zeros(len(records), CHUNK)
    largest = kernel.largest or partial(codec.largest, columns=CHUNK, key=RoundKey())
    reference_add(codec, decoded, [records], 1.0)
    for row, record in zip(decoded, records, strict=True):
        found = float(largest(_odd(record[None], device)))
        assert row.abs().max() <= found <= torch.finfo(torch.float32).max, f"largest: {found}"
    for number, bits in ((torch.inf, 0x7F80), (-torch.inf, 0xFF80), (torch.nan, 0x7FC0)):
        spoiled = records.clone()
        # The first level, an origin or a scale.
        at = codec.places_nbytes(CHUNK) if isinstance(codec, TopK) else 0
        number_nbytes = 4 if codec.record_id == "affine-8" else 2
        number_bytes = (bits << 8 * (number_nbytes - 2)).to_bytes(number_nbytes, "little")
        spoiled[1, at : at + number_nbytes] = torch.tensor([*number_bytes], dtype=torch.uint8)
        found = float(largest(spoiled.to(device)))
        assert found != found or (found == torch.inf and number == number), f"of {number}: {found}"
        assert (found != found) == (number != number), f"of {number}: {found}"
    assert kernel.largest is None or float(kernel.largest(records[:0].to(device))) == 0


def _damaged(codec: GroupedCodec, records: Tensor, generator: torch.Generator) -> Iterator[Tensor]:
    """Records with some bytes changed; most of Top-k's still have valid places."""
    nbytes = records.shape[1]
    places = codec.places_nbytes(CHUNK) if isinstance(codec, TopK) else 0
    for _ in range(3):
        noise = torch.randint(256, records.shape, dtype=torch.uint8, generator=generator)
        noise[:, :places] = records[:, :places]
        yield noise
    if not places:
        negative = records.clone()  # the first level or scale
        negative[1, 1] ^= 0x80
        yield negative
        return
    yield torch.full_like(records, 255)
    yield torch.zeros_like(records)
    for _ in range(8):
        one = records.clone()
        at = int(torch.randint(nbytes, (), generator=generator))
        one[1, at] ^= 1 << int(torch.randint(8, (), generator=generator))
        yield one
    equal, low = records.clone(), (CHUNK // codec.k).bit_length() - 1
    ones = torch.arange(codec.k + (CHUNK - 1 >> low) + 1) < codec.k  # k places of 0
    bitmap = pack(ones[None].to(torch.uint8), 1)[0]
    equal[1, :places] = 0
    equal[1, : len(bitmap)] = bitmap
    yield equal


def _odd(records: Tensor, device: str) -> Tensor:
    """A copy at an odd address."""
    buffer = torch.empty(records.numel() + 1, dtype=torch.uint8, device=device)
    copy = buffer[1:].view(records.shape)
    return copy.copy_(records)


def _refusal(work: Callable[..., object], *given: object) -> str:
    """The error of a call; "" without one."""
    try:
        work(*given)
    except ExchangeError as e:
        return str(e)
    return ""


def _same(what: str, ours: Tensor, expected: Tensor) -> None:
    """Check equality to the bit, including signs of zeros; all NaNs count as equal."""
    ours = ours.cpu()
    different = ours != expected
    if expected.is_floating_point():
        different = ours.view(torch.int32) != expected.view(torch.int32)
        different &= ~(ours.isnan() & expected.isnan())
    where = different.nonzero()
    assert not len(where), f"{len(where)} {what} differ, the first at {where[0].tolist()}"


if __name__ == "__main__":
    torch.set_num_threads(1)
    seeds = int(sys.argv[1])
    for name in sys.argv[2:]:
        kernel = find_kernel(CODECS[name], torch.device("cpu"))
        assert kernel is not None
        assert "triton" in kernel.add.__module__
        check(CODECS[name], kernel, "cpu", seeds=seeds)
        print(name, flush=True)
