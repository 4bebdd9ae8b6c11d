"""Which method fits a measured link, according to the planner."""

from __future__ import annotations

import json
import math
import shlex
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import dataclass, field
from typing import Any, Final

from thinwire.doctor.machine import Finding, RunAdvice
from thinwire.errors import ConfigurationError
from thinwire.method import Method
from thinwire.plan.advice import advise
from thinwire.plan.compute import Compute
from thinwire.plan.forecast import forecast
from thinwire.plan.job import Job
from thinwire.plan.link import Link, Star
from thinwire.plan.models import resolve
from thinwire.plan.shape import Shape
from thinwire.plan.units import duration_text, rate_text, share_text

_TARGET: Final = 0.9
_MODEL, _WORKERS, _STEP_S = "150m", 2, 1.0
_WORDS: Final = {"None": None, "False": False, "True": True, "inf": math.inf}


@dataclass(frozen=True, kw_only=True, slots=True)
class ExpectedRun:
    """The run to plan for, as far as the user described it; the doctor fills in what is None.

    Args:
        shape: shape of the model.
        model: value of --model, if it was passed.
        workers: K.
        step_s: duration of an inner step.
    """

    shape: Shape | None = None
    model: str | None = None
    workers: int | None = None
    step_s: float | None = None


@dataclass(frozen=True, kw_only=True, slots=True)
class RunDescription:
    """A run under way, as its store describes it.

    Args:
        fields: description of its model and method, flat; empty without a run.
        workers: number of workers present; 0 once the run is over.

    >>> RunDescription(fields={"parameters.h.0.w": "[2, 3]"}).size()
    (6, 1)
    """

    fields: Mapping[str, str] = field(default_factory=dict[str, str])
    workers: int = 0

    def size(self) -> tuple[int, int] | None:
        """N and the number of layers, guessed from names; None if unknown."""
        shapes = {key: text for key, text in self.fields.items() if key.startswith("parameters.")}
        layers = {part for key in shapes for part in key.split(".") if part.isdigit()}
        try:
            numels = [math.prod(map(int, json.loads(text))) for text in shapes.values()]
        except (TypeError, ValueError, RecursionError):
            return None
        if min(numels, default=0) < 1:
            return None
        return sum(numels), min(sum(numels), max(1, len(layers)))

    def method(self) -> Method | None:
        """Its method; None if the run names none, or one that this version of thinwire lacks."""
        flat = {key: text for key, text in self.fields.items() if key.startswith("method.")}
        try:
            return Method.from_dict(_nested({"method.name": "method", **flat})["method"])
        except (ConfigurationError, TypeError):
            return None


def _nested(flat: Mapping[str, str]) -> Any:
    """Undo `flatten_description`; a text that looks like a number becomes one."""
    branches: dict[str, dict[str, str]] = {}
    for path, text in flat.items():
        name, _, below = path.partition(".")
        branches.setdefault(name, {})[below] = text
    tree = {name: _value(its[""]) if "" in its else _nested(its) for name, its in branches.items()}
    places = [str(index) for index in range(len(tree))]
    # In any order: keys of JSON may have been sorted as texts.
    return [tree[place] for place in places] if tree.keys() == {*places} else tree


def _value(text: str) -> Any:
    try:
        return _WORDS[text] if text in _WORDS else json.loads(text)
    except (ValueError, RecursionError):
        return text


def method_finding(link: Link | None, planned: ExpectedRun, run: RunDescription) -> Finding:
    """Advice for workers that all have this link to the store.

    A run under way has a method, and a joining worker cannot choose another. If that method keeps
    the worker busy, no other is searched for.

    Args:
        link: the measured link; None if it was not measured.
        planned: the run as the user described it, which takes precedence over the store.
        run: the run as the store describes it.
    """
    if link is None:
        do = "measure it by other means, and pass it to thinwire plan with --bandwidth"
        return Finding("warn", "not computed: the rate to the store was not measured", do)
    job, model = _job(link, planned, run)
    plan = f"what each method sends, and the rate that it needs: thinwire plan {_flags(job, model)}"
    figures = f"computed for {job.shape.name}, {job.workers} workers with this link, "
    step = duration_text(job.compute.step_s)
    figures += f"{step} a step (yours: --model, --workers, --step-time)"
    method, own = run.method(), list[str]()
    with suppress(ConfigurationError):  # the method does not fit the model; thinwire plan says why
        if method is not None:
            row = forecast(method, job, target=_TARGET)
            named, busy = f"{row.method} (H={row.sync_every_steps})", share_text(row.utilisation)
            own.append(f"the run's {named} keeps a worker busy {busy}")
            if row.fits:
                return Finding("ok", f"{own[0]}; {figures}", plan)
    advice = advise(job, target=_TARGET, usable=Method.check_elastic)
    fitting = f"{len(advice.recommended) or 'no'} presets keep a worker busy"
    fitting = f"{fitting} {share_text(_TARGET)} of the time"
    if own:
        plan = f"begin another run, all workers of which have the flags of one below; {plan}"
    elif advice.recommended:
        plan = f"all workers take the flags of one below; {plan}"
    return Finding(
        "ok" if advice.recommended and not own else "warn",
        "; ".join([*own, fitting, figures]),
        plan,
        RunAdvice(advice, job, model),
    )


def _job(link: Link, planned: ExpectedRun, run: RunDescription) -> tuple[Job, str | None]:
    """The job, as described by the user, else by the store, else assumed; and its --model."""
    size, shape, model = run.size(), planned.shape, planned.model
    if shape is None and size is not None:
        shape = Shape.of_size(*size)
    elif shape is None:
        shape, model = resolve(_MODEL), _MODEL
    job = Job(
        shape=shape,
        # Including this worker, which may be the second.
        workers=max(_WORKERS, run.workers + 1) if planned.workers is None else planned.workers,
        compute=Compute(step_s=_STEP_S if planned.step_s is None else planned.step_s),
        link=link,
        topology=Star(),
    )
    return job, model


def _flags(job: Job, model: str | None) -> str:
    """The flags with which `thinwire plan` plans for `job`."""
    size = f"--parameters {job.shape.parameters} --layers {job.shape.layers}"
    values = {
        "workers": str(job.workers),
        "step-time": duration_text(job.compute.step_s),
        "up": rate_text(job.link.up_bits_per_s),
        "down": rate_text(job.link.down_bits_per_s),
        "latency": duration_text(job.link.latency_s),
        "topology": job.topology.name,
    }
    given = [f"--{name} {text.replace(' ', '')}" for name, text in values.items()]
    return " ".join([f"--model {shlex.quote(model)}" if model else size, *given])
