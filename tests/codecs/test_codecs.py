import math

import pytest
import torch

import thinwire as tw
from thinwire.codecs import (
    BF16,
    DCT,
    E3M0,
    F32,
    Blocks,
    CastBF16,
    CastFP16,
    Chunks,
    Hadamard,
    Identity,
    Linear,
    MidRise,
    PerRole,
    Quantise,
    RandomK,
    Rounding,
    Rows,
    SignMean,
    Statistical,
    Stochastic,
    TensorLevels,
    Tensors,
    TopK,
    k_for_density,
)
from thinwire.codecs.values import largest
from thinwire.fragments.layout import Layout
from thinwire.testing import CodecContract, vector

# name: (codec, loss, worst), as CodecContract explains them; these pass all of it
CONTRACTS = {
    "Identity": (Identity(), 0.0, 0.0),
    "CastBF16": (CastBF16(), 2.0**-16, 1.0),
    "MidRise2Chunks": (Quantise(bits=2), 0.121, 1.0),
    "Statistical4Rows": (Quantise(bits=4, grid=Statistical(), groups=Rows()), 0.0135, 1.0),
    "Linear8Blocks": (Quantise(bits=8, grid=Linear(), groups=Blocks()), 1e-4, 1e4),
    "E3M0Stochastic": (E3M0(groups=Blocks(), rounding=Stochastic()), 0.087, 1.0),
    "TopKSignLevels": (TopK(k=32, groups=Blocks()), 0.945, 1.0),
    "TopKAllF32": (TopK(k=4096, values=F32(), groups=Blocks()), 0.0, 0.0),
    "TopKTensorLevels": (TopK(k=1000, values=TensorLevels(), groups=Rows()), 0.4, 1.0),
    "RandomKBF16": (RandomK(k=1, values=BF16(), groups=Tensors()), 1.0, 1.0),
    "TopKHadamard": (TopK(k=256, values=BF16(), groups=Tensors(), transform=Hadamard()), 0.72, 1.0),
    "PerRoleDCT": (
        PerRole(default=TopK(transform=DCT()), embedding=Quantise(bits=4), vector=E3M0()),
        0.32,
        1.0,
    ),
}
# These pass what depends on numbers and sizes.
SHORTER = {
    "CastFP16": (CastFP16(), 2.0**-22, 1.0),
    "MidRise1Tensors": (Quantise(bits=1, groups=Tensors()), 0.45, 1.0),
    "Statistical1Tensors": (Quantise(bits=1, grid=Statistical(), groups=Tensors()), 0.99, 1.0),
    "Linear1Rows": (Quantise(bits=1, grid=Linear(), groups=Rows()), 12.5, 1e4),
    "Linear2Tensors": (Quantise(bits=2, grid=Linear(), groups=Tensors()), 0.7, 1e4),
    "Linear4Blocks": (Quantise(bits=4, grid=Linear(), groups=Blocks()), 0.027, 1e4),
    "Stochastic2": (Quantise(bits=2, rounding=Stochastic(seed=3)), 0.205, 4.0),
    "TopKSignMean": (TopK(values=SignMean()), 0.91, 1.0),
    "TopKHalfSignMean": (TopK(k=2048, values=SignMean(), groups=Tensors()), 0.31, 1.0),
    "RandomKF32": (RandomK(k=1000, seed=7, values=F32(), groups=Blocks()), 0.99, 1.0),
    "TopKAllDCT": (TopK(k=4096, values=F32(), groups=Blocks(), transform=DCT()), 1e-12, 1.0),
    "MidRise8Hadamard": (Quantise(bits=8, groups=Rows(), transform=Hadamard()), 1e-4, 1.001),
}
NUMBERS_AND_SIZES = {
    "test_payload_has_the_promised_size_and_loses_no_more_than_it_may",
    "test_any_finite_numbers_stay_finite_and_near",
    "test_residual_is_what_the_payload_lacks",
    "test_encodes_the_parameters_of_its_layout_and_no_others",
}


def contract(name: str) -> type[CodecContract]:
    codec, loss, worst = (CONTRACTS | SHORTER)[name]
    widest = 4.0 if "F32" in name or name in ("Identity", "TopKAllDCT") else 2.0
    members = {"make": lambda self: codec, "loss": loss, "worst": worst, "widest": widest}
    if name in SHORTER:
        tests = {member for member in vars(CodecContract) if member.startswith("test_")}
        assert tests > NUMBERS_AND_SIZES
        members |= dict.fromkeys(tests - NUMBERS_AND_SIZES)
    return type(f"Test{name}", (CodecContract,), members)


globals().update({f"Test{name}": contract(name) for name in CONTRACTS | SHORTER})


# -- construction ----------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("build", "values", "word"),
    [
        (TopK, [{"k": 0}, {"k": 4097}], "set k,"),
        (RandomK, [{"k": 0}, {"k": 4097}], "set k,"),
        (RandomK, [{"seed": -1}, {"seed": 2**63}], "set the seed"),
        (RandomK, [{"values": TensorLevels()}], "SignLevels"),
        (TopK, [{"values": TensorLevels(), "transform": DCT()}], "leave the transform out"),
        (Quantise, [{"bits": 3}, {"bits": 16}], "quantise to"),
        (k_for_density, [{"density": d} for d in (0, 1.5, 1e-9, math.nan)], "send a density"),
    ],
)
def test_what_cannot_work_is_refused_at_construction(build, values, word) -> None:
    for each in values:
        with pytest.raises(tw.ConfigurationError, match=word):
            build(**each)


# -- selection -------------------------------------------------------------------------------------


def rows_to_select_from(columns):
    """Normal numbers, ties, one alone, NaN of both signs and an infinity, and subnormal ones."""
    draws = torch.Generator().manual_seed(columns)
    normal = torch.randn(3, columns, generator=draws)
    few = torch.randint(-2, 3, (3, columns), generator=draws).float()
    equal, spike = torch.full((1, columns), -0.5), torch.zeros(1, columns)
    spike[0, columns // 2] = -1.0
    odd = normal[1:2].clone()
    odd[0, : columns // 2 : 3] = torch.nan
    odd[0, -1], odd[0, columns // 3] = -torch.nan, torch.inf
    return torch.cat([normal, few, spike, equal, 0 * equal, odd, normal[:1] * 1e-42])


@pytest.mark.parametrize("columns", [1, 2, 7, 8, 100, 1009, 4095, 4096, 8192])
def test_largest_is_its_reference(columns) -> None:
    """Of equal ones those with the lowest indices; NaN is the largest of all."""
    x = rows_to_select_from(columns)
    order = torch.sort(x.abs(), dim=1, descending=True, stable=True).indices
    for k in sorted({1, columns // 64, columns // 16, columns // 2, columns - 1, columns} - {0}):
        assert torch.equal(largest(x, k), order[:, :k].sort(1).values), k


# -- rounding --------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "codec",
    [
        Quantise(bits=2, grid=Linear(), rounding=Stochastic(seed=1)),
        Quantise(bits=8, grid=Linear(), rounding=Stochastic(seed=1)),
        E3M0(rounding=Stochastic(seed=1)),
    ],
)
def test_stochastic_rounding_is_right_on_average(codec) -> None:
    x, rounds = torch.linspace(-1.0, 1.0, 41), 400
    x[20] = 0.01
    coder = codec.bind(Layout.vector(41))
    decoded = torch.stack([coder.decode(coder.encode(x, n), n) for n in range(rounds)])
    spread = decoded.std(0) / rounds**0.5
    # bf16 levels are off by up to 1 part in 512
    assert bool(((decoded.mean(0) - x).abs() <= 5 * spread + 0.003).all())
    assert float(spread.max()) > 0


def test_stochastic_rounding_follows_seed_and_round_and_row() -> None:
    x, layout = vector(4096).repeat(2), Layout.vector(8192)

    def encode(seed, number):
        codec = Quantise(bits=2, rounding=Stochastic(seed=seed))
        return codec.bind(layout).encode(x, number)

    assert torch.equal(encode(1, 7), encode(1, 7))
    assert not torch.equal(encode(1, 7), encode(1, 8))
    assert not torch.equal(encode(1, 7), encode(2, 7))
    first, second = encode(1, 7).view(2, -1)
    assert not torch.equal(first, second)


class AlmostOne(Rounding):
    unbiased = True

    def offsets(self, like, key):
        return torch.full_like(like, 1.0 - 2.0**-24)


def test_the_largest_magnitude_survives_any_rounding() -> None:
    codec = E3M0(rounding=AlmostOne())
    x = torch.tensor([1.0, -1.0, 0.25] * 8)
    assert codec.decode(codec.encode(x), 24)[:2].tolist() == [1.0, -1.0]


# -- grids -----------------------------------------------------------------------------------------


@pytest.mark.parametrize("grid", [Linear(), Statistical(), MidRise()])
@pytest.mark.parametrize("bits", [1, 2, 4, 8])
def test_a_row_whose_step_underflows_is_not_made_larger(grid, bits) -> None:
    x = vector(4096, scale=1e-40)
    codec = Quantise(bits=bits, grid=grid, rounding=Stochastic())
    decoded = codec.decode(codec.encode(x), 4096)
    lost, all = (v.double().square().sum() for v in (decoded - x.double(), x))
    assert lost <= 1.001 * all


@pytest.mark.parametrize("bits", [1, 2, 4, 8])
def test_linear_keeps_the_ends_of_a_row_and_a_constant_one(bits) -> None:
    codec = Quantise(bits=bits, grid=Linear())
    x = torch.linspace(-2.0, 6.0, 4096)
    decoded = codec.decode(codec.encode(x), 4096)
    assert [float(decoded[0]), float(decoded[-1])] == pytest.approx([-2.0, 6.0])
    assert codec.decode(codec.encode(torch.full((4096,), 1.5)), 4096).eq(1.5).all()


# -- values ----------------------------------------------------------------------------------------


@pytest.mark.parametrize("groups", [Blocks(), Chunks(), Rows(), Tensors()])
def test_tensor_levels_are_shared_by_all_batches_of_a_large_tensor(groups) -> None:
    """More rows than are coded at a time, and leftovers."""
    layout = Layout.of({"w": (1100, 1030)})
    x = vector(layout.numel)
    x[len(x) // 2 :] *= 3.0
    coders = [
        TopK(k=1024, values=v, groups=groups).bind(layout) for v in (TensorLevels(), F32(), BF16())
    ]
    payload = coders[0].encode(x)
    ours, exact, control = (coder.decode(coder.encode(x)) for coder in coders)
    assert payload.numel() == coders[0].nbytes
    assert torch.equal(ours != 0, exact != 0)
    sections = 2 if groups in (Blocks(), Chunks()) else 1
    assert 3 * sections < len(ours.unique()) <= 4 * sections + 1 < len(control.unique())
    left = x.clone()
    assert torch.equal(coders[0].encode_residual(left), payload)
    assert torch.equal(left, x - ours)


@pytest.mark.parametrize("codec", [TopK(groups=Blocks()), Quantise(bits=8, groups=Blocks())])
def test_feedback_of_blocks_side_by_side_is_a_sum_that_is_encoded(codec) -> None:
    coder = codec.bind(Layout.of({"w": (130, 200)}))
    residual, delta = vector(26_000), vector(26_001)[1:]
    total, payload = residual * 0.95 + delta, torch.empty(coder.nbytes, dtype=torch.uint8)
    coder.encode_feedback_to(payload, residual, delta, decay=0.95)
    assert torch.equal(payload, coder.encode(total))
    assert torch.equal(residual, total - coder.decode(payload))


@pytest.mark.parametrize("scale", [math.nan, math.inf, -math.inf])
def test_a_code_of_zero_is_zero_whatever_the_scale(scale: float) -> None:
    payload = E3M0().encode(torch.tensor([1.0, 0.0, -1.0, -0.0, 1e-9]))
    payload[:2] = torch.tensor([scale], dtype=torch.bfloat16).view(torch.uint8)
    decoded = E3M0().decode(payload, 5)
    assert decoded[[1, 3, 4]].tolist() == [0.0, 0.0, 0.0]
    assert not decoded[[0, 2]].isfinite().any()
