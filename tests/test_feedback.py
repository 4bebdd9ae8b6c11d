"""Error feedback: the recurrence, what it conserves, where it lives and what it refuses."""

import pytest
import torch
from torch import Tensor, nn

import thinwire as tw
from thinwire import codecs
from thinwire.blocks import DenseVector
from thinwire.feedback import FeedbackState
from thinwire.fragments.layout import Layout
from thinwire.storage import StatePlacement
from toy import Team, adamw, build_model, same_bits, sgd

STORAGE = StatePlacement(torch.device("cpu"))
LOSSY = [codecs.Quantise(bits=2), codecs.TopK(k=64), codecs.CastBF16(), codecs.E3M0()]
FLOAT_MAX = torch.finfo(torch.float32).max


def diloco(**fields) -> tw.Method:
    return tw.presets.diloco(**{"sync_every": 2, "outer": tw.outer.SGD(lr=1.0)} | fields)


def deltas(rounds: int, numel: int = 5000) -> list[Tensor]:
    return list(torch.randn(rounds, numel, generator=torch.Generator().manual_seed(1)))


def encoded(state: FeedbackState, delta: Tensor, coder: codecs.BoundCodec) -> Tensor:
    payload = torch.empty(coder.nbytes, dtype=torch.uint8)
    state.encode_to(payload, DenseVector(delta), coder)
    return payload


def rounds_of(feedback: tw.ErrorFeedback, codec: codecs.Codec, moves: list[Tensor]):
    """What was sent in each round, and the residual at the end."""
    coder = codec.bind(Layout.vector(len(moves[0])))
    state = feedback.bind(len(moves[0]), STORAGE)
    sent = [coder.decode(encoded(state, delta, coder)) for delta in moves]
    return sent, state.state_dict()["residual"]


def reference(decay: float, codec: codecs.Codec, moves: list[Tensor]):
    residual, sent = torch.zeros_like(moves[0]), []
    for delta in moves:
        wanted = decay * residual + delta
        sent.append(codec.decode(codec.encode(wanted), len(wanted)))
        residual = wanted - sent[-1]
    return sent, residual


@pytest.mark.parametrize("codec", LOSSY, ids=lambda codec: codec.id)
@pytest.mark.parametrize(
    ("decay", "numel"), [(0.0, 4097), (0.5, 5000), (0.9, 3), (1.0, 0), (1.0, 1), (1.0, 5000)]
)
def test_the_recurrence(codec, decay: float, numel: int) -> None:
    moves = deltas(5, numel)
    sent, residual = rounds_of(tw.ErrorFeedback(decay=decay), codec, moves)
    expected, left = reference(decay, codec, moves)
    assert same_bits(sent, expected)
    assert torch.equal(residual, left)
    assert bool(residual.any()) or numel < 4


@pytest.mark.parametrize("exchange", [tw.Gather(), tw.ReduceScatter()])
def test_the_outer_learning_rate_is_applied_once(exchange) -> None:
    """The residual starts empty, so the first round is that of a worker without feedback."""

    def train(feedback, lr: float) -> Team:
        outer = tw.outer.SGD(lr=lr)
        method = diloco(
            codec=codecs.Quantise(bits=4), feedback=feedback, outer=outer, exchange=exchange
        )
        return Team(method, adamw, 2).train(2)

    with_it, without = train(tw.ErrorFeedback(), 0.8), train(tw.NoFeedback(), 0.8)
    assert same_bits(with_it.anchor(), without.anchor())
    assert not same_bits(without.anchor(), train(tw.NoFeedback(), 0.64).anchor())
    # And the residual is what was not sent, whatever the rate.
    slow = train(tw.ErrorFeedback(), 0.1)
    assert same_bits(*([*kept(team.loops[0]).values()] for team in (with_it, slow)))


def kept(loop: tw.OuterLoop) -> dict[str, Tensor]:
    return loop.state_dict()["fragments"][0]["exchange"]


# -- where it lives ------------------------------------------------------------------------------


@pytest.mark.filterwarnings("ignore::thinwire.LossyReduceScatterWarning")
@pytest.mark.parametrize("exchange", [tw.Gather(), tw.ReduceScatter()])
def test_state_is_fp32_on_the_host_whatever_the_model(exchange) -> None:
    def model() -> nn.Module:
        return build_model().to(torch.bfloat16)

    method = diloco(codec=codecs.TopK(), feedback=tw.ErrorFeedback(device="cpu"), exchange=exchange)
    team = Team(method, sgd, 2, model=model)
    with torch.no_grad():
        team.models[0][1].weight += 0.25
    for _ in range(2):
        team.exchange()
    residuals = kept(team.loops[0]).values()
    assert {(r.dtype, r.device.type) for r in residuals} == {(torch.float32, "cpu")}
    assert sum(r.numel() for r in residuals) == 139
    assert team.loops[0].memory()["feedback"] == 4 * 139
    assert team.loops[0].stats.peak_outer_host_bytes == 4 * 139
    assert any(float(r.abs().max()) > 0 for r in residuals)


def test_the_device_is_not_part_of_the_description() -> None:
    here, there = (diloco(feedback=tw.ErrorFeedback(device=d)) for d in (None, "cpu"))
    assert here.describe() == there.describe()
    other = diloco(feedback=tw.ErrorFeedback(decay=0.8))
    assert here.describe() != other.describe()


@pytest.mark.parametrize("decay", [-0.1, 1.1, float("nan"), float("inf")])
def test_decays_that_do_not_forget_are_refused(decay: float) -> None:
    with pytest.raises(tw.ConfigurationError, match="decay of what was not sent"):
        tw.ErrorFeedback(decay=decay)


def test_a_residual_of_another_size_is_refused() -> None:
    state = tw.ErrorFeedback().bind(3, STORAGE)
    for wrong in ({}, {"residual": torch.zeros(4)}, {"residual": torch.zeros(3), "more": 1}):
        with pytest.raises(tw.CheckpointError, match="not a residual of 3"):
            state.load_state_dict(wrong)


# -- what is not finite --------------------------------------------------------------------------


def test_a_sum_beyond_fp32_is_refused() -> None:
    coder = codecs.TopK(k=1).bind(Layout.vector(5000))
    state = tw.ErrorFeedback(decay=1.0).bind(5000, STORAGE)
    state.load_state_dict({"residual": torch.full((5000,), 0.9 * FLOAT_MAX)})
    with pytest.raises(tw.NonFiniteError, match="leaves the range of fp32"):
        encoded(state, torch.full((5000,), 0.2 * FLOAT_MAX), coder)


@pytest.mark.parametrize("feedback", [tw.NoFeedback(), tw.ErrorFeedback(decay=0.5)])
def test_finite_numbers_whose_sum_is_not_are_sent(feedback) -> None:
    coder = codecs.E3M0().bind(Layout.vector(5000))
    state = feedback.bind(5000, STORAGE)
    for number in (1e38, -1e38):
        payload = encoded(state, torch.full((5000,), number), coder)
        assert bool(torch.isfinite(coder.decode(payload)).all())


def test_a_difference_that_overflows_is_refused_before_feedback_changes() -> None:
    method = tw.presets.diloco(
        sync_every=1, codec=tw.codecs.Quantise(bits=2), feedback=tw.ErrorFeedback()
    )
    team = Team(method, sgd, 2).train(1)
    loop, model = team.loops[0], team.models[0]
    (fragment,) = loop._state.fragments
    before = fragment.exchange.feedback()
    assert any(value.any() for value in before.values())
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.fill_(-3e38)
    fragment.outer.flat_anchor().fill_(3e38)
    with pytest.raises(tw.NonFiniteError, match="NaN or an infinity"):
        loop.begin()
    after = fragment.exchange.feedback()
    assert all(torch.equal(after[key], value) for key, value in before.items())
