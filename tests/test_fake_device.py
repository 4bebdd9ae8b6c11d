"""The device that is none: what it takes for a wait and for a race, and rounds of all methods."""

import warnings
from array import array
from contextlib import nullcontext
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_map

import thinwire as tw
from elastic_hub import METHODS as METHODS_THAT_CHANGE
from elastic_hub import (
    H,
    Player,
    begin_with,
    exchange,
    flush,
    inner,
    meet,
    to_boundary,
    train,
)
from elastic_twin import ElasticHub
from fake_device import DEVICE, ON_DEVICES, FakeDevice, RealDevice
from speed.models import llama
from speed.round_costs import with_short_rounds
from speed.workers import train_on_noise
from thinwire.asynchronous import AsyncServer, AsyncWorker
from thinwire.experiments.grid import with_changes
from thinwire.storage import HostCopy, StatePlacement
from thinwire.train.recipes import laptop
from thinwire.train.workers.ranks import Ranks
from thinwire.train.workers.worker import Worker, WorkerIdentity
from toy import Team, build_model, exchange_all

Device = FakeDevice | RealDevice

METHODS = {name: with_short_rounds(name) for name in [*tw.presets.names(), "muloco:bits=2"]}
METHODS["eager"] = tw.presets.diloco(
    sync_every=2,
    codec=tw.codecs.Quantise(bits=4),
    feedback=tw.ErrorFeedback(),
    overlap=tw.Eager(),
)


def sgd(model: nn.Module) -> torch.optim.Optimizer:
    """One that rounds alike everywhere."""
    return torch.optim.SGD(model.parameters(), lr=1.0)


def copied(state: object) -> Any:
    return tree_map(lambda x: x.clone() if isinstance(x, Tensor) else x, state)


class Pair(Team):
    """Two workers whose models lie on a device.

    Args:
        method: what they run.
        gpu: the device; None is the CPU.
        outer: where outer state rests.
        part: which of the parameters lie there.
    """

    def __init__(
        self,
        method: tw.Method,
        gpu: Device | None,
        outer: str | None,
        part: slice | None = None,
    ) -> None:
        def model() -> nn.Module:
            built = llama(vocabulary=37, width=64, layers=2)
            if gpu is not None:
                gpu.hold(*[*built.parameters()][part or slice(None)], *built.buffers())
                gpu.hold_gradients(built)
            return built

        super().__init__(method, sgd, 2, model=model, outer_device=outer)

    def descend(self, worker: int, step: int) -> None:
        train_on_noise(self.models[worker], self.optimizers[worker], seed=2 * step + worker)


@ON_DEVICES
@pytest.mark.slow_cases("decoupled", "demo", "sparseloco", "eager")
@pytest.mark.parametrize("name", METHODS)
def test_no_copy_races_with_a_round_of_a_method(name: str, device: type[Device]) -> None:
    """Outer state is in the host's memory; test_round_waits.py has it on the device."""
    method, steps = METHODS[name], 2 * METHODS[name].sync_every
    with device() as gpu:
        pair = Pair(method, gpu, "cpu").train(steps)
        for loop, saved in [(loop, copied(loop.state_dict())) for loop in pair.loops]:
            loop.load_state_dict(saved)
        there = pair.train(steps, first=steps).digests()
    assert there == Pair(method, None, None).train(2 * steps).digests()


@ON_DEVICES
@pytest.mark.slow_cases(but=("sparse_muloco-last",))
@pytest.mark.parametrize("part", [slice(5), slice(5, None)], ids=["first", "last"])
@pytest.mark.parametrize("name", sorted(METHODS.keys() - {"demo"}))
def test_a_model_may_lie_on_two_devices(name: str, part: slice, device: type[Device]) -> None:
    """As with `device_map`. DeMo's norm asks torch where the gradients really are."""
    method = METHODS[name]
    with device() as gpu:
        there = Pair(method, gpu, None, part).train(2 * method.sync_every).digests()
    assert there == Pair(method, None, None).train(2 * method.sync_every).digests()


@ON_DEVICES
@pytest.mark.slow_cases(but=("muloco:bits=2-None", "diloco-cpu", "streaming_diloco-None"))
@pytest.mark.parametrize("outer", [None, "cpu"])
@pytest.mark.parametrize("name", METHODS)
def test_rounds_follow_a_model_that_is_moved(
    name: str, outer: str | None, device: type[Device]
) -> None:
    """Trainers do that after the outer loop was built; here there have been rounds."""
    method, steps = METHODS[name], 2 * METHODS[name].sync_every
    with device() as gpu:
        pair = Pair(method, None, outer).train(steps)
        list(map(gpu.to_device, pair.models))
        if any(each.pending for loop in pair.loops for each in loop._state.fragments):
            with pytest.raises(
                tw.ConfigurationError, match="from 'cpu' to 'cuda:0'; because a round"
            ):
                pair.train(1)
            return
        there = pair.train(steps, first=steps).digests()
        for net in pair.models:
            net.to("cpu")
        back = pair.train(steps, first=2 * steps).digests()
    expected = Pair(method, None, None)
    assert there == expected.train(2 * steps).digests()
    assert back == expected.train(steps, first=2 * steps).digests()


class Noisy(Player):
    """An elastic worker whose training needs no data, which would lie on the host."""

    def inner(self, steps: int = 1) -> None:
        for _ in range(steps):
            train_on_noise(self.model, self.optimizer, seed=4 * self.trained + self.number)
            self.trained += 1


def elastic_rounds(name: str, gpu: Device | None, outer: str | None) -> list[str]:
    """Digests of workers of which one missed rounds and one came."""
    hub = ElasticHub()

    def model(seed: int = 0) -> nn.Module:
        built = build_model(seed)
        return built if gpu is None else gpu.to_device(built)

    options = {"build": sgd, "outer": outer}
    first, _slow, other = players = [
        Noisy(hub, f"w{k}", METHODS_THAT_CHANGE[name], number=k, model=model, **options)
        for k in range(3)
    ]
    meet(hub, players)
    for player in players:
        player.loop.join()
    hub.discards = lambda _: first.loop.stats.rounds == 1
    train(players, 2 * H)
    hub.discards = lambda _: False
    to_boundary(players)
    meet(hub, [first, other])
    exchange([first, other])
    to_boundary([first, other])
    meet(hub, players)
    exchange(players)  # the slow one replays what it missed
    hub.heal_by = "snapshot"
    late = Noisy(
        hub, "late", METHODS_THAT_CHANGE[name], number=3, model=partial(model, 7), **options
    )
    inner(players, H)
    exchange(players, H - 1)
    meet(hub, [*players, late])
    begin_with(players, late)
    late.loop.load_state_dict(copied(late.loop.state_dict()))
    everyone = [*players, late]
    train(everyone, 2 * H)
    flush(everyone)
    return [player.loop.digest() for player in everyone]


@ON_DEVICES
@pytest.mark.slow_cases(but=("table-cpu", "streaming-None"))
@pytest.mark.parametrize("outer", [None, "cpu"])
@pytest.mark.parametrize("name", METHODS_THAT_CHANGE)
def test_no_copy_races_where_workers_come_and_go(
    name: str, outer: str | None, device: type[Device]
) -> None:
    with device() as gpu:
        there = elastic_rounds(name, gpu, outer)
    assert len({*there}) == 1
    assert there == elastic_rounds(name, None, None)


def asynchronous_rounds(
    gpu: Device | None, outer: str | None = "cpu", moved: str = "first"
) -> Tensor:
    """Weights of a lone asynchronous worker that was resumed half-way.

    Args:
        gpu: the device of the model; None is the CPU.
        outer: where the worker's state rests.
        moved: when the model moves there.
    """
    method = tw.presets.diloco(
        sync_every=3,
        outer=tw.outer.DelayedNesterov(lr=0.7, momentum=0.9, every=2),
        codec=tw.codecs.Quantise(bits=2),
        feedback=tw.ErrorFeedback(),
    )
    server, model = AsyncServer(build_model(), method, workers=1), build_model()

    def move(when: str) -> None:
        if gpu is not None and when == moved:
            gpu.to_device(model)

    move("first")
    optimizer = sgd(model)
    with gpu or nullcontext():
        worker = AsyncWorker(model, optimizer, method, rank=0, outer_device=outer)
    for number in range(4):
        assignment = server.assign(0, now_s=number)
        with gpu or nullcontext():
            move(f"before round {number}")
            worker.start(assignment, server.theta_message)
            move(f"in round {number}")
            worker.load_state_dict(copied(worker.state_dict()))
            for step in range(assignment.steps):
                train_on_noise(model, optimizer, seed=4 * number + step)
            move(f"after round {number}")
            message = worker.finish()
        rejected = server.receive(message.clone(), now_s=number)
        with gpu or nullcontext():
            worker.settle(rejected)
    return torch.cat([p.detach().view(-1) for p in model.parameters()]).cpu()


@ON_DEVICES
@pytest.mark.slow_cases(but=("first-cpu", "before round 0-None"))
@pytest.mark.parametrize("outer", [None, "cpu"])
@pytest.mark.parametrize("moved", ["first", "before round 0", "in round 2", "after round 2"])
def test_no_copy_races_with_an_asynchronous_worker(
    moved: str, outer: str | None, device: type[Device]
) -> None:
    there = asynchronous_rounds(device(), outer, moved)
    assert torch.equal(there, asynchronous_rounds(None))


class OnDevice(Ranks):
    """A worker of one rank, whose model and gradients lie on the fake device."""

    def __init__(self, fake: FakeDevice) -> None:
        self._fake = fake

    def place(self, model: nn.Module, device: torch.device) -> None:
        self._fake.to_device(model)


def trained(folder: Path, fake: FakeDevice | None) -> tuple[str, set[str]]:
    """Digest of two workers of our trainer, and where the host waited between rounds."""
    changes = {
        "workers": 2,
        "model.size": "250k",
        "data.corpus": str(folder),
        "data.tokenizer": "ids:256",
        "data.validation_sequences": 2,
        "clip_norm": 0.0,  # torch asks where the tensors really are
        "machine.device": "cpu" if fake is None else "cuda",
    }
    config = with_changes(laptop("muloco:bits=2:sync_every=2"), changes)
    data, ranks = config.data.load(), Ranks() if fake is None else OnDevice(fake)
    with fake or nullcontext():
        workers = [
            Worker(
                config,
                data,
                partial(tw.OuterLoop, transport=end),
                WorkerIdentity(number=number, evaluators=2, block=number),
                ranks,
            )
            for number, end in enumerate(tw.transport.in_process(2))
        ]
        waits = set[str]()
        for _ in range(3):
            if fake is not None:
                fake.waits.clear()
            for worker in workers:
                with worker.stream.active():
                    worker.inner_step()
            if fake is not None:
                waits |= {*fake.waits}
                assert set(fake.waits.values()) <= {len(workers)}
            exchange_all([worker.outer for worker in workers])
        return workers[0].outer.digest(), waits


@pytest.mark.slow
def test_a_step_of_our_trainer_waits_for_its_loss(tmp_path, monkeypatch) -> None:
    for name in ("train.bin", "val.bin"):
        (tmp_path / name).write_bytes(array("H", range(256)).tobytes() * 64)
    monkeypatch.setattr(torch.cuda, "get_rng_state", lambda device: torch.zeros(1))
    monkeypatch.setattr(torch.cuda, "set_rng_state", lambda state, device: None)
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", "User provided device_type of 'cuda'")
        there, waits = trained(tmp_path, FakeDevice())
    assert there == trained(tmp_path, None)[0]
    # And transformers looks for packed sequences in each forward pass, before it computes any.
    worker = "train/workers/worker.py:"
    assert waits == {f"{worker}Worker.inner_step", f"{worker}token_losses"}


# -- what it sees ----------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("read", "waits"),
    [
        (lambda x: x.sum().item(), 1),
        (lambda x: x.cpu(), 1),
        (lambda x: x.to("cpu"), 1),
        (lambda x: torch.empty(3).copy_(x), 1),
        # Memory that is not pinned is copied to at once, whatever was asked for.
        (lambda x: torch.empty(3).copy_(x, non_blocking=True), 1),
        (lambda x: torch.empty(3, pin_memory=True).copy_(x, non_blocking=True), 0),
        (lambda x: HostCopy(x), 0),
        (lambda x: HostCopy(x).read(), 1),
        (lambda x: torch.empty(3).__setitem__(slice(3), x), 1),
        (lambda x: x.__setitem__(slice(3), torch.ones(3)), 0),
        (lambda x: x[x > 0], 1),
        (lambda x: torch.where(x > 0), 1),
        (lambda x: torch.equal(x, x), 1),
        (lambda x: x[torch.tensor([0, 1], device=x.device)], 0),
        (lambda x: torch.where(x > 0, x, 0), 0),
        (lambda x: x.mul_(2).add_(x).sum(), 0),
    ],
)
def test_what_is_read_of_the_device_is_a_wait(read, waits: int) -> None:
    fake, layer = FakeDevice(), nn.Linear(3, 1)
    with fake:
        fake.to_device(layer)
        read(layer.weight.detach().view(-1) * 2)
    assert fake.waits.total() == waits


def test_only_what_overwrites_host_memory_waits_for_a_copy_from_there() -> None:
    with FakeDevice() as fake:
        kept = StatePlacement(DEVICE, on_host=True).keep(torch.ones(3, device=DEVICE))
        kept.prefetch()
        fake.waits.clear()
        kept.unshared()  # as before every outer step
        assert not fake.waits
        kept.load(torch.zeros(3))
        assert fake.waits.total() == 1


def test_what_was_copied_before_the_training_is_no_wait() -> None:
    fake = FakeDevice()
    with fake:
        copy = HostCopy(torch.ones(3, device=DEVICE))
    with fake:
        copy.read()
    assert fake.waits.total() == 0


def used_before_it_came(x: Tensor) -> None:
    copy = HostCopy(x)
    copy._host.sum()


def changed_while_it_is_copied(x: Tensor) -> None:
    copy = HostCopy(x)
    x.zero_()
    copy.read()


def fetched_without_waiting(x: Tensor) -> None:
    kept = StatePlacement(DEVICE, on_host=True).keep(x)
    kept.prefetch()
    kept._arrived = None
    kept.fetch().sum()


def changed_on_the_host_while_it_is_fetched(x: Tensor) -> None:
    kept = StatePlacement(DEVICE, on_host=True).keep(x)
    kept.prefetch()
    kept.stored().zero_()


def given_away_while_it_is_copied(x: Tensor) -> None:
    stream, there = torch.cuda.Stream(DEVICE), x * 2
    stream.wait_stream(torch.cuda.current_stream(DEVICE))
    host = torch.empty(3, pin_memory=True)
    with torch.cuda.stream(stream):
        host.copy_(there, non_blocking=True)


@pytest.mark.parametrize(
    ("race", "found"),
    [
        (used_before_it_came, "the host uses what another stream is at work on"),
        (changed_while_it_is_copied, "a stream uses what another stream is at work on"),
        (fetched_without_waiting, "a stream uses what another stream is at work on"),
        (changed_on_the_host_while_it_is_fetched, "the host uses what"),
        (given_away_while_it_is_copied, "given away while another stream is at work"),
    ],
)
def test_a_race_is_an_error(race, found: str) -> None:
    with pytest.raises(AssertionError, match=found), FakeDevice():
        race(torch.ones(3, device=DEVICE))


def test_tensors_on_two_devices_and_numbers_in_place_are_refused() -> None:
    with FakeDevice():
        there = torch.ones(3, device=DEVICE)
        with pytest.raises(AssertionError, match="two devices"):
            there + torch.ones(3)
        with pytest.raises(AssertionError, match=r"numpy\(\)"):
            there.numpy()
