import pytest
import torch

import thinwire as tw
from toy import Team, adamw, alone, build_model, descend, loss, same_bits

METHODS = {
    "diloco": tw.presets.diloco(sync_every=3),
    "feedback": tw.presets.muloco(bits=1, sync_every=3),
    "rounds in flight": tw.presets.diloco(sync_every=4, overlap=tw.Delay(tau=2)),
}


def check_equal(straight: Team, resumed: Team) -> None:
    for one, other in zip(straight.models, resumed.models, strict=True):
        assert same_bits([*one.parameters()], [*other.parameters()])
    assert straight.digests() == resumed.digests()
    assert straight.loops[0].stats.sent_bytes == resumed.loops[0].stats.sent_bytes


@pytest.mark.parametrize("method", METHODS.values(), ids=METHODS)
def test_the_optimizers_checkpoint_resumes_both_bit_for_bit(method) -> None:
    killed, resumed = Team(method, adamw, 2), Team(method, adamw, 2)
    for loop in killed.loops + resumed.loops:
        loop.save_with_optimizer()
    states = killed.train(5).states()
    killed.train(2, first=5)  # is lost
    for model, optimizer, state in zip(resumed.models, resumed.optimizers, states, strict=True):
        model.load_state_dict(state["model"])
        optimizer.load_state_dict(state["optimizer"])
    assert resumed.loops[0].inner_step == 5
    check_equal(Team(method, adamw, 2).train(14), resumed.train(9, first=5))


@pytest.mark.parametrize("method", METHODS.values(), ids=METHODS)
def test_a_loop_built_after_the_weights_were_loaded_resumes_bit_for_bit(method) -> None:
    straight = Team(method, adamw, 2).train(5)
    states, resumed = straight.states(), Team(method, adamw, 2)
    for n, (state, transport) in enumerate(zip(states, tw.transport.in_process(2), strict=True)):
        model = resumed.models[n]
        model.load_state_dict(state["model"])
        resumed.optimizers[n] = optimizer = adamw(model)
        optimizer.load_state_dict(state["optimizer"])
        resumed.loops[n].close()
        resumed.loops[n] = tw.OuterLoop(
            model, optimizer, method, transport=transport, resume=state["outer"]
        )
    check_equal(straight.train(9, first=5), resumed.train(9, first=5))
    # The control: without `resume` such weights are refused.
    first, second = tw.transport.in_process(2)
    for model, state in zip(straight.models, states, strict=True):
        model.load_state_dict(state["model"])
    tw.OuterLoop(straight.models[0], [], method, transport=first)
    with pytest.raises(tw.MismatchError, match="initial weights"):
        tw.OuterLoop(straight.models[1], [], method, transport=second)


def test_a_checkpoint_without_outer_state_or_of_another_method_is_refused() -> None:
    _, optimizer, outer = alone(METHODS["diloco"])
    plain = optimizer.state_dict()
    outer.save_with_optimizer()
    with pytest.raises(tw.errors.CheckpointError, match=r"no outer state.*start over"):
        optimizer.load_state_dict(plain)
    _, other, another = alone(tw.presets.diloco(sync_every=7))
    another.save_with_optimizer()
    with pytest.raises(tw.MismatchError, match="sync_every"):
        optimizer.load_state_dict(other.state_dict())
    assert outer.inner_step == 0


def test_closing_gives_the_optimizer_back() -> None:
    _, optimizer, outer = alone(METHODS["diloco"])
    assert outer.save_with_optimizer() is outer.save_with_optimizer() is optimizer
    outer.__enter__()
    outer.close()
    assert set(optimizer.state_dict()) == {"state", "param_groups"}
    optimizer.step()
    assert outer.inner_step == 0


def scaled_step(model, optimizer, scaler, step: int, *, overflows: bool = False) -> None:
    scaler.scale(loss(model, step, 0) * (float("inf") if overflows else 1.0)).backward()
    scaler.step(optimizer)
    scaler.update()
    optimizer.zero_grad()


def test_an_optimizer_whose_steps_may_be_skipped_unseen_is_not_followed() -> None:
    model, optimizer, outer = alone(METHODS["diloco"])
    outer.__enter__()
    scaler = torch.amp.GradScaler("cpu", init_scale=8.0)
    scaled_step(model, optimizer, scaler, 0, overflows=True)
    assert outer.inner_step == 0
    with pytest.raises(tw.ConfigurationError, match=r"outer\.step\(\) after every scaler\.step"):
        scaled_step(model, optimizer, scaler, 1)
    model, optimizer, outer = alone(METHODS["diloco"])
    outer.__enter__()
    scaled_step(model, optimizer, torch.amp.GradScaler("cpu", enabled=False), 0)
    assert outer.inner_step == 1


def test_a_fused_optimizer_says_of_every_step_also_of_those_it_skips() -> None:
    def fused(model) -> torch.optim.AdamW:
        return torch.optim.AdamW(model.parameters(), fused=True)

    model, optimizer, outer = alone(METHODS["diloco"], fused)
    outer.__enter__()
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


def derived(model) -> Derived:
    return Derived(model.parameters(), lr=0.02)


# Of itself, when an optimizer is compiled first, and of Python 3.13.0.
TORCH_WARNS = pytest.mark.filterwarnings(
    "ignore:.torch.jit.script_method. is deprecated", "ignore:Guards may run slower on Python"
)


@TORCH_WARNS
def test_a_round_is_not_traced_where_its_caller_is_compiled() -> None:
    model, optimizer, outer = alone(METHODS["feedback"])
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
@pytest.mark.parametrize("is_compiled", [False, True], ids=["derived", "compiled"])
@pytest.mark.parametrize("method", [METHODS["diloco"], tw.presets.ddp()], ids=["diloco", "ddp"])
def test_a_step_in_a_step_or_a_compiled_one_counts_once_and_is_awaited(method, is_compiled) -> None:
    adamw(build_model())  # from now on torch puts hooks around AdamW's own step, too
    trained = []
    for by_hand in (False, True):
        torch.compiler.reset()
        model, optimizer, outer = alone(method, adamw if is_compiled else derived)
        if not by_hand:
            outer.__enter__()
        compiled = torch.compile(lambda it=optimizer: it.step(), backend="eager")
        for step in range(4):
            loss(model, step, 0).backward()
            compiled() if is_compiled else optimizer.step()
            if by_hand:
                outer.step()
            optimizer.zero_grad()
        assert outer.inner_step == 4
        trained.append([p.detach() for p in model.parameters()])
    assert same_bits(*trained)


@TORCH_WARNS
def test_a_compiled_step_in_a_step_is_refused_for_it_cannot_be_told_whose_it_is() -> None:
    adamw(build_model())
    model, optimizer, outer = alone(METHODS["diloco"], derived)
    outer.__enter__()
    descend(loss(model, 0, 0), optimizer)  # the first step has a hook that is not compiled
    loss(model, 1, 0).backward()
    torch.compiler.reset()
    with pytest.raises(tw.ConfigurationError, match=r"leave optimizer\.step\(\) as it is"):
        torch.compile(lambda: optimizer.step(), backend="eager")()
