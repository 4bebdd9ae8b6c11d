"""Calibration: from the folder of a run to the same job over another link."""

import math
from dataclasses import dataclass, replace
from itertools import pairwise
from pathlib import Path
from statistics import median

from thinwire.errors import ConfigurationError, check
from thinwire.method import Method
from thinwire.plan.compute import Compute
from thinwire.plan.job import Job
from thinwire.plan.link import Link, OverTcp
from thinwire.plan.models import resolve
from thinwire.plan.shape import Shape
from thinwire.plan.simulate import Scenario
from thinwire.plan.traffic import Traffic, traffic
from thinwire.runs.schema import FinishedRun
from thinwire.runs.status import read_run


@dataclass(frozen=True, kw_only=True, slots=True)
class Measured:
    """Measurements of a run, to compare with a prediction.

    Args:
        training_s: seconds that worker 0 spent in inner and outer steps, without start, evaluation
            and saving.
        inner_s: seconds of these in inner steps; of all workers if they share a process.
        wait_s: seconds of these waiting for exchanges.
        sent_nbytes: bytes that worker 0 sent.
        received_nbytes: bytes that worker 0 received.
    """

    training_s: float
    inner_s: float
    wait_s: float
    sent_nbytes: int
    received_nbytes: int

    @property
    def utilisation(self) -> float:
        """Share of the time that went into inner steps."""
        return self.inner_s / self.training_s if self.training_s else 1.0


@dataclass(frozen=True, kw_only=True, slots=True)
class Calibration:
    """The job of a run.

    Args:
        method: method of the run.
        steps: inner steps.
        traffic: messages of worker 0.
        job: model, workers and an inner step, over a link without limits; time outside of inner
            steps and waits counts as coding.
        measured: seconds and bytes of the run.
    """

    method: Method
    steps: int
    traffic: Traffic
    job: Job
    measured: Measured

    def scenario(self, link: Link, *, late_s: float = 0.0) -> Scenario:
        """The job over `link`, around the ring of `Distributed` over gloo.

        Args:
            link: of every worker.
            late_s: delay of each answer that the link does not account for.
        """
        return replace(self.job, link=link, topology=OverTcp(late_s=late_s)).scenario(self.traffic)


def calibrate(folder: Path | str, *, step_s: float | None = None) -> Calibration:
    """The job of the run in `folder`, with the times that the run measured.

        step   = median (inner seconds / steps)              between records after the first
        coding = median (training - inner - wait) / exchanges

    Args:
        folder: folder of a finished run.
        step_s: seconds of one worker's inner step, in place of the measured ones. Required if
            workers shared a process: they shared its cores, so no record has the step time of one
            worker.

    Raises:
        ConfigurationError: the folder is not that of a run, is incomplete or damaged, or lacks a
            necessary number.
    """
    status = read_run(Path(folder))
    if status.run is None:
        do = "pass the folder of a finished run of `thinwire train`, which has a config.json"
        raise ConfigurationError(_what(Path(folder)), because=f"it is {status}", do=do)
    run = status.run
    try:
        method = Method.from_dict(run.config.described["method"])
    except ConfigurationError as error:
        do = "plan for a preset instead, with the step time of the run"
        raise ConfigurationError(_what(run.folder), because=error.because, do=do) from error
    shape, last, summary = _shape(run), run.records[-1], run.summary
    sent = planned_traffic(run, method, shape)
    compute = Compute(step_s=step_s) if step_s is not None else _measured_compute(run, sent)
    job = Job(
        shape=shape,
        workers=sent.workers,
        compute=compute,
        link=Link.of(math.inf),
        topology=OverTcp(),
        tokens_per_step=run.config.tokens_per_step // sent.workers,
        tokens=summary.steps * run.config.tokens_per_step,
        added_nbytes=summary.added_nbytes or 0,
    )
    measured = Measured(
        training_s=_known(run, last.training_s, "training_s"),
        inner_s=_known(run, last.inner_s, "inner_s"),
        wait_s=last.wait_s,
        sent_nbytes=summary.sent_bytes_per_worker,
        received_nbytes=summary.received_bytes_per_worker,
    )
    return Calibration(method=method, steps=summary.steps, traffic=sent, job=job, measured=measured)


def _measured_compute(run: FinishedRun, sent: Traffic) -> Compute:
    here = _known(run, run.summary.workers_here, "workers_here", file="summary.json")
    because = f"its {here} workers shared a process and its cores, so that no worker had a step "
    do = "give the step time of one worker, or pass a run under torchrun"
    check(here == 1, _what(run.folder), because=f"{because}time of its own", do=do)
    spans = _spans(run)
    # Everything but inner steps and waits: encoding, decoding, the outer step.
    coding_s = [max(0.0, all_s - in_s - w) / n for _, n, all_s, in_s, w in spans if n]
    parameters = sum(message.parameters for message in sent.messages) / len(sent.messages)
    return Compute(
        step_s=median(inner_s / steps for steps, _, _, inner_s, _ in spans),
        outer_s_per_parameter=median(coding_s or [0.0]) / parameters,
    )


def _spans(run: FinishedRun) -> list[list[float]]:
    """Steps, exchanges, and seconds of training, inner steps and waits between two records.

    Leaves out the time before the first record, in which everything that happens once happens.
    """
    names = ("rounds", "training_s", "inner_s")
    counters = [
        [r.step, *(_known(run, getattr(r, name), name) for name in names), r.wait_s]
        for r in run.records
    ]
    differences = [
        [now - then for then, now in zip(before, after, strict=True)]
        for before, after in pairwise(counters)
    ]
    spans = [span for span in differences if min(span) >= 0]
    because = f"metrics.jsonl has {len(run.records)} records, and the time of a step is taken from "
    do = "train with a smaller --log-steps, or give the step time"
    check(bool(spans), _what(run.folder), because=f"{because}those after the first", do=do)
    return spans


def _shape(run: FinishedRun) -> Shape:
    folder = run.folder / "model"
    because = "it has no model/config.json: another worker's folder has it"
    do = "pass the folder of worker 0"
    check((folder / "config.json").is_file(), _what(run.folder), because=because, do=do)
    shape, counted = resolve(str(folder)), run.summary.parameters
    because = f"model/ has {shape.parameters} parameters and the run had {counted}"
    check(shape.parameters == counted, _what(run.folder), because=because, do="restore model/")
    return shape


def planned_traffic(run: FinishedRun, method: Method, shape: Shape) -> Traffic:
    """The messages of `run`, if their bytes match the count of the run.

    Elastic workers also repeat rounds and heal, so their bytes are not compared.

    Args:
        run: a run that counted its bytes.
        method: method of the run.
        shape: shape of its model.

    Raises:
        ConfigurationError: the bytes do not match, or the planner cannot plan for the workers.
    """
    size, summary = run.config.worker_size, run.summary
    because = f"its workers have {size} ranks each, which divide what is sent"
    do = "plan from a run with --worker-size 1"
    check(size == 1, _what(run.folder), because=because, do=do)
    added_nbytes = summary.added_nbytes or 0
    planned = traffic(method, shape, workers=summary.workers, added_nbytes=added_nbytes)
    expected = planned.sent_nbytes(summary.steps), planned.received_nbytes(summary.steps)
    counted = summary.sent_bytes_per_worker, summary.received_bytes_per_worker
    because = f"it counted {counted[0]} bytes sent and {counted[1]} received, and the planner "
    because += f"makes that {expected[0]} and {expected[1]}: workers came or went, or a file is of "
    because, do = f"{because}another run", "pass a run of one number of workers"
    check(summary.is_elastic or counted == expected, _what(run.folder), because=because, do=do)
    return planned


def _known(
    run: FinishedRun, value: float | None, name: str, *, file: str = "metrics.jsonl"
) -> float:
    """`value`, unless it is None."""
    if value is None:
        because = f"{file} has no {name}, as those of older versions"
        do = "train again for a few rounds"
        raise ConfigurationError(_what(run.folder), because=because, do=do)
    return value


def _what(folder: Path) -> str:
    return f"plan from the run in {folder}"
