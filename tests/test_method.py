"""What a method refuses, what it warns of, and how it was described before."""

import warnings

import pytest
import torch
from torch import Tensor

import thinwire as tw
from thinwire import codecs
from thinwire.aggregate import MeanOverWorkers, Payloads
from thinwire.blocks import DenseVector
from thinwire.codecs import BoundCodec
from thinwire.feedback import Feedback, FeedbackState
from thinwire.fragments.layout import Layout
from thinwire.handshake import flatten_description
from thinwire.method import RENAMED_SLOTS, describe, with_present_names
from thinwire.storage import OnDevice

STORAGE = OnDevice(torch.device("cpu"))
FEEDBACK = tw.ErrorFeedback(decay=0.95)
OWNER = tw.ReduceScatter(owner_feedback=FEEDBACK)
LOSES = [
    codecs.TopK(k=64),
    codecs.TopK(k=4095),
    codecs.Quantise(bits=2, groups=codecs.Tensors()),
    codecs.E3M0(groups=codecs.Tensors()),
    codecs.RandomK(groups=codecs.Tensors()),
    codecs.PerRole(default=codecs.CastBF16(), vector=codecs.TopK()),
]
KEEPS = [
    codecs.Identity(),
    codecs.CastBF16(),
    codecs.TopK(k=4096),
    codecs.Quantise(bits=2),
    codecs.E3M0(groups=codecs.Rows()),
    codecs.RandomK(),
    codecs.PerRole(default=codecs.CastBF16(), vector=codecs.Identity()),
]


@pytest.mark.parametrize("codec", [*LOSES, *KEEPS], ids=lambda codec: codec.id)
def test_a_reduce_scatter_that_loses_much_is_warned_of_and_nothing_else(codec) -> None:
    if codec in LOSES:
        told = rf"{type(codec).__name__}.* because .*; do: .*owner_f"
        with pytest.warns(tw.LossyReduceScatterWarning, match=told):
            tw.presets.diloco(codec=codec, exchange=tw.ReduceScatter())
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        for exchange in (tw.Gather(), tw.Automatic(), OWNER):
            tw.presets.diloco(codec=codec, exchange=exchange)
        if codec in KEEPS:
            tw.presets.diloco(codec=codec, exchange=tw.ReduceScatter())


LAYOUT = Layout.of({"a": (256, 128), "b": (256, 64)})
WORKERS, ROUNDS = 4, 12


def moves() -> list[list[Tensor]]:
    """Every round's pseudo-gradients, half of which all workers share, with some rows heavy."""
    generator = torch.Generator().manual_seed(0)
    heavy = torch.ones(LAYOUT.numel)
    for s in LAYOUT.segments:
        rows = torch.exp(0.5 * torch.randn(s.shape[0], 1, generator=generator))
        heavy[s.start : s.stop] = rows.expand(s.shape).reshape(-1)

    def draw() -> Tensor:
        return heavy * torch.randn(LAYOUT.numel, generator=generator)

    return [[x + draw() for _ in range(WORKERS)] for x in [draw() for _ in range(ROUNDS)]]


def encoded(state: FeedbackState, delta: Tensor, coder: BoundCodec, round: int) -> Tensor:
    payload = torch.empty(coder.nbytes, dtype=torch.uint8)
    state.encode_to(payload, DenseVector(delta), coder, round)
    return payload


def mean_of(codec, layout: Layout, feedback: Feedback, sent: list[list[Tensor]]) -> list[Tensor]:
    """The mean of every round as whoever combines `layout` sees it."""
    coder = codec.bind(layout)
    states = [feedback.bind(layout.numel, STORAGE) for _ in range(WORKERS)]
    means: list[Tensor] = []
    for round, deltas in enumerate(sent):
        payloads = [
            encoded(state, delta, coder, round) for state, delta in zip(states, deltas, strict=True)
        ]
        received = Payloads(coder=coder, payloads=payloads, round=round)
        means.append(MeanOverWorkers().combine(received))
    return means


def delivered(codec, owner: Feedback) -> float:
    """The sum of all updates by reduce-scatter, projected on the sum of those by gather."""
    sent = moves()
    gathered = torch.stack(mean_of(codec, LAYOUT, FEEDBACK, sent)).sum(0)
    reduced = torch.zeros(LAYOUT.numel)
    for start, piece in LAYOUT.cut(WORKERS):
        shard = slice(start, start + piece.numel)
        cut = [[delta[shard] for delta in deltas] for deltas in sent]
        coder, state = codec.bind(piece), owner.bind(piece.numel, STORAGE)
        for round, mean in enumerate(mean_of(codec, piece, FEEDBACK, cut)):
            reduced[shard] += coder.decode(encoded(state, mean, coder, round), round)
    return float(reduced @ gathered / (gathered @ gathered))


def test_what_top_k_delivers_by_a_reduce_scatter() -> None:
    assert delivered(codecs.Identity(), tw.NoFeedback()) == pytest.approx(1.0, abs=1e-6)
    # The owner sends on k of the up to 4 k numbers of a mean.
    without, with_it = (
        delivered(codecs.TopK(k=64), owner) for owner in (tw.NoFeedback(), FEEDBACK)
    )
    assert without == pytest.approx(0.62, abs=0.03)
    assert with_it > without + 0.1


@pytest.mark.parametrize("exchange", [tw.ReduceScatter(), OWNER])
def test_an_aggregate_that_is_not_elementwise_is_not_combined_in_shards(exchange) -> None:
    inner = tw.DropOutliers(aggregate=tw.MedianNormClip())
    for aggregate in (tw.MedianNormClip(), inner):
        with pytest.raises(tw.ConfigurationError, match=r"MedianNormClip.*exchange=Gather"):
            tw.presets.diloco(aggregate=aggregate, exchange=exchange)
        for gathers in (tw.Gather(), tw.Automatic()):
            tw.presets.diloco(aggregate=aggregate, exchange=gathers)
    tw.presets.diloco(aggregate=tw.DropOutliers(), exchange=exchange)


def test_with_many_workers_what_is_not_elementwise_is_gathered() -> None:
    fields = {"sync_every": 1, "outer": tw.outer.SGD(lr=1.0)}

    def moved(exchange, aggregate) -> Tensor:
        """After one round with five workers, of which one moved some rows much farther."""
        loops, models = [], [torch.nn.Linear(64, 320, bias=False) for _ in range(5)]
        method = tw.presets.diloco(exchange=exchange, aggregate=aggregate, **fields)
        for worker, (model, transport) in enumerate(
            zip(models, tw.transport.in_process(5), strict=True)
        ):
            generator = torch.Generator().manual_seed(worker)
            with torch.no_grad():
                model.weight.zero_()
                loops.append(tw.OuterLoop(model, [], method, transport=transport))
                model.weight.add_(torch.randn(320, 64, generator=generator))
                if worker == 4:
                    model.weight[100:] *= 50.0
        for loop in loops:
            loop.begin()
        for loop in loops:
            loop.finish()
        return loops[0].anchor()["weight"]

    clip, mean = tw.MedianNormClip(), tw.MeanOverWorkers()
    assert torch.equal(moved(tw.Automatic(), clip), moved(tw.Gather(), clip))
    assert not torch.equal(moved(tw.Gather(), mean), moved(tw.Gather(), clip))


def named_as_before(description):
    before = {new: old for old, new in RENAMED_SLOTS.items()}
    if isinstance(description, dict):
        return {
            key: before.get(value, value) if key == "kind" else named_as_before(value)
            for key, value in description.items()
        }
    if isinstance(description, list):
        return [named_as_before(item) for item in description]
    return description


@pytest.mark.parametrize("preset", tw.presets.names())
def test_descriptions_written_before_say_today_s_names(preset: str) -> None:
    today = {"method": tw.presets.by_name(preset)().describe(), "workers": 2}
    before = named_as_before(today)
    assert with_present_names(before) == today
    assert with_present_names(flatten_description(before)) == flatten_description(today)
    assert with_present_names(today) == today
    assert (before == today) == (preset not in ("ddp", "demo", "diloco", "muloco"))


def test_only_what_fills_a_slot_is_renamed() -> None:
    kept = {
        "method.name": "Direct",
        "kind of thing": "Direct",
        "text": ["Direct", {"a": "PerWorkers"}],
    }
    assert with_present_names(kept) == kept
    nested = describe(tw.outer.ByWorkerCount(table=((1, tw.outer.GradientAveraging()),)))
    before = named_as_before(nested)
    assert before["kind"] == "PerWorkers"
    assert before["table"][0][1]["kind"] == "Direct"
    assert with_present_names(before) == nested
