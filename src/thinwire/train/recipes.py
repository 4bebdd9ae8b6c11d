"""Recipes: functions from a method's name to a complete configuration."""

import dataclasses
import runpy
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, TypeAlias

from thinwire import inner, outer, presets
from thinwire.codecs import Quantise
from thinwire.errors import ConfigurationError, unknown_name
from thinwire.feedback import DecoupledMomentum, NoFeedback
from thinwire.method import Method
from thinwire.train.config import Intervals, TrainConfig, WarmupCosine
from thinwire.train.data import Data
from thinwire.train.models import Model

Recipe: TypeAlias = Callable[[str], TrainConfig]


def laptop(method: str) -> TrainConfig:
    """A quarter of a million parameters, 400 steps, H = 10: half a minute on two cores.

    Settings come from a search (docs/log.md) over equally many learning rates for every method;
    noloco's are the best of seven with one seed. Differs: the papers' outer momentum of 0.9 needs
    hundreds of rounds, and this run has 40. One bit in rounds of 64 or more steps has no feedback
    and longer outer steps, as searches for 64 and for 200 found (docs/evidence.md).

    >>> laptop("muloco").method.outer
    SGD(lr=0.8, momentum=0.6, nesterov=True)
    >>> few_rounds = laptop("muloco:bits=1:sync_every=64").method
    >>> few_rounds.outer, few_rounds.feedback
    (SGD(lr=1.25, momentum=0.6, nesterov=True), NoFeedback())
    """
    return TrainConfig(
        method=_laptop_method(method),
        periods=Intervals(log_steps=10, evaluate_steps=100, checkpoint_steps=100),
    )


def _laptop_method(method: str) -> Method:
    adamw = inner.AdamW(lr=4e-3, betas=(0.9, 0.95), weight_decay=0.1)
    muon = inner.Muon(
        lr=5e-3,
        adamw_lr=4e-3,
        momentum=0.95,
        nesterov=True,
        weight_decay=0.1,
        scale="rms",
        betas=(0.9, 0.95),
    )
    with_adamw = {"inner": adamw, "sync_every": 10}
    with_muon = {"inner": muon, "sync_every": 10}
    tuned: Mapping[str, Mapping[str, Any]] = {
        "ddp": {"inner": adamw},
        "demo": {"inner": inner.SignSGD(lr=2e-3)},
        "diloco": with_adamw | {"outer": outer.SGD(lr=1.0)},
        "decoupled_momentum": {
            "inner": dataclasses.replace(adamw, lr=5e-4),
            "sync_every": 10,
            "outer": outer.DecoupledNesterov(lr=0.8),
            "feedback": DecoupledMomentum(decay=0.6),
        },
        "muloco": with_muon | {"outer": _nesterov(0.8, 0.6)},
        "noloco": with_adamw | {"outer": outer.Gossip(lr=0.8, momentum=0.3)},
        "streaming_diloco": with_adamw | {"outer": _nesterov(0.8, 0.6), "layers": 1},
        "streaming_muloco": with_muon | {"outer": _nesterov(1.0, 0.7), "layers": 1},
        "sparseloco": with_adamw,
        "sparse_muloco": with_muon | {"inner": dataclasses.replace(muon, lr=2.5e-3)},
    }
    found = presets.from_text(method, **tuned.get(method.partition(":")[0], {}))
    few_rounds = {200: _nesterov(1.6, 0.3), 64: _nesterov(1.25, 0.6)}
    longer = [own for every, own in few_rounds.items() if found.sync_every >= every]
    if longer and method.startswith("muloco:") and found.codec == Quantise(bits=1):
        return dataclasses.replace(found, outer=longer[0], feedback=NoFeedback())
    return found


def _nesterov(lr: float, momentum: float) -> outer.SGD:
    return outer.SGD(lr=lr, momentum=momentum, nesterov=True)


def paper(method: str) -> TrainConfig:
    """The papers' settings at 150M parameters: for GPUs.

    Warm-up 500 steps, cosine to 10 %, clipping at 1, sequences of 1,024 tokens, 512 sequences a
    step; the method as its preset has it.

    >>> paper("diloco").method == presets.diloco()
    True
    """
    return TrainConfig(
        method=presets.from_text(method),
        model=Model(size="150m"),
        data=Data(corpus="site-packages", tokenizer="bpe:32000", sequence_length=1024),
        workers=8,
        steps=10_000,
        global_batch=512,
        schedule=WarmupCosine(warmup_steps=500),
        periods=Intervals(log_steps=10, evaluate_steps=500, checkpoint_steps=500),
    )


_RECIPES: Mapping[str, Recipe] = {"laptop": laptop, "paper": paper}


def find(name: str) -> Recipe:
    """A built-in recipe, or FUNCTION of a file given as `FILE.py:FUNCTION`.

    Raises:
        ConfigurationError: neither exists.

    >>> find("laptop") is laptop
    True
    """
    if name in _RECIPES:
        return _RECIPES[name]
    if ".py:" in name:
        return load(name)
    because = f"it is not one of {', '.join(_RECIPES)}, nor FILE.py:FUNCTION"
    raise unknown_name(f"use recipe {name!r}", name, _RECIPES, because=because)


def load(name: str) -> Callable[..., Any]:
    """FUNCTION of a file given as `FILE.py:FUNCTION`.

    Raises:
        ConfigurationError: the file or the function does not exist, or running the file fails.
    """
    file, _, function = name.rpartition(":")
    if not (file.endswith(".py") and Path(file).is_file()):
        what, because = f"load {name!r}", "it is not FILE.py:FUNCTION of a file that exists"
        raise ConfigurationError(what, because=because, do="write it like recipes/mine.py:grid")
    try:
        found = runpy.run_path(file).get(function)
    except Exception as error:  # the user's code may raise anything
        what, because = f"load recipe {file}", f"running it raised {type(error).__name__}: {error}"
        raise ConfigurationError(what, because=because, do="correct the file") from error
    if not callable(found):
        what = f"use recipe {file}:{function}"
        do = "define it there: a recipe takes a method's name and returns a TrainConfig"
        raise ConfigurationError(what, because=f"{file} has no function of that name", do=do)
    return found
