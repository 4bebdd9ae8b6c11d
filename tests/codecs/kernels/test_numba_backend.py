"""Kernels against the row formats' own `write` and `read`: bytes, residuals, means, refusals."""

import math
import multiprocessing
import os
import threading
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from torch import Tensor

import thinwire as tw
from thinwire.codecs import (
    E3M0,
    Blocks,
    Linear,
    MidRise,
    Quantise,
    SignLevels,
    SignMean,
    Statistical,
    TopK,
)
from thinwire.codecs.bits import pack_indices
from thinwire.codecs.kernels import RowKernel, TopKSpec
from thinwire.codecs.row_format import GroupedCodec, RoundKey, RowFormat

numba_backend = pytest.importorskip("thinwire.codecs.kernels.numba_backend")

CPU = torch.device("cpu")
KEY = RoundKey(round=1, row=0)
CODECS: dict[str, GroupedCodec] = {
    **{f"topk-{k}/sign-levels": TopK(k=k) for k in (1, 3, 32, 64, 300, 1024, 2048)},
    **{f"topk-{k}/sign-mean": TopK(k=k, values=SignMean()) for k in (1, 64, 100)},
    **{
        f"table-{bits}/{type(grid).__name__}": Quantise(bits=bits, grid=grid)
        for bits in (1, 2, 4)
        for grid in (MidRise(), Linear(), Statistical())
    },
    **{
        f"affine-8/{type(grid).__name__}": Quantise(bits=8, grid=grid)
        for grid in (MidRise(), Linear(), Statistical())
    },
    "e3m0": E3M0(groups=Blocks()),
}
FEW = ("topk-64/sign-levels", "topk-100/sign-mean", "table-2/MidRise", "affine-8/Linear", "e3m0")


def inputs(rows: int, seed: int = 1) -> dict[str, Tensor]:
    g = torch.Generator().manual_seed(seed)
    x = torch.randn(rows, 4096, generator=g)
    powers = torch.exp2(torch.randint(-9, 2, x.shape, generator=g).float())
    flips = torch.randint(0, 2, x.shape, generator=g).float() * 2 - 1
    return {
        "gauss": x,
        "heavy": x * torch.rand(x.shape, generator=g).clamp(min=1e-2).rsqrt() * 1e-3,
        "cubed": x**3,
        "ties": (x * 2).round(),
        "zeros of both signs": x * 0,
        "sparse": x * (torch.rand(x.shape, generator=g) < 0.005),
        "huge": (x * 1e38).clamp(-1e38, 1e38),
        "tiny": x * 1e-38,
        "tinier": x * 3e-40,
        "tiniest": x * 1e-44,
        "constant": torch.full_like(x, 0.3),
        "negative zeros": torch.full_like(x, -0.0),
        "powers": x.sign() * powers,
        "halves": x.sign() * (powers * 1.5).nextafter(torch.tensor(0.0)),
        "largest": flips * torch.finfo(torch.float32).max,
        "one number": torch.zeros_like(x).index_fill_(1, torch.tensor([77]), -2.5),
    }


def kernel_of(id: str) -> tuple[RowFormat, RowKernel]:
    format = CODECS[id].row_format()
    spec = format.kernel_spec()
    assert spec is not None
    kernel = numba_backend.build(spec, CPU)
    assert kernel is not None
    return format, kernel


def empty_records(format: RowFormat, rows: int) -> Tensor:
    """Records as they lie in a payload: from an odd byte on."""
    nbytes = format.nbytes(4096)
    return torch.full((rows * nbytes + 1,), 0xA5, dtype=torch.uint8)[1:].view(rows, nbytes)


def reference_encode(format: RowFormat, x: Tensor, delta: Tensor | None, decay: float) -> Tensor:
    if delta is not None:
        x.mul_(decay).add_(delta)
    records, sent = format.write(x, KEY)
    sent.add_to(x, weight=-1.0)
    return records


def reference_add(
    format: RowFormat, out: Tensor, senders: Tensor, records: list[Tensor], weight: float
) -> None:
    for decoded in format.read(records, 4096, KEY):
        decoded.add_to(out, weight=weight)
        decoded.count_to(senders)


def bits(x: Tensor) -> Tensor:
    return x.view(torch.int32)


@pytest.mark.parametrize("kind", inputs(1))
@pytest.mark.parametrize("id", CODECS)
def test_three_rounds_of_feedback_have_the_bits_of_the_reference(id: str, kind: str) -> None:
    format, kernel = kernel_of(id)
    delta = inputs(3)[kind]
    theirs, mine = delta.clone(), delta.clone()
    payloads: list[Tensor] = []
    for added in (None,) if kind == "largest" else (None, delta, delta):  # 2 of them are infinite
        want = reference_encode(format, theirs, added, 0.95)
        got = empty_records(format, len(delta))
        kernel.encode(mine, got, delta=added, decay=0.95)
        assert torch.equal(got, want)
        assert torch.equal(bits(mine), bits(theirs))
        payloads.append(got)

    start = inputs(3, seed=2)["gauss"]
    for weight in (1 / 3, -1.0):
        want, counts = start.clone(), torch.ones_like(start)
        reference_add(format, want, counts, payloads, weight)
        plain, counted, senders = start.clone(), start.clone(), torch.ones_like(start)
        kernel.add_to(plain, payloads, weight=weight)
        kernel.add_counted(counted, senders, payloads, weight=weight)
        assert torch.equal(bits(plain), bits(want))
        assert torch.equal(bits(counted), bits(want))
        assert torch.equal(senders, counts)


@pytest.mark.parametrize("rows", [0, 1, 2, 3, 7, 64])
@pytest.mark.parametrize("id", FEW)
def test_any_number_of_rows(id: str, rows: int) -> None:
    format, kernel = kernel_of(id)
    mine = inputs(rows)["heavy"]
    theirs, got = mine.clone(), empty_records(format, rows)
    want = reference_encode(format, theirs, None, 0.5)
    kernel.encode(mine, got, delta=None, decay=0.5)
    assert torch.equal(got, want)
    assert torch.equal(bits(mine), bits(theirs))
    out, expected, counts = (torch.zeros(rows, 4096) for _ in range(3))
    kernel.add_to(out, [got, got], weight=0.5)
    reference_add(format, expected, counts, [want, want], 0.5)
    assert torch.equal(bits(out), bits(expected))
    kernel.add_to(out, [], weight=0.5)
    assert torch.equal(bits(out), bits(expected))
    assert kernel.largest(got) >= expected.abs().amax() if rows else kernel.largest(got) == 0


@pytest.mark.parametrize(("down", "across"), [(0, 3), (1, 1), (1, 7), (3, 1), (5, 3), (2, 33)])
@pytest.mark.parametrize("id", FEW)
def test_blocks_of_a_matrix_are_rows_that_were_cut_out_of_it(
    id: str, down: int, across: int
) -> None:
    format, kernel = kernel_of(id)
    rows = down * across
    delta = inputs(rows)["cubed"]
    theirs, mine = delta.clone(), delta.clone()
    for added in (None, delta, delta):
        want, got = empty_records(format, rows), empty_records(format, rows)
        RowKernel.encode_blocks(kernel, theirs, want, across, delta=added, decay=0.95)
        kernel.encode_blocks(mine, got, across, delta=added, decay=0.95)
        assert torch.equal(got, want)
        assert torch.equal(bits(mine), bits(theirs))
    if across > 1 and down:
        kernel.encode(delta.clone(), want, delta=None, decay=1.0)
        kernel.encode_blocks(delta.clone(), got, across, delta=None, decay=1.0)
        assert not torch.equal(got, want)


@pytest.mark.parametrize("id", FEW)
def test_threads_change_nothing(id: str) -> None:
    format, kernel = kernel_of(id)
    found: list[tuple[Tensor, ...]] = []
    before = torch.get_num_threads()
    try:
        for threads in (1, 2, 5):
            torch.set_num_threads(threads)
            x, records = inputs(331)["cubed"], empty_records(format, 331)
            kernel.encode(x, records, delta=None, decay=1.0)
            out = torch.ones_like(x)
            kernel.add_to(out, [records, records], weight=0.5)
            found.append((records, bits(x), bits(out)))
    finally:
        torch.set_num_threads(before)
    for other in found[1:]:
        assert all(torch.equal(a, b) for a, b in zip(found[0], other, strict=True))


@pytest.fixture
def three_threads() -> Iterator[None]:
    before = torch.get_num_threads()
    torch.set_num_threads(3)
    yield
    torch.set_num_threads(before)


def encoded(rows: int) -> Tensor:
    format, kernel = kernel_of("table-2/MidRise")
    x, records = inputs(rows)["heavy"], empty_records(format, rows)
    kernel.encode(x, records, delta=None, decay=1.0)
    return records


@pytest.mark.usefixtures("three_threads")
def test_threads_of_several_workers_may_call_a_kernel_at_once() -> None:
    want = encoded(200)
    with ThreadPoolExecutor(6) as workers:
        found = [workers.submit(encoded, 200) for _ in range(24)]
        assert all(torch.equal(each.result(timeout=60), want) for each in found)


def threads_used() -> int:
    def work(first: int, last: int) -> int:
        time.sleep(0.02)
        return threading.get_ident()

    return len(set(numba_backend._over_rows(600, work)))


def _count_threads(answers: Any) -> None:
    answers.put(threads_used())


@pytest.mark.skipif(not hasattr(os, "fork"), reason="forks")
@pytest.mark.filterwarnings("ignore:.*multi-threaded.*fork:DeprecationWarning")
@pytest.mark.usefixtures("three_threads")
def test_a_forked_process_has_threads_of_its_own() -> None:
    assert threads_used() == 3  # and they stay
    fork = multiprocessing.get_context("fork")
    answers = fork.Queue()
    child = fork.Process(target=_count_threads, args=(answers,))
    child.start()
    try:
        assert answers.get(timeout=60) == 3
    finally:
        child.join(10)
        child.kill()


@pytest.mark.parametrize("bad", [math.nan, -math.nan, math.inf, -math.inf])
@pytest.mark.parametrize("id", CODECS)
def test_a_row_that_is_not_finite_disturbs_no_other(id: str, bad: float) -> None:
    format, kernel = kernel_of(id)
    x = inputs(3)["gauss"]
    x[1, 7] = x[1, 4095] = bad
    theirs, records = x[::2].clone(), empty_records(format, 3)
    kernel.encode(x, records, delta=None, decay=1.0)
    assert torch.equal(records[::2], reference_encode(format, theirs, None, 1.0))
    assert torch.equal(bits(x[::2].contiguous()), bits(theirs))
    x.fill_(bad)
    kernel.encode(x, records, delta=torch.full_like(x, bad), decay=0.5)


@pytest.mark.parametrize("id", CODECS)
def test_a_thousand_damaged_payloads_are_judged_alike(id: str) -> None:
    format, kernel = kernel_of(id)
    rows = 2
    x, sound = inputs(rows)["gauss"], empty_records(format, rows)
    kernel.encode(x, sound, delta=None, decay=1.0)
    g = torch.Generator().manual_seed(4)
    refused = 0
    for trial in range(1000 if id in FEW else 100):
        damaged = sound.clone()
        for _ in range(1 + trial % 2):
            place = int(torch.randint(0, damaged.numel(), (), generator=g))
            damaged.view(-1)[place] ^= 1 << int(torch.randint(0, 8, (), generator=g))
        want, counts, got = (torch.zeros(rows, 4096) for _ in range(3))
        pair = [sound, damaged]
        error = refusal(reference_add, format, want, counts, pair, 0.5)
        assert refusal(kernel.add_to, got, pair, weight=0.5) == error
        assert refusal(kernel.largest, damaged) == error
        if error:
            refused += 1
            continue
        assert torch.equal(torch.nan_to_num(got), torch.nan_to_num(want))
        alone = torch.zeros(rows, 4096)
        reference_add(format, alone, counts, [damaged], 1.0)
        limit = kernel.largest(damaged)
        assert limit >= alone.abs().amax() or not limit.isfinite()
    assert bool(refused) == isinstance(format.kernel_spec(), TopKSpec)


def test_wrong_places_are_refused_with_the_error_of_the_reference() -> None:
    format, kernel = kernel_of("topk-64/sign-levels")
    sound = empty_records(format, 3)
    kernel.encode(inputs(3)["gauss"], sound, delta=None, decay=1.0)
    beyond, falling, fewer = sound.clone(), sound.clone(), sound.clone()
    beyond[1, :64] = pack_indices(torch.arange(4096 - 63, 4096 + 1)[None], 4096)
    places = torch.arange(64)
    falling[2, :64] = pack_indices(places.flip(0)[None], 4096)
    fewer[0, :16] = 0
    for payloads in ([beyond], [sound, falling], [fewer], [falling, fewer], [fewer, beyond]):
        out, senders = torch.zeros(3, 4096), torch.zeros(3, 4096)
        error = refusal(reference_add, format, out.clone(), senders.clone(), payloads, 1.0)
        number = "another number of indices" in error
        assert number == any(payload is fewer for payload in payloads)
        assert number != ("do not ascend" in error)
        assert refusal(kernel.add_to, out, payloads, weight=1.0) == error
        assert refusal(kernel.add_counted, out, senders, payloads, weight=1.0) == error
    assert "do not ascend" in refusal(kernel.largest, beyond)
    assert "another number" in refusal(kernel.largest, fewer)


def refusal(work: Any, *args: Any, **settings: Any) -> str:
    try:
        work(*args, **settings)
    except tw.ExchangeError as error:
        return str(error)
    return ""


@pytest.mark.parametrize("id", FEW)
def test_levels_that_are_not_finite_show_in_the_largest(id: str) -> None:
    format, kernel = kernel_of(id)
    x, records = inputs(2)["gauss"], empty_records(format, 2)
    kernel.encode(x, records, delta=None, decay=1.0)
    assert kernel.largest(records).isfinite()
    at = _level_byte(format)
    for high in (0x7F, 0xFF):
        broken = records.clone()
        broken[1, at : at + 2] = torch.tensor([0x80, high], dtype=torch.uint8)
        assert not kernel.largest(broken).isfinite()


def _level_byte(format: RowFormat) -> int:
    """Where a row's first level has its upper half."""
    spec = format.kernel_spec()
    if isinstance(spec, TopKSpec):
        values: Any = SignLevels() if spec.two_levels else SignMean()
        return spec.nbytes - values.nbytes(spec.k)
    return 2 if format.id.startswith("affine") else 0


@settings(max_examples=60, deadline=None, suppress_health_check=list(HealthCheck))
@given(
    id=st.sampled_from(list(CODECS)),
    seed=st.integers(0, 2**31),
    power=st.integers(-149, 100),
    tail=st.floats(0.5, 6.0),
    levels=st.sampled_from((0, 1, 3, 40)),
)
def test_bits_are_those_of_the_reference(id, seed, power, tail, levels) -> None:
    format, kernel = kernel_of(id)
    x = torch.randn(2, 4096, generator=torch.Generator().manual_seed(seed))
    x = x.sign() * x.abs() ** tail
    x = (x * levels).round() / levels if levels else x
    x = (x.double() * 2.0**power).float().clamp(-3e38, 3e38)
    theirs, mine, got = x.clone(), x.clone(), empty_records(format, 2)
    want = reference_encode(format, theirs, x * 0.1, 0.9)
    kernel.encode(mine, got, delta=x * 0.1, decay=0.9)
    assert torch.equal(got, want)
    assert torch.equal(bits(mine), bits(theirs))
