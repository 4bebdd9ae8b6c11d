"""Scripts set a default dtype or device for their model, which must not reach what we make."""

import threading
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from functools import cache
from pathlib import Path

import pytest
import torch
from torch import nn

import thinwire as tw
from thinwire import codecs
from toy import adamw, build_model, descend, exchange_all, flush, loss

EVERY = {"sync_every": 3}
METHODS = {
    name: tw.presets.by_name(name)(**({} if name in ("ddp", "demo") else EVERY))
    for name in tw.presets.names()
    if not name.startswith("streaming")
} | {
    "streaming": tw.presets.streaming_diloco(fragments=tw.Balanced(count=2), **EVERY),
    "2 bit": tw.presets.diloco(codec=codecs.Quantise(bits=2), **EVERY),
    "stochastic": tw.presets.diloco(
        codec=codecs.Quantise(bits=2, rounding=codecs.Stochastic()), **EVERY
    ),
    "statistical": tw.presets.diloco(
        codec=codecs.Quantise(bits=2, grid=codecs.Statistical()), **EVERY
    ),
    "1 bit": tw.presets.muloco(bits=1, **EVERY),
    "random": tw.presets.diloco(codec=codecs.RandomK(k=64), **EVERY),
    "levels": tw.presets.diloco(codec=codecs.TopK(k=64, values=codecs.TensorLevels()), **EVERY),
    "hadamard": tw.presets.diloco(codec=codecs.TopK(k=64, transform=codecs.Hadamard()), **EVERY),
    "scattered": tw.presets.diloco(
        codec=codecs.Quantise(bits=4), exchange=tw.ReduceScatter(), **EVERY
    ),
    "eager": tw.presets.diloco(overlap=tw.Eager(), **EVERY),
    "trimmed": tw.presets.diloco(aggregate=tw.TrimmedMean(), **EVERY),
    "adamw": tw.presets.diloco(outer=tw.outer.AdamW(lr=0.1), **EVERY),
}
Setting = Callable[[], AbstractContextManager[None]]


@contextmanager
def dtype(value: torch.dtype) -> Iterator[None]:
    torch.set_default_dtype(value)
    try:
        yield
    finally:
        torch.set_default_dtype(torch.float32)


@contextmanager
def meta() -> Iterator[None]:
    """What is made on this device by mistake has no values."""
    with torch.device("meta"):
        yield


SETTINGS: dict[str, Setting] = {
    "bf16": lambda: dtype(torch.bfloat16),
    "fp64": lambda: dtype(torch.float64),
    "device": meta,
}


def train(method: tw.Method, defaults: Setting) -> list[object]:
    """Digests and states after seven steps of three workers, whose models know no defaults."""
    models = [build_model() for _ in range(3)]
    steps = [method.inner.build(model) for model in models]
    with defaults():
        loops = [
            tw.OuterLoop(model, optimizer, method, transport=transport)
            for model, optimizer, transport in zip(
                models, steps, tw.transport.in_process(3), strict=True
            )
        ]
    for step in range(7):
        for worker, (model, optimizer) in enumerate(zip(models, steps, strict=True)):
            loss(model, step, worker, workers=3).backward()
            with defaults():
                optimizer.step()
            optimizer.zero_grad()
        with defaults():
            exchange_all(loops)
    with defaults():
        flush(loops)
        states = [loop.state_dict() for loop in loops]
        loops[0].load_state_dict(states[0])
        if not method.outer.has_own_anchors:
            with loops[0].evaluating():
                pass
        return [loop.digest() for loop in loops]


@cache
def without(name: str) -> list[object]:
    return train(METHODS[name], nullcontext)


@pytest.mark.parametrize("name", METHODS)
@pytest.mark.parametrize("setting", SETTINGS)
@pytest.mark.filterwarnings("ignore::thinwire.errors.LossyReduceScatterWarning")
def test_a_default_dtype_or_device_of_the_script_changes_no_bit(setting: str, name: str) -> None:
    assert train(METHODS[name], SETTINGS[setting]) == without(name)


def work(at: Path, worker: int, defaults: Setting, digests: dict[int, str]) -> None:
    model = build_model()
    with defaults():
        transport = tw.transport.Elastic(f"file://{at}", run="r", workers=2, worker=worker)
        outer = tw.OuterLoop(
            model, optimizer := adamw(model), METHODS["2 bit"], transport=transport
        )
    for step in range(7):
        descend(loss(model, step, worker, workers=2), optimizer)
        with defaults():
            outer.step()
    with defaults():
        outer.flush()
        digests[worker] = outer.digest()
        outer.close()


def test_nor_does_a_device_what_goes_through_a_store(tmp_path: Path) -> None:
    """A dtype is the default of all threads, also of that of the other worker."""
    found = list[dict[int, str]]()
    for defaults in (nullcontext, meta):
        digests: dict[int, str] = {}
        at = tmp_path / str(len(found))
        first = threading.Thread(target=work, args=(at, 0, nullcontext, digests))
        first.start()
        work(at, 1, defaults, digests)
        first.join()
        found.append(digests)
    assert found[0] == found[1]


def test_the_control_is_a_model_that_is_made_with_the_default() -> None:
    with dtype(torch.bfloat16):
        assert nn.Linear(2, 2).weight.dtype == torch.bfloat16
    with meta():
        assert build_model()[1].weight.is_meta
