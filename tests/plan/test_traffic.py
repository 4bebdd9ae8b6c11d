"""The bytes of a plan are the bytes of a run: equal, on every worker, with no tolerance."""

import dataclasses
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import nn

import thinwire as tw
import toy
from thinwire import codecs
from thinwire.exchange import Exchange, ExchangeContext, ExchangeState, Sizes
from thinwire.exchange.pairs import peers_of
from thinwire.feedback import Feedback, FeedbackState
from thinwire.fragments.layout import Layout
from thinwire.plan.models import resolve
from thinwire.plan.shape import Shape
from thinwire.plan.traffic import MessageSpec, Traffic, traffic
from thinwire.storage import StatePlacement
from thinwire.train import recipes
from thinwire.train.config import Machine, Periods
from thinwire.train.data import Data
from thinwire.train.models import Model
from thinwire.train.trainer import train

# -- models ----------------------------------------------------------------------------------------


class Odd(nn.Module):
    """Layers between an embedding and a tied head; parameters of 0, 1 and a prime number."""

    def __init__(self, width: int = 7) -> None:
        super().__init__()
        self.embed = nn.Embedding(131, width)
        self.layers = nn.ModuleList(nn.Linear(width, width) for _ in range(3))
        self.head = nn.Linear(width, 131, bias=False)
        self.head.weight = self.embed.weight
        self.nothing = nn.Parameter(torch.zeros(0))
        self.flat = nn.Parameter(torch.zeros(3, 0, 5))
        self.scale = nn.Parameter(torch.ones(()))
        self.prime = nn.Parameter(torch.zeros(4099, dtype=torch.bfloat16))
        self.frozen = nn.Parameter(torch.zeros(17), requires_grad=False)


def wide() -> nn.Module:
    """Whole blocks of 64x64, and what is left of them at the edges."""
    layers = [nn.Linear(130, 130, bias=True) for _ in range(4)]
    return nn.Sequential(nn.Embedding(300, 130), nn.Sequential(*layers))


MODELS: dict[str, Callable[[], nn.Module]] = {"odd": Odd, "wide": wide}


def seal(transport: tw.transport.Transport) -> tw.transport.Transport:
    return tw.transport.Sealed(transport, "a secret of many characters")


class Run:
    """K workers whose optimizers step and whose parameters need not move."""

    def __init__(
        self,
        method: tw.Method,
        make: Callable[[], nn.Module],
        workers: int,
        wrap: Callable[[tw.transport.Transport], tw.transport.Transport] = lambda t: t,
    ) -> None:
        models = [make() for _ in range(workers)]
        for model in models[1:]:
            model.load_state_dict(models[0].state_dict())
        trained = ([p for p in m.parameters() if p.requires_grad] for m in models)
        self.optimizers = [torch.optim.SGD(parameters, lr=0.1) for parameters in trained]
        self.loops = [
            tw.OuterLoop(model, optimizer, method, transport=wrap(transport))
            for model, optimizer, transport in zip(
                models, self.optimizers, tw.transport.in_process(workers), strict=True
            )
        ]

    def train(self, steps: int) -> None:
        for _ in range(steps):
            for optimizer in self.optimizers:
                optimizer.step()
            for loop in self.loops:
                loop.begin()
            for loop in self.loops:
                loop.finish()
        for loop in self.loops:
            loop.begin_last()
        for loop in self.loops:
            loop.finish()
        for loop in self.loops:
            loop.close()


def alone_nbytes(method: tw.Method, plan: Traffic, rank: int, rounds: int) -> int:
    """What the plan counts in rounds in which an odd worker is left alone, and sends nothing."""
    if not isinstance(method.exchange, tw.Pairs) or plan.workers == 1:
        return 0
    seed = method.exchange.seed
    peers = [peers_of(plan.workers, round=n, seed=seed)[rank] for n in range(1, rounds + 1)]
    return peers.count(rank) * plan.sent_per_round


def check(
    method: tw.Method,
    make: Callable[[], nn.Module],
    workers: int,
    steps: int,
    *,
    votes: int = 0,
    sealed: bool = False,
) -> list[Traffic]:
    """Plan and run, and compare what every worker counts."""
    run = Run(method, make, workers, seal) if sealed else Run(method, make, workers)
    run.train(steps)
    with torch.device("meta"):
        shape = Shape.of_model(make())
    plans = [
        traffic(
            method, shape, workers=workers, rank=r, votes=votes, added_nbytes=28 if sealed else 0
        )
        for r in range(workers)
    ]
    for rank, (plan, loop) in enumerate(zip(plans, run.loops, strict=True)):
        stats = loop.stats
        assert plan.exchanges_after(steps) == stats.rounds
        alone = alone_nbytes(method, plan, rank, stats.rounds)
        assert plan.sent_after(steps) == stats.sent_bytes + alone
        assert plan.received_after(steps) == stats.received_bytes + alone
        assert plan.peak_sent_after(steps) == stats.peak_sent_bytes_per_step
    return plans


def preset(name: str, **fields) -> tw.Method:
    if name in ("ddp", "demo"):
        return tw.presets.ddp(**fields)
    if "streaming" in name:
        return tw.presets.by_name(name)(**{"sync_every": 5, "layers": 1} | fields)
    return tw.presets.by_name(name)(**{"sync_every": 5} | fields)


# -- a plan against a run --------------------------------------------------------------------------


@pytest.mark.slow_cases(
    "ddp-8",
    "decoupled_momentum-8",
    "demo-8",
    "sparseloco-8",
    "streaming_diloco-8",
    "streaming_muloco-8",
)
@pytest.mark.parametrize("model", MODELS)
@pytest.mark.parametrize("workers", [1, 2, 3, 5, 8])
@pytest.mark.parametrize("name", tw.presets.names())
def test_presets(name: str, workers: int, model: str) -> None:
    for steps in (0, 4, 5, 13):
        check(preset(name), MODELS[model], workers, steps)


CODECS = {
    "identity": codecs.Identity(),
    "bf16": codecs.CastBF16(),
    "e3m0": codecs.E3M0(),
    "1 bit": codecs.Quantise(bits=1),
    "4 bit of rows": codecs.Quantise(bits=4, groups=codecs.Rows()),
    "2 bit of tensors": codecs.Quantise(bits=2, groups=codecs.Tensors()),
    "blocks": codecs.TopK(k=64, groups=codecs.Blocks()),
    "levels of tensors": codecs.TopK(k=64, values=codecs.TensorLevels(), groups=codecs.Blocks()),
    "per role": codecs.PerRole(
        default=codecs.TopK(k=32), embedding=codecs.CastBF16(), vector=codecs.Identity()
    ),
}
EXCHANGES = {
    "gather": tw.Gather(),
    "reduce-scatter": tw.ReduceScatter(owner_feedback=tw.ErrorFeedback(decay=0.9)),
}


@pytest.mark.parametrize("exchange", EXCHANGES)
@pytest.mark.parametrize("codec", CODECS)
def test_codecs_over_both_exchanges(codec: str, exchange: str) -> None:
    method = preset("diloco", codec=CODECS[codec], exchange=EXCHANGES[exchange])
    for make in MODELS.values():
        plans = check(method, make, 3, 7)
        assert {m.exchange for p in plans for m in p.messages} == {exchange.replace("-", "_")}


FRAGMENTS = {
    "sequential": tw.Sequential(layers=2),
    "balanced": tw.Balanced(count=3),
    "together": tw.Balanced(count=2, offsets=tw.At(steps=(3, 3))),
    "early": tw.Balanced(count=3, offsets=tw.At(steps=(4, 0, 2))),
    "by module": tw.ByModule(
        modules=(
            ("layers.1",),
            ("embed", "layers.0", "layers.2"),
            ("nothing", "flat", "scale", "prime"),
        )
    ),
}
OVERLAPS = {"none": tw.Delay(), "tau": tw.Delay(tau=4, mixing=0.5), "eager": tw.Eager()}


@pytest.mark.parametrize("overlap", OVERLAPS)
@pytest.mark.parametrize("fragments", FRAGMENTS)
def test_fragments_and_overlaps(fragments: str, overlap: str) -> None:
    method = preset("diloco", fragments=FRAGMENTS[fragments], overlap=OVERLAPS[overlap])
    for steps in (1, 2, 3, 9, 14):
        plans = check(method, Odd, 2, steps)
        assert plans[0].tau == {"none": 0, "tau": 4, "eager": 5}[overlap]


def test_shards_of_workers_differ_and_so_do_their_bytes() -> None:
    plans = check(preset("diloco", exchange=tw.ReduceScatter()), Odd, 3, 5)
    assert len({p.sent_after(5) for p in plans}) > 1
    assert len({p.received_after(5) for p in plans}) > 1


def test_shards_are_cut_from_the_order_of_the_wire() -> None:
    def ragged_first() -> nn.Module:
        return nn.Sequential(nn.Linear(7, 64), nn.Linear(64, 64), nn.Linear(64, 128))

    check(preset("diloco", exchange=tw.ReduceScatter()), ragged_first, 3, 5)


def test_automatic_changes_its_mind_with_k() -> None:
    shape = Shape.of_model(wide())
    kinds = {k: traffic(preset("diloco"), shape, workers=k).messages[0].exchange for k in (4, 5)}
    assert kinds == {4: "gather", 5: "reduce_scatter"}
    sparse = traffic(preset("sparse_muloco"), shape, workers=8)
    assert sparse.messages[0].exchange == "gather"


def test_a_lone_worker_sends_nothing() -> None:
    plan = traffic(preset("diloco"), Shape.of_model(wide()), workers=1, votes=1)
    assert (plan.sent_after(99), plan.received_after(99), plan.peak_sent_per_step) == (0, 0, 0)


# -- workers that come and go ----------------------------------------------------------------------


@dataclasses.dataclass(frozen=True)
class Voting(Exchange):
    """Another exchange as it is where bad messages are dropped."""

    inner: Exchange

    def bind(self, context: ExchangeContext) -> ExchangeState:
        return self.inner.bind(dataclasses.replace(context, drops_bad_messages=True))

    def sizes(self, codec, layout, aggregate, *, workers: int, rank: int) -> Sizes:
        return self.inner.sizes(codec, layout, aggregate, workers=workers, rank=rank)


@pytest.mark.parametrize("workers", [2, 5])
def test_votes_are_counted_beside_payloads(workers: int) -> None:
    voting = preset("streaming_diloco", exchange=Voting(tw.Automatic()))
    with_votes = check(voting, Odd, workers, 13, votes=1)
    without = check(preset("streaming_diloco"), Odd, workers, 13)
    exchanges = without[0].exchanges_after(13)
    assert with_votes[0].sent_after(13) - without[0].sent_after(13) == workers * exchanges
    assert with_votes[0].peak_sent_per_step == without[0].peak_sent_per_step


@pytest.mark.parametrize("workers", [1, 2, 5])
@pytest.mark.parametrize("name", ["streaming_muloco", "noloco"])
def test_what_sealing_adds_is_counted(name: str, workers: int) -> None:
    check(preset(name), Odd, workers, 13, sealed=True)


@pytest.mark.parametrize("workers", [2, 5])
def test_what_sealing_adds_to_votes_and_shards_is_counted(workers: int) -> None:
    voting = preset("streaming_diloco", exchange=Voting(tw.ReduceScatter()))
    check(voting, Odd, workers, 13, votes=1, sealed=True)


# -- a plan against `thinwire train` ---------------------------------------------------------------


@pytest.fixture(scope="module")
def corpus(tmp_path_factory) -> Path:
    folder = tmp_path_factory.mktemp("corpus")
    for number in range(20):
        (folder / f"{number}.txt").write_text(f"{number} a thin wire carries a mean payload " * 40)
    return folder


@pytest.mark.parametrize(
    ("name", "workers"), [("ddp", 2), ("streaming_muloco", 3), ("sparseloco", 2)]
)
def test_summaries(tmp_path: Path, corpus: Path, name: str, workers: int) -> None:
    laptop = recipes.laptop(name)
    config = dataclasses.replace(
        laptop,
        model=Model(size="250k"),
        data=Data(corpus=str(corpus), sequence_length=16, validation_sequences=4),
        workers=workers,
        steps=13,
        global_batch=workers,
        periods=Periods(),
        machine=Machine(device="cpu", threads=1),
    )
    summary = train(config, tmp_path / "run")
    shape = resolve("250k", vocabulary=256)
    plan = traffic(config.method, shape, workers=workers)
    assert shape.parameters == summary["parameters"]
    assert plan.sent_after(13) == summary["sent_bytes_per_worker"]
    assert plan.received_after(13) == summary["received_bytes_per_worker"]
    assert plan.peak_sent_after(13) == summary["peak_sent_bytes_per_step"]


def test_the_toys_of_other_tests() -> None:
    team = toy.Team(preset("diloco"), toy.adamw, 3).train(12)
    plan = traffic(preset("diloco"), Shape.of_model(toy.build_model()), workers=3)
    stats = team.loops[1].stats
    assert (plan.sent_after(10), plan.received_after(10)) == (
        stats.sent_bytes,
        stats.received_bytes,
    )


# -- the schedule ----------------------------------------------------------------------------------


@given(sync_every=st.integers(1, 7), data=st.data())
def test_counting_is_what_fragments_say(sync_every: int, data) -> None:
    offset = data.draw(st.integers(0, sync_every - 1))
    first = data.draw(st.integers(1, 2 * sync_every))
    fragment = tw.Fragment(index=0, names=("w",), offset_steps=offset, first_step=first)
    plan = Traffic(sync_every=sync_every, tau=0, messages=(message(offset, first, 1),), workers=2)
    for steps in range(4 * sync_every):
        due = [t for t in range(1, steps + 1) if fragment.is_due(step=t, sync_every=sync_every)]
        left = steps > (due[-1] if due else 0)
        assert plan.sent_after(steps) == len(due) + left
        assert bool(plan.left_over(steps)) == left


def message(offset: int, first: int, nbytes: int) -> MessageSpec:
    return MessageSpec(
        offset=offset,
        first=first,
        parameters=nbytes,
        payload_nbytes=nbytes,
        result_nbytes=0,
        sent_nbytes=nbytes,
        received_nbytes=nbytes,
        sent_count=1,
        received_count=1,
        vote_nbytes=0,
        exchange="gather",
    )


def test_peaks_are_those_of_what_travels_together() -> None:
    messages = (message(0, 5, 3), message(3, 3, 10), message(3, 8, 2))
    plan = Traffic(sync_every=5, tau=0, messages=messages, workers=2)
    assert plan.peak_sent_per_step == 12
    assert [plan.peak_sent_after(steps) for steps in (0, 1, 3, 7, 8)] == [0, 10, 10, 10, 12]
    assert (plan.sent_per_round, plan.received_per_round) == (15, 15)


# -- shapes ----------------------------------------------------------------------------------------


@given(layers=st.integers(1, 9), more=st.integers(0, 99_999))
def test_a_size_has_exactly_its_parameters(layers: int, more: int) -> None:
    shape = Shape.of_size(layers + more, layers)
    assert (shape.parameters, shape.layers) == (layers + more, layers)
    each = [sum(p.numel for p in shape.parts if p.layer == layer) for layer in range(layers)]
    assert max(each) - min(each) <= 1
    assert all(p.numel for p in shape.parts)


def test_a_size_is_what_its_codec_says() -> None:
    shape = Shape.of_size(1_200_000_000_007, 108)
    dense = traffic(tw.presets.muloco(bits=16), shape, workers=2).messages[0]
    assert dense.sent_nbytes == 64 + 2 * shape.parameters
    sharded = traffic(tw.presets.diloco(), shape, workers=16).messages[0]
    # Cuts lie at whole rows of blocks, so shards are about equal.
    assert sharded.sent_nbytes == pytest.approx(4 * shape.parameters, rel=1e-3)


@pytest.mark.parametrize(("parameters", "layers"), [(0, 0), (5, 0), (0, 1), (4, 5), (-5, -5)])
def test_a_size_without_layers_or_parameters_is_refused(parameters: int, layers: int) -> None:
    with pytest.raises(tw.ConfigurationError, match="parameters >= layers >= 1"):
        Shape.of_size(parameters, layers)


def test_what_is_frozen_or_tied_counts_as_in_a_run() -> None:
    shape = Shape.of_model(Odd())
    names = [part.name for part in shape.parts]
    assert "frozen" not in names
    assert "head.weight" not in names
    assert next(w.role for w in shape.weights if w.part.name == "embed.weight") == "embedding"
    with pytest.raises(tw.ConfigurationError, match="none of its parameters is trained"):
        Shape.of_model(nn.Linear(2, 2).requires_grad_(False))


@given(
    rows=st.lists(st.integers(0, 300), min_size=1, max_size=4),
    columns=st.integers(1, 5),
    parts=st.integers(1, 9),
)
def test_a_shard_ends_at_the_place_nearest_to_its_share(rows, columns: int, parts: int) -> None:
    layout = Layout.of({str(i): (r, columns) for i, r in enumerate(rows)})
    starts = [s.start + r * columns for s in layout.segments for r in range(0, s.shape[0], 64)]
    places = sorted({0, *starts, *(s.stop for s in layout.segments)})
    for part, (start, _) in enumerate(layout.cut(parts)):
        wanted = layout.numel * part // parts
        assert start == min(places, key=lambda place: abs(place - wanted))


# -- what does not fit -----------------------------------------------------------------------------


def test_a_method_that_does_not_fit_the_model_says_so_itself() -> None:
    deep = Shape.of_size(1000, 100)
    with pytest.raises(tw.ConfigurationError, match="spread 34 fragments over 30") as caught:
        traffic(tw.presets.streaming_diloco(), deep, workers=2)
    assert "\n" not in str(caught.value)
    with pytest.raises(tw.ConfigurationError, match="by its layers"):
        traffic(tw.presets.streaming_diloco(), Shape.of_model(nn.Linear(2, 2)), workers=2)


def test_a_worker_is_one_of_them() -> None:
    for workers, rank in ((0, 0), (2, 2), (2, -1)):
        with pytest.raises(tw.ConfigurationError, match="0 <= rank < workers"):
            traffic(preset("diloco"), Shape.of_size(9, 1), workers=workers, rank=rank)


class _Dear(Feedback):
    def bind(self, numel: int, storage: StatePlacement) -> FeedbackState:
        raise AssertionError(f"a plan keeps {4 * numel} bytes of feedback")


def test_a_plan_keeps_no_feedback() -> None:
    """Of a large model it would not fit into this machine."""
    method = tw.presets.muloco(bits=2, feedback=_Dear())
    assert traffic(method, Shape.of_size(10**9, 4), workers=2).sent_per_round > 10**9 // 4
