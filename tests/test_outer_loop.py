import copy
import dataclasses
import gc
from contextlib import nullcontext

import pytest
import torch
from torch import Tensor, nn
from torch.distributed.checkpoint.state_dict import get_state_dict

import thinwire as tw
from elastic_hub import Player, meet
from elastic_twin import ElasticHub
from thinwire.exchange.message import HEADER_NBYTES
from toy import (
    Team,
    adamw,
    alone,
    build_matrices,
    build_model,
    descend,
    exchange_all,
    largest_difference,
    loss,
    matrix_loss,
    same_bits,
    sgd,
)

NESTEROV = tw.outer.SGD(lr=0.7, momentum=0.9, nesterov=True)


def diloco(**fields) -> tw.Method:
    return tw.presets.diloco(**{"sync_every": 5, "outer": NESTEROV} | fields)


def test_exchanges_happen_every_h_steps_and_bytes_are_counted() -> None:
    team = Team(diloco(), adamw, 3).train(12)
    stats = team.loops[1].stats
    message_nbytes = HEADER_NBYTES + 4 * sum(p.numel() for p in team.models[0].parameters())
    assert (stats.rounds, stats.sent_bytes) == (2, 2 * message_nbytes)
    assert stats.received_bytes == 2 * stats.sent_bytes
    assert stats.peak_sent_bytes_per_step == message_nbytes
    digest = team.loops[1].digest()
    team.loops[1].report(loss=2.5, tokens_per_s=100.0)  # where workers are fixed, to nobody
    assert (team.loops[1].digest(), team.loops[1].stats) == (digest, stats)
    lone = Team(diloco(), adamw, 1).train(10).loops[0].stats
    assert (lone.rounds, lone.sent_bytes, lone.received_bytes) == (2, 0, 0)
    assert lone.peak_sent_bytes_per_step == 0


N, E = 4 * 2 * 64 * 128, 4 * 64 * 64  # of hidden matrices, and of an embedding


@pytest.mark.parametrize(
    ("method", "expected"),
    [
        # Live weights, inner state, anchor, outer state, feedback. torch's AdamW has two moments,
        # and counts the steps of each parameter in a float; Muon has one, and AdamW embeddings.
        (tw.presets.muloco(bits=2), (N + E, N + 2 * E + 4, N + E, N + E, N + E)),
        (tw.presets.diloco(), (N + E, 2 * (N + E) + 3 * 4, N + E, N + E, 0)),
        (tw.presets.sparse_muloco(), (N + E, N + 2 * E + 4, N + E, 0, N + E)),
        (tw.presets.ddp(), (N + E, 2 * (N + E) + 3 * 4, 0, 0, 0)),
    ],
    ids=lambda value: value.name if isinstance(value, tw.Method) else "",
)
def test_memory_is_counted_by_what_it_is_for(method, expected) -> None:
    names = ("live weights", "inner state", "anchor", "outer state", "feedback")
    method = dataclasses.replace(method, sync_every=1)
    team = Team(method, method.inner.build, 2, model=build_matrices, loss=matrix_loss).train(1)
    assert team.loops[0].memory() == dict(zip(names, expected, strict=True))


@pytest.mark.parametrize(
    ("preset", "workers"), [(name, [2, 3, 5][n % 3]) for n, name in enumerate(tw.presets.names())]
)
def test_all_workers_agree_bit_for_bit_after_every_round(preset: str, workers: int) -> None:
    method = tw.presets.by_name(preset)()
    if isinstance(method.fragments, tw.Strided):  # a toy has no stack of layers
        method = dataclasses.replace(method, fragments=tw.Balanced(count=2))
    team = Team(method, adamw, workers)
    for _ in range(2):
        team.train(method.sync_every)
        for loop in team.loops:
            loop.evaluating()
        agreed = {tw.digest(loop.consensus()) for loop in team.loops}
        assert len(agreed) == 1
        if method.outer.has_own_anchors:
            continue
        assert agreed == {*team.digests()}
        live = [[p.detach() for p in m.parameters()] for m in team.models[:2]]
        assert same_bits(*live) == (method.overlap == tw.Delay())


N, E = 4 * 2 * 64 * 128, 4 * 64 * 64  # of hidden matrices, and of an embedding


@pytest.mark.parametrize("fails", [False, True])
def test_the_end_of_the_with_block_sends_what_is_left_and_an_error_nothing(fails: bool) -> None:
    """The others may be gone, or wait for something else."""
    model, optimizer, outer = alone(diloco(sync_every=2), sgd)

    def train() -> None:
        with outer:
            with pytest.raises(tw.ConfigurationError, match="would count twice"):
                outer.__enter__()
            loss(model, 0, 0).backward()
            optimizer.step()
            assert outer.stats.rounds == 0
            if fails:
                raise KeyError("mine")

    with pytest.raises(KeyError, match="mine") if fails else nullcontext():
        train()
    assert outer.stats.rounds == (not fails)


def test_a_list_of_optimizers_counts_as_one() -> None:
    for method in (tw.presets.ddp(), diloco()):
        model = build_model()
        parts = list(model.parameters())
        optimizers = [torch.optim.SGD(part, lr=0.1) for part in (parts[:2], parts[2:])]
        with tw.OuterLoop(model, optimizers, method) as outer:
            for step in range(10):
                descend(loss(model, step, 0), *optimizers)
        expected = Team(method, sgd, 1).train(10).anchor()
        assert same_bits(list(outer.consensus().values()), expected)


def test_ddp_uses_the_learning_rate_of_the_moment_the_gradient_was_taken() -> None:
    def train(*, schedule_first: bool) -> list[torch.Tensor]:
        model = build_model()
        optimizer = sgd(model)
        scheduler = torch.optim.lr_scheduler.ExponentialLR(optimizer, 0.5)
        outer = tw.OuterLoop(model, optimizer, tw.presets.ddp())
        for step in range(4):
            loss(model, step, 0).backward()
            optimizer.step()
            (scheduler.step if schedule_first else outer.step)()
            (outer.step if schedule_first else scheduler.step)()
        return list(outer.consensus().values())

    assert same_bits(train(schedule_first=True), train(schedule_first=False))


@pytest.mark.parametrize("parts", [1, 2])
def test_each_worker_clips_its_own_gradient_before_it_is_sent(parts: int) -> None:
    def train(clip_norm: float | None, by_hand: float | None = None) -> list[torch.Tensor]:
        models = [build_model() for _ in range(2)]
        owned = [list(model.parameters()) for model in models]
        places = [[own] if parts == 1 else [own[:1], own[1:]] for own in owned]
        optimizers = [[torch.optim.SGD(own, lr=0.1) for own in each] for each in places]
        method = tw.presets.ddp(outer=tw.outer.GradientAveraging(clip_norm=clip_norm))
        ends = zip(models, optimizers, tw.transport.in_process(2), strict=True)
        loops = [tw.OuterLoop(m, o, method, transport=t) for m, o, t in ends]
        for step in range(4):
            for worker, (model, own) in enumerate(zip(models, optimizers, strict=True)):
                (10.0**worker * loss(model, step, worker, workers=2)).backward()
                if by_hand is not None:
                    torch.nn.utils.clip_grad_norm_(model.parameters(), by_hand)
                for optimizer in own:
                    optimizer.step()
                    optimizer.zero_grad()
            exchange_all(loops)
        return list(loops[0].consensus().values())

    expected = train(None, by_hand=0.4)
    assert largest_difference(train(0.4), expected) < 1e-6
    assert largest_difference(train(None), expected) > 1e-2
    assert largest_difference(train(4.0), expected) > 1e-2


TOGETHER = tw.presets.ddp(fragments=tw.Balanced(count=2, offsets=tw.At(steps=(0, 0))))


@pytest.mark.parametrize(
    ("make", "word"),
    [
        (lambda: tw.outer.GradientAveraging(clip_norm=0.0), "clip gradients to a norm"),
        (lambda: tw.outer.GradientAveraging(clip_norm=float("nan")), "clip gradients to a norm"),
        (lambda: alone(TOGETHER, sgd), r"fragment by fragment.*all parameters at once"),
        (lambda: alone(diloco(), lambda _: sgd(nn.Linear(7, 5))), "does not hold it"),
        (lambda: alone(diloco(), lambda _: [])[2].__enter__(), "built without one"),
        (lambda: alone(diloco(), lambda _: [])[2].save_with_optimizer(), "built without one"),
        (lambda: tw.OuterLoop(nn.Tanh(), [], diloco()), "none of its parameters"),
    ],
)
def test_what_cannot_be_is_refused_at_once(make, word: str) -> None:
    with pytest.raises(tw.ConfigurationError, match=word):
        make()


def test_ddp_refuses_what_would_be_counted_or_scaled_wrongly() -> None:
    _, optimizer, outer = alone(tw.presets.ddp(), sgd)
    with pytest.raises(tw.ConfigurationError, match="GradScaler"):
        outer.step()
    with pytest.raises(tw.ConfigurationError, match="closure"):
        optimizer.step(lambda: 0.0)
    optimizer.step()
    with pytest.raises(tw.ConfigurationError, match="twice under ddp"):
        optimizer.step()
    model, fused, _outer = alone(
        tw.presets.ddp(), lambda model: torch.optim.SGD(model.parameters(), lr=0.1, fused=True)
    )
    scaler = torch.amp.GradScaler("cpu", init_scale=4.0)
    scaler.scale(loss(model, 0, 0)).backward()
    with pytest.raises(tw.ConfigurationError, match="fused=False"):
        scaler.step(fused)


def moved(model: nn.Module, optimizer: torch.optim.Optimizer) -> bool:
    before = copy.deepcopy(model.state_dict())
    loss(model, 0, 0).backward()
    optimizer.step()
    return not torch.equal(before["1.weight"], model.state_dict()["1.weight"])


def test_two_ddp_loops_share_no_optimizer_and_one_that_is_gone_or_refused_lets_go_of_it() -> None:
    model, optimizer, outer = alone(tw.presets.ddp(), sgd)
    with pytest.raises(tw.ConfigurationError, match="another outer loop does so already"):
        tw.OuterLoop(model, optimizer, tw.presets.ddp())
    outer.close()
    again = tw.OuterLoop(model, optimizer, tw.presets.ddp())
    del again
    gc.collect()
    assert moved(model, optimizer)
    transports = tw.transport.in_process(2)
    _first = tw.OuterLoop(build_model(1), [], diloco(), transport=transports[0])
    with pytest.raises(tw.MismatchError):
        tw.OuterLoop(model, optimizer, tw.presets.ddp(), transport=transports[1])
    assert moved(model, optimizer)


def test_a_closed_loop_is_not_stepped_and_one_that_follows_not_by_hand() -> None:
    _, _, outer = alone(diloco(), sgd)
    digest = outer.digest()
    outer.close()
    for step in (outer.step, outer.begin):
        with pytest.raises(tw.ConfigurationError, match="use a closed outer loop"):
            step()
    outer.close()
    assert (outer.digest(), outer.inner_step) == (digest, 0)
    with alone(diloco(), sgd)[2] as outer:
        with pytest.raises(tw.ConfigurationError, match="count twice"):
            outer.step()
        outer.flush()
    with pytest.raises(tw.ConfigurationError, match="use a closed outer loop"):
        outer.__enter__()


def test_an_evaluation_that_is_never_ended_leaves_the_outer_parameters() -> None:
    """A trainer's last one: nothing is put back when the interpreter ends."""
    model = build_model()
    loop = tw.OuterLoop(model, optimizer := adamw(model), diloco(sync_every=10))
    loss(model, 0, 0).backward()
    optimizer.step()
    loop.evaluating().__enter__()
    outer = [p.detach().clone() for p in model.parameters()]
    loop.close()
    del loop
    gc.collect()
    assert same_bits(list(model.parameters()), outer)


class Tied(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(11, 6)
        self.head = nn.Linear(6, 11, bias=False)
        self.head.weight = self.embedding.weight
        self.register_buffer("count", torch.tensor(3))
        self.fixed = nn.Parameter(torch.ones(2), requires_grad=False)


def test_anchor_is_a_state_dict_with_tied_and_frozen_weights_and_buffers() -> None:
    model = Tied()
    loop = tw.OuterLoop(model, [], diloco())
    anchor = loop.consensus()
    assert list(anchor) == list(model.state_dict())
    assert anchor["head.weight"] is anchor["embedding.weight"]
    assert int(anchor["count"]) == 3
    model.load_state_dict(anchor)


def test_a_state_with_missing_keys_is_refused() -> None:
    loop = Team(diloco(), adamw, 1).loops[0]
    with pytest.raises(tw.CheckpointError, match="not the keys of an outer loop"):
        loop.load_state_dict({})
    state = loop.state_dict()
    del state["fragments"][0]["outer"]["optimizer.momentum_buffer"]
    with pytest.raises(tw.CheckpointError, match="momentum_buffer"):
        loop.load_state_dict(state)


def connect(methods, models) -> None:
    for method, model, transport in zip(
        methods, models, tw.transport.in_process(len(models)), strict=True
    ):
        tw.OuterLoop(model, [], method, transport=transport)


def other_shapes() -> list[nn.Module]:
    return [nn.Linear(2, 2), nn.Linear(3, 2)]


def complex_frozen() -> list[nn.Module]:
    models = [half_frozen(), half_frozen()]
    for sign, model in zip((1, -1), models, strict=True):
        model.turns = nn.Parameter(torch.tensor([1 + sign * 1j]), requires_grad=False)
    return models


@pytest.mark.parametrize(
    ("fields", "models", "told"),
    [
        ({"sync_every": 6}, None, r"method\.sync_every.*worker 0 has 5 and worker 1 has 6"),
        ({"fragments": tw.Balanced(count=2)}, None, r"method\.fragments"),
        ({"inner": tw.inner.SGD(lr=0.2)}, None, r"method\.inner"),
        ({}, other_shapes, r"parameters\.weight.*\[2, 2\].*\[2, 3\]"),
        ({}, lambda: [build_model(0), build_model(1)], r"initial weights.*seed all workers alike"),
        # These never travel, so that no later check would find it.
        ({}, lambda: [half_frozen(), half_frozen(2.0)], r"frozen weights.*load the same weights"),
        ({}, complex_frozen, "frozen weights"),
    ],
)
def test_workers_that_differ_are_told_in_what(fields, models, told: str) -> None:
    pair = [build_model(), build_model()] if models is None else models()
    with pytest.raises(tw.MismatchError, match=told):
        connect([diloco(), diloco(**fields)], pair)


def test_workers_of_versions_that_exchange_otherwise_are_told_so(monkeypatch) -> None:
    first, second = tw.transport.in_process(2)
    alone(diloco(), transport=first)
    monkeypatch.setattr(tw.Automatic, "choose", lambda *_: tw.ReduceScatter())
    with pytest.raises(tw.MismatchError, match=r"in wire exchanges.* gather and .* reduce_scatter"):
        alone(diloco(), transport=second)


def half_frozen(value: float = 1.0) -> nn.Module:
    model = build_model()
    model.frozen = nn.Parameter(torch.full((3,), value), requires_grad=False)
    return model


def test_a_worker_that_is_resumed_may_have_frozen_weights_of_its_own() -> None:
    """A running average of its weights is such, and differs from worker to worker."""
    saved = []
    for transport in tw.transport.in_process(2):
        saved.append(tw.OuterLoop(half_frozen(), [], diloco(), transport=transport).state_dict())
    for number, transport in enumerate(tw.transport.in_process(2)):
        model = half_frozen(float(number))
        tw.OuterLoop(model, [], diloco(), transport=transport, resume=saved[number])


def test_an_elastic_worker_says_what_it_does_not_train() -> None:
    """It is compared with what the first worker said."""
    pytest.importorskip("obstore")
    described = []
    for value in (1.0, 1.0, 2.0):
        elastic = tw.transport.Elastic("memory://", run="r")
        tw.OuterLoop(half_frozen(value), [], diloco(), transport=elastic)
        described.append(elastic._description["frozen weights"])
    assert described[0] == described[1] != described[2]


def test_what_is_not_finite_is_not_sent() -> None:
    """Under ddp; see test_feedback.py for the rest."""
    model, optimizer, loop = alone(tw.presets.ddp(), sgd)
    loss(model, 0, 0).backward()
    model[1].bias.grad[2] = float("nan")
    optimizer.step()
    with pytest.raises(tw.NonFiniteError, match=r"'1\.bias' at inner step 1"):
        loop.step()


@pytest.mark.parametrize("shape", [(0,), (1,), (), (3, 0), (101,)])
def test_odd_shapes(shape: tuple[int, ...]) -> None:
    def model() -> nn.Module:
        return nn.ParameterDict({"odd": torch.ones(shape), "other": torch.ones(3)})

    team = Team(diloco(sync_every=1, outer=tw.outer.SGD()), lambda _: [], 2, model=model)
    with torch.no_grad():
        team.models[0].odd -= 1.0
    team.exchange()
    assert torch.equal(team.models[1].odd, torch.full(shape, 0.5))


def two_loops(second: tw.Method) -> list[tw.OuterLoop]:
    model = build_model()
    return [tw.OuterLoop(model, sgd(model), method) for method in (diloco(), second)]


def test_two_loops_do_not_train_one_parameter_at_once() -> None:
    first, second = two_loops(diloco(sync_every=3))
    first.step()
    with pytest.raises(tw.ConfigurationError, match=r"'0\.weight' in two outer loops.*close\(\)"):
        second.step()
    first.close()
    second.step()
    assert second.inner_step == 1
    model = build_model()
    whole, part = tw.OuterLoop(model, [], diloco()), tw.OuterLoop(model[3], [], diloco())
    part.join()
    with pytest.raises(tw.ConfigurationError, match=r"'3\.weight' in two outer loops"):
        whole.join()
    # Parts of a model, and gradient averaging, may have loops of their own.
    for loop in [tw.OuterLoop(model[index], [], diloco()) for index in (0, 1)]:
        loop.step()
    for loop in two_loops(tw.presets.ddp()):
        loop.join()


def test_a_loop_that_was_dropped_or_never_used_has_no_parameters() -> None:
    model = build_model()
    for _ in range(3):
        loop = tw.OuterLoop(model, sgd(model), diloco(sync_every=1))
        loop.step()
        del loop
    unused, used = two_loops(diloco())
    used.step()
    unused.close()
    used.step()


def test_the_consensus_is_in_the_state_dict_that_hooks_of_the_model_build() -> None:
    """Such a hook reads the parameters, and returns other tensors and names."""
    model = build_model()

    def halved(_: nn.Module, state: dict[str, Tensor], *args: object) -> dict[str, Tensor]:
        return {f"half.{name}": value / 2 for name, value in state.items()}

    outer = tw.OuterLoop(model, optimizer := sgd(model), tw.presets.diloco(sync_every=2))
    anchors = {name: p.detach().clone() for name, p in model.named_parameters()}
    descend(loss(model, 0, 0), optimizer)
    outer.step()
    trained = [p.detach().clone() for p in model.parameters()]
    model._register_state_dict_hook(halved)
    found = outer.consensus()
    assert found.keys() == {f"half.{name}" for name in anchors}
    assert same_bits([2 * value for value in found.values()], [*anchors.values()])
    assert same_bits([*model.parameters()], trained)


KINDS = {
    "diloco": diloco(),
    "on the host": diloco(),
    "muloco": tw.presets.muloco(sync_every=5, bits=2),
    "sparse": tw.presets.sparseloco(sync_every=5),
    "streaming": tw.presets.streaming_diloco(sync_every=5, fragments=tw.Balanced(count=2)),
    "eager": diloco(overlap=tw.Eager()),
    "own anchors": tw.presets.noloco(sync_every=5),
    "own momentum": tw.presets.decoupled_momentum(sync_every=5),
}


@pytest.mark.parametrize("name", KINDS)
@pytest.mark.filterwarnings("ignore::thinwire.errors.LossyReduceScatterWarning")
def test_training_begins_at_weights_that_were_loaded_after_the_loop_was_built(name: str) -> None:
    late = Team(KINDS[name], adamw, 2, outer_device="cpu" if name == "on the host" else None)
    for model in late.models:
        model.load_state_dict(build_model(seed=1).state_dict())
    early = Team(KINDS[name], adamw, 2, model=lambda: build_model(seed=1))
    unaware = Team(KINDS[name], adamw, 2)
    ends = [
        [p.clone() for model in team.train(12).models for p in model.parameters()]
        for team in (late, early, unaware)
    ]
    assert same_bits(ends[0], ends[1])
    assert not same_bits(ends[0], ends[2])


def test_it_does_not_if_only_a_dtype_changed_or_an_optimizer_has_stepped() -> None:
    model, optimizer, outer = alone(diloco(sync_every=2))
    anchors = [p.detach().clone() for p in model.parameters()]
    model.bfloat16()
    with outer.evaluating():
        pass
    descend(loss(model, 0, 0), optimizer)
    outer.step()
    assert same_bits([*outer.consensus().values()], anchors)


def test_a_step_that_only_makes_the_optimizer_s_state_is_not_the_first() -> None:
    model, optimizer, outer = alone(diloco(sync_every=2))
    get_state_dict(model, optimizer)
    assert optimizer.state
    loaded = build_model(seed=1)
    model.load_state_dict(loaded.state_dict())
    descend(loss(model, 0, 0), optimizer)
    outer.step()
    assert same_bits([*outer.consensus().values()], [*loaded.parameters()])


def test_hooks_for_the_first_step_are_gone_after_it_and_let_others_run() -> None:
    model, optimizer, outer = alone(diloco())
    ran = []
    optimizer.register_step_pre_hook(lambda *_: ran.append(1))
    for step in range(2):
        descend(loss(model, step, 0), optimizer)
        outer.step()
    assert len(ran) == 2
    assert len(optimizer._optimizer_step_pre_hooks) == 1


def test_an_evaluation_before_the_first_step_is_of_the_loaded_weights() -> None:
    model, _, outer = alone(diloco())
    loaded = build_model(seed=1)
    model.load_state_dict(loaded.state_dict())
    with outer.evaluating():
        assert same_bits([*model.parameters()], [*loaded.parameters()])
    assert same_bits([*outer.consensus().values()], [*loaded.parameters()])


def test_workers_that_load_other_weights_than_each_other_are_told_in_the_first_round() -> None:
    team = Team(diloco(), adamw, 2)
    team.models[1].load_state_dict(build_model(seed=1).state_dict())
    with pytest.raises(tw.MismatchError):
        team.train(5)


@pytest.mark.parametrize("joins_first", [False, True])
def test_an_elastic_worker_has_to_load_weights_before_it_joins(joins_first: bool) -> None:
    hub = ElasticHub()
    player = Player(hub, "a", diloco())
    meet(hub, [player])
    loaded = build_model(seed=1).state_dict()
    for load in (joins_first, not joins_first):
        _ = player.loop.join() if load else player.model.load_state_dict(loaded)
    if not joins_first:
        player.inner(5)
        assert same_bits([*player.loop.consensus().values()], [*loaded.values()])
        return
    with pytest.raises(tw.ConfigurationError, match=r"loaded after this worker had joined.*`with`"):
        player.inner()
