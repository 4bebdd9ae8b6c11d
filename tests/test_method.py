"""What a method refuses, what it warns of, and how it was described before."""

import warnings

import pytest
import torch
from torch import Tensor

import thinwire as tw
from exchanges import Messages, exchanged, state_of, tag_of
from thinwire import codecs
from thinwire.blocks import DenseVector
from thinwire.exchange import ExchangeState
from thinwire.feedback import Feedback
from thinwire.fragments.layout import Layout
from thinwire.handshake import flatten_description
from thinwire.method import RENAMED_SLOTS, describe, migrate_names
from thinwire.storage import StatePlacement
from thinwire.transport import in_process

STORAGE = StatePlacement(torch.device("cpu"))
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


def delivered(codec, owner: Feedback) -> float:
    """The sum of all updates by reduce-scatter, projected on the sum of those by gather."""
    sums, sent = [], moves()
    for exchange in (tw.Gather(), tw.ReduceScatter(owner_feedback=owner)):
        given = {"codec": codec, "feedback": FEEDBACK, "layout": LAYOUT}
        states = [state_of(exchange, rank, WORKERS, **given) for rank in range(WORKERS)]
        ends, total = in_process(WORKERS), torch.zeros(LAYOUT.numel)
        for round, deltas in enumerate(sent):

            def encode(rank: int, state: ExchangeState, round=round, deltas=deltas) -> Messages:
                return state.encode(DenseVector(deltas[rank].clone()), tag_of(round))

            total += exchanged(states, ends, round=round, encode=encode)[0].mean.whole()
        sums.append(total)
    gathered, reduced = sums
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
    for aggregate in (tw.MedianNormClip(), inner, tw.ClipNorms(aggregate=tw.MedianNormClip())):
        with pytest.raises(tw.ConfigurationError, match=r"MedianNormClip.*exchange=Gather"):
            tw.presets.diloco(aggregate=aggregate, exchange=exchange)
        for gathers in (tw.Gather(), tw.Automatic()):
            tw.presets.diloco(aggregate=aggregate, exchange=gathers)
    tw.presets.diloco(aggregate=tw.DropOutliers(), exchange=exchange)


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
    assert migrate_names(before) == today
    assert migrate_names(flatten_description(before)) == flatten_description(today)
    assert migrate_names(today) == today
    assert (before == today) == (preset not in ("ddp", "demo", "diloco", "muloco"))


def test_only_what_fills_a_slot_is_renamed() -> None:
    kept = {
        "method.name": "Direct",
        "kind of thing": "Direct",
        "text": ["Direct", {"a": "PerWorkers"}],
    }
    assert migrate_names(kept) == kept
    nested = {"kind": "ByWorkerCount", "table": [[1, describe(tw.outer.GradientAveraging())]]}
    before = named_as_before(nested)
    assert before["kind"] == "PerWorkers"
    assert before["table"][0][1]["kind"] == "Direct"
    assert migrate_names(before) == nested
