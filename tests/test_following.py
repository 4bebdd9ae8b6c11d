import copy

import pytest
import torch

import thinwire as tw
from toy import adamw, build_model, descend, loss, same_bits, sgd

METHODS = {
    "diloco": tw.presets.diloco(sync_every=3),
    "feedback": tw.presets.muloco(bits=1, sync_every=3),
    "rounds in flight": tw.presets.diloco(sync_every=4, overlap=tw.Delay(tau=2)),
}


def worker(method: tw.Method, transport=None, **fields):
    model = build_model()
    optimizer = adamw(model)
    return model, optimizer, tw.OuterLoop(model, optimizer, method, transport=transport, **fields)


def train(workers, first: int, last: int) -> None:
    for step in range(first, last):
        for number, (model, optimizer, _) in enumerate(workers):
            descend(loss(model, step, number, workers=len(workers)), optimizer)
        for _, _, outer in workers:
            outer.begin()
        for _, _, outer in workers:
            outer.finish()


def weights(workers) -> list[torch.Tensor]:
    return [p.detach().clone() for model, _, _ in workers for p in model.parameters()]


def team(method: tw.Method):
    return [worker(method, transport) for transport in tw.transport.in_process(2)]


@pytest.mark.parametrize("method", METHODS.values(), ids=METHODS.keys())
def test_the_optimizers_checkpoint_resumes_both_bit_for_bit(method, tmp_path) -> None:
    straight = team(method)
    train(straight, 0, 14)

    killed = team(method)
    for _, _, outer in killed:
        outer.save_with_optimizer()
    train(killed, 0, 5)
    for number, (model, optimizer, _) in enumerate(killed):
        torch.save((model.state_dict(), optimizer.state_dict()), tmp_path / str(number))
    train(killed, 5, 7)  # is lost

    resumed = team(method)
    for number, (model, optimizer, outer) in enumerate(resumed):
        outer.save_with_optimizer()
        saved_model, saved_optimizer = torch.load(tmp_path / str(number), weights_only=True)
        model.load_state_dict(saved_model)
        optimizer.load_state_dict(saved_optimizer)
    assert resumed[0][2].inner_step == 5
    train(resumed, 5, 14)
    assert same_bits(weights(straight), weights(resumed))
    assert straight[0][2].digest() == resumed[0][2].digest()
    assert straight[0][2].stats.sent_bytes == resumed[0][2].stats.sent_bytes


@pytest.mark.parametrize("method", METHODS.values(), ids=METHODS.keys())
def test_a_loop_built_after_the_weights_were_loaded_resumes_bit_for_bit(method) -> None:
    straight = team(method)
    train(straight, 0, 5)
    saved = copy.deepcopy(
        [(m.state_dict(), o.state_dict(), outer.state_dict()) for m, o, outer in straight]
    )
    train(straight, 5, 14)

    resumed = []
    for (weights_saved, inner, state), transport in zip(
        saved, tw.transport.in_process(2), strict=True
    ):
        model = build_model()
        model.load_state_dict(weights_saved)
        optimizer = adamw(model)
        optimizer.load_state_dict(inner)
        outer = tw.OuterLoop(model, optimizer, method, transport=transport, resume=state)
        resumed.append((model, optimizer, outer))
    train(resumed, 5, 14)
    assert same_bits(weights(straight), weights(resumed))
    assert straight[0][2].stats.sent_bytes == resumed[0][2].stats.sent_bytes


def test_control_without_resume_such_weights_are_refused() -> None:
    begun = team(METHODS["diloco"])
    train(begun, 0, 5)
    first, second = tw.transport.in_process(2)
    tw.OuterLoop(begun[0][0], [], METHODS["diloco"], transport=first)
    with pytest.raises(tw.MismatchError, match="initial weights"):
        tw.OuterLoop(begun[1][0], [], METHODS["diloco"], transport=second)


def test_a_checkpoint_without_outer_state_is_refused() -> None:
    _, optimizer, outer = worker(METHODS["diloco"])
    plain = optimizer.state_dict()
    outer.save_with_optimizer()
    with pytest.raises(tw.errors.CheckpointError, match=r"no outer state.*begin anew"):
        optimizer.load_state_dict(plain)


def test_a_checkpoint_of_another_method_is_refused_and_nothing_is_loaded() -> None:
    _, optimizer, outer = worker(METHODS["diloco"])
    outer.save_with_optimizer()
    model, other, _ = worker(tw.presets.diloco(sync_every=7))
    tw.OuterLoop(model, other, tw.presets.diloco(sync_every=7)).save_with_optimizer()
    with pytest.raises(tw.MismatchError, match="sync_every"):
        optimizer.load_state_dict(other.state_dict())
    assert outer.inner_step == 0


def test_closing_gives_the_optimizer_back() -> None:
    _, optimizer, outer = worker(METHODS["diloco"])
    outer.save_with_optimizer()
    outer.follow()
    outer.close()
    assert set(optimizer.state_dict()) == {"state", "param_groups"}
    optimizer.step()
    assert outer.inner_step == 0


@pytest.mark.parametrize("verb", ["follow", "save_with_optimizer"])
def test_what_needs_an_optimizer_says_so(verb: str) -> None:
    outer = tw.OuterLoop(build_model(), [], METHODS["diloco"])
    with pytest.raises(tw.ConfigurationError, match="built without one"):
        getattr(outer, verb)()


@pytest.mark.parametrize("verb", ["follow", "save_with_optimizer"])
def test_what_was_done_is_not_done_twice(verb: str) -> None:
    _, _, outer = worker(METHODS["diloco"])
    getattr(outer, verb)()
    with pytest.raises(tw.ConfigurationError, match="a second time"):
        getattr(outer, verb)()


def test_following_begins_and_ends_by_name() -> None:
    model, optimizer, outer = worker(METHODS["diloco"])
    outer.follow()
    for step in range(4):
        loss(model, step, 0).backward()
        optimizer.step()
    assert outer.inner_step == 4
    outer.unfollow()
    optimizer.step()
    assert outer.inner_step == 4
    outer.step()
    assert outer.inner_step == 5


def test_evaluation_begins_and_ends_by_name() -> None:
    model = build_model()
    optimizer = sgd(model)
    outer = tw.OuterLoop(model, optimizer, METHODS["diloco"])
    loss(model, 0, 0).backward()
    optimizer.step()
    live = [p.detach().clone() for p in model.parameters()]
    anchor = [v.clone() for v in outer.anchor().values()]
    assert not same_bits(live, anchor)
    outer.end_evaluation()
    for _ in range(2):
        # A callback may be told twice.
        outer.begin_evaluation()
        assert same_bits([p.detach() for p in model.parameters()], anchor)
    outer.end_evaluation()
    assert same_bits([p.detach() for p in model.parameters()], live)


def scaled_step(model, optimizer, scaler, step: int, *, overflows: bool = False) -> None:
    scaler.scale(loss(model, step, 0) * (float("inf") if overflows else 1.0)).backward()
    scaler.step(optimizer)
    scaler.update()
    optimizer.zero_grad()


def test_a_step_that_one_worker_skips_counts_on_it_too() -> None:
    workers = team(METHODS["diloco"])
    scalers = [torch.amp.GradScaler("cpu", init_scale=8.0) for _ in workers]
    for step in range(6):
        for number, (model, optimizer, _) in enumerate(workers):
            skips = number == 1 and step in (0, 2)
            scaled_step(model, optimizer, scalers[number], step, overflows=skips)
        for _, _, outer in workers:
            outer.begin()
        for _, _, outer in workers:
            outer.finish()
    assert [outer.inner_step for _, _, outer in workers] == [6, 6]
    assert workers[0][2].digest() == workers[1][2].digest()
    assert scalers[1].get_scale() == 2.0, "no step was skipped: the test is void"


def test_an_optimizer_whose_steps_may_be_skipped_unseen_is_not_followed() -> None:
    model, optimizer, outer = worker(METHODS["diloco"])
    outer.follow()
    scaler = torch.amp.GradScaler("cpu", init_scale=8.0)
    scaled_step(model, optimizer, scaler, 0, overflows=True)
    assert outer.inner_step == 0
    with pytest.raises(tw.ConfigurationError, match=r"outer\.step\(\) after every scaler\.step"):
        scaled_step(model, optimizer, scaler, 1)


def test_a_scaler_that_is_switched_off_is_no_reason() -> None:
    model, optimizer, outer = worker(METHODS["diloco"])
    outer.follow()
    scaled_step(model, optimizer, torch.amp.GradScaler("cpu", enabled=False), 0)
    assert outer.inner_step == 1


def test_a_fused_optimizer_says_of_every_step_also_of_those_it_skips() -> None:
    model = build_model()
    optimizer = torch.optim.AdamW(model.parameters(), fused=True)
    outer = tw.OuterLoop(model, optimizer, METHODS["diloco"])
    outer.follow()
    scaler = torch.amp.GradScaler("cpu", init_scale=8.0)
    for step in range(3):
        scaled_step(model, optimizer, scaler, step, overflows=step == 1)
    assert outer.inner_step == 3


class Derived(torch.optim.AdamW):
    """As AdamW, and shrinks the weights after its step."""

    @torch.no_grad()
    def step(self, closure=None):
        value = super().step(closure)
        for group in self.param_groups:
            for parameter in group["params"]:
                parameter.mul_(0.9)
        return value


def trained(method: tw.Method, *, by_hand: bool) -> tuple[int, list[torch.Tensor]]:
    adamw(build_model())  # from now on torch puts hooks around AdamW's own step, too
    model = build_model()
    optimizer = Derived(model.parameters(), lr=0.02)
    outer = tw.OuterLoop(model, optimizer, method)
    if not by_hand:
        outer.follow()
    for step in range(5):
        loss(model, step, 0).backward()
        optimizer.step()
        if by_hand:
            outer.step()
        optimizer.zero_grad()
    return outer.inner_step, weights([(model, optimizer, outer)])


@pytest.mark.parametrize("method", [METHODS["diloco"], tw.presets.ddp()], ids=["diloco", "ddp"])
def test_a_step_that_calls_its_base_class_counts_once_and_is_awaited(method) -> None:
    counted, followed = trained(method, by_hand=False)
    assert counted == 5
    assert same_bits(followed, trained(method, by_hand=True)[1])


# Of itself, when an optimizer is compiled first, and of Python 3.13.0.
TORCH_WARNS = pytest.mark.filterwarnings(
    "ignore:.torch.jit.script_method. is deprecated", "ignore:Guards may run slower on Python"
)


@TORCH_WARNS
def test_a_round_is_not_traced_where_its_caller_is_compiled() -> None:
    model, optimizer, outer = worker(METHODS["feedback"])
    graphs = []

    def backend(graph, _):
        graphs.append(graph)
        return graph.forward

    compiled = torch.compile(lambda: outer.step(), backend=backend)
    for step in range(3):
        loss(model, step, 0).backward()
        optimizer.step()
        compiled()
    assert (outer.stats.rounds, graphs) == (1, [])


@TORCH_WARNS
@pytest.mark.parametrize("method", [METHODS["diloco"], tw.presets.ddp()], ids=["diloco", "ddp"])
def test_a_compiled_step_is_followed_as_one_that_is_not(method) -> None:
    def run(*, by_hand: bool) -> list[torch.Tensor]:
        torch.compiler.reset()
        model, optimizer, outer = worker(method)
        if not by_hand:
            outer.follow()
        compiled = torch.compile(lambda: optimizer.step(), backend="eager")
        for step in range(3):
            loss(model, step, 0).backward()
            compiled()
            if by_hand:
                outer.step()
            optimizer.zero_grad()
        assert outer.inner_step == 3
        return weights([(model, optimizer, outer)])

    assert same_bits(run(by_hand=False), run(by_hand=True))


@TORCH_WARNS
def test_a_compiled_step_in_a_step_is_refused_for_it_cannot_be_told_whose_it_is() -> None:
    adamw(build_model())
    model = build_model()
    optimizer = Derived(model.parameters(), lr=0.02)
    tw.OuterLoop(model, optimizer, METHODS["diloco"]).follow()
    loss(model, 0, 0).backward()
    torch.compiler.reset()
    with pytest.raises(tw.ConfigurationError, match=r"leave optimizer\.step\(\) as it is"):
        torch.compile(lambda: optimizer.step(), backend="eager")()
