"""Calibration: from the folder of a run to the same job over another link."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from itertools import pairwise
from pathlib import Path
from statistics import median
from typing import Final

from thinwire.errors import CheckpointError, ConfigurationError
from thinwire.method import Method
from thinwire.plan.compute import Coding, Compute
from thinwire.plan.link import Link
from thinwire.plan.resolve import resolve
from thinwire.plan.scenario import Scenario
from thinwire.plan.shape import Shape
from thinwire.plan.simulate import simulate
from thinwire.plan.tcp import OverTcp
from thinwire.plan.topology import Ring, Topology
from thinwire.plan.traffic import Traffic, traffic
from thinwire.runs.schema import FinishedRun, RunRecord, read_finished

_FINISHED_RUN: Final = "pass the folder of a finished run of `thinwire train`"


@dataclass(frozen=True, kw_only=True, slots=True)
class Measured:
    """What a run measured, to be compared with a prediction.

    Args:
        training_s: seconds in which worker 0 trained and exchanged, without start, evaluation and
            saving.
        inner_s: of them in inner steps; of all workers where they share a process.
        wait_s: of them waiting for exchanges.
        sent_nbytes: by worker 0.
        received_nbytes: by worker 0.
    """

    training_s: float
    inner_s: float
    wait_s: float
    sent_nbytes: int
    received_nbytes: int

    @property
    def utilisation(self) -> float:
        """Share of the time in which inner steps were computed."""
        return self.inner_s / self.training_s if self.training_s else 1.0


@dataclass(frozen=True, kw_only=True, slots=True)
class _Span:
    """What happened between two records of worker 0.

    Args:
        steps: inner steps.
        exchanges: that were applied, each fragment's counted.
        training_s: in inner and outer steps.
        inner_s: of them in inner steps.
        wait_s: of them waiting for exchanges.
    """

    steps: float
    exchanges: float
    training_s: float
    inner_s: float
    wait_s: float

    @property
    def coding_s(self) -> float:
        """All that is neither an inner step nor waiting: encoding, decoding, the outer step."""
        return max(0.0, self.training_s - self.inner_s - self.wait_s)


@dataclass(frozen=True, kw_only=True, slots=True)
class Calibration:
    """A job as a run had it.

    Args:
        method: with which it trained.
        shape: of the model.
        steps: inner steps.
        tokens_per_step: of all workers together.
        traffic: what worker 0 sends and receives, and among how many.
        compute: an inner step.
        coding: all that is neither an inner step nor waiting.
        late_s: by which an answer comes later than the link explains.
        added_nbytes: that sealing added to each message.
        measured: seconds and bytes of the run.
    """

    method: Method
    shape: Shape
    steps: int
    tokens_per_step: int
    traffic: Traffic
    compute: Compute
    measured: Measured
    coding: Coding = field(default_factory=Coding)
    late_s: float = 0.0
    added_nbytes: int = 0

    @property
    def workers(self) -> int:
        """K, the number of workers."""
        return self.traffic.workers

    def scenario(self, link: Link, *, topology: Topology | None = None) -> Scenario:
        """The job over `link`.

        Args:
            link: of every worker.
            topology: which worker sends to which; default the ring of `Distributed` over gloo.
        """
        over = OverTcp(over=Ring() if topology is None else topology, late_s=self.late_s)
        return Scenario(
            traffic=self.traffic,
            compute=self.compute,
            coding=self.coding,
            link=link,
            topology=over,
        )


def calibrate(
    folder: Path | str, *, link: Link | None = None, step_s: float | None = None
) -> Calibration:
    """The job of the run in `folder`, with the times that the run measured.

        step   = median (inner seconds / steps)              between records after the first
        coding = median (training - inner - wait) / exchanges
        late   = median (wait / exchanges) - what the simulation waits over `link`, at least 0

    Args:
        folder: of a finished run.
        link: over which it ran, if that is known: waits that took longer than this link explains
            are put down to the workers and expected on every link. Pass one of infinite rate where
            messages took no time.
        step_s: seconds of an inner step of one worker, in place of the measured ones. Workers that
            shared a process need it: they also shared its cores and its memory's bandwidth, so the
            records do not say how long one of them takes by itself.

    Raises:
        ConfigurationError: the folder is not that of a run, is incomplete or damaged, or lacks a
            number that is needed.
    """
    run = _read(Path(folder))
    method, shape = _method(run), _shape(run)
    job = Calibration(
        method=method,
        shape=shape,
        steps=run.summary.steps,
        tokens_per_step=run.config.tokens_per_step,
        traffic=planned_traffic(run, method, shape),
        added_nbytes=run.summary.added_nbytes or 0,
        compute=Compute(step_s=1.0 if step_s is None else step_s),
        measured=_measured(run),
    )
    if step_s is not None:
        return job
    _check_apart(run)
    spans = _spans(run)
    timed = _timed(job, spans)
    return timed if link is None else replace(timed, late_s=_late_s(timed, spans, link))


def _timed(job: Calibration, spans: Sequence[_Span]) -> Calibration:
    messages = job.traffic.messages
    per_exchange_s = _median_of(spans, lambda span: span.coding_s)
    parameters = sum(message.parameters for message in messages) / len(messages)
    step_s = median(span.inner_s / span.steps for span in spans)
    coding = Coding(outer_s_per_parameter=per_exchange_s / parameters)
    return replace(job, compute=Compute(step_s=step_s), coding=coding)


def _late_s(job: Calibration, spans: Sequence[_Span], link: Link) -> float:
    expected_s = sum(simulate(job.scenario(link), steps=job.steps).wait_s)
    exchanges = job.traffic.exchanges_after(job.steps)
    return max(0.0, _median_of(spans, lambda span: span.wait_s) - expected_s / exchanges)


def _median_of(spans: Sequence[_Span], seconds: Callable[[_Span], float]) -> float:
    """The median of the seconds per exchange; 0 without exchanges."""
    exchanging = [span for span in spans if span.exchanges]
    return median(seconds(s) / s.exchanges for s in exchanging) if exchanging else 0.0


def _read(folder: Path) -> FinishedRun:
    if not (folder / "config.json").is_file():
        raise _cannot_plan(folder, "it has no config.json of a run", _FINISHED_RUN)
    if not (folder / "summary.json").is_file():
        because = "it has no summary.json: the run is not finished"
        raise _cannot_plan(folder, because, "finish it with --resume")
    try:
        return read_finished(folder)
    except CheckpointError as error:
        do = f"restore the file, or {_FINISHED_RUN}"
        raise _cannot_plan(folder, error.because, do) from error


def _method(run: FinishedRun) -> Method:
    try:
        return Method.from_dict(run.config.described["method"])
    except ConfigurationError as error:
        do = "plan for a preset instead, with the step time of the run"
        raise _cannot_plan(run.folder, error.because, do) from error


def _shape(run: FinishedRun) -> Shape:
    folder = run.folder / "model"
    if not (folder / "config.json").is_file():
        because = "it has no model/config.json: another worker's folder has it"
        raise _cannot_plan(run.folder, because, "pass the folder of worker 0")
    shape, counted = resolve(str(folder)), run.summary.parameters
    if shape.parameters != counted:
        because = f"model/ has {shape.parameters} parameters and the run had {counted}"
        raise _cannot_plan(run.folder, because, "restore model/")
    return shape


def planned_traffic(run: FinishedRun, method: Method, shape: Shape) -> Traffic:
    """What each worker of `run` sends and receives, if the planner's bytes are those it counted.

    Workers that come and go also repeat rounds and heal: of them no bytes are expected.

    Args:
        run: that counted its bytes.
        method: of the run.
        shape: of its model.

    Raises:
        ConfigurationError: the planner makes it other bytes than the run counted, or cannot plan
            for its workers.
    """
    size, summary = run.config.worker_size, run.summary
    if size != 1:
        because = f"its workers have {size} ranks each, which divide what is sent"
        raise _cannot_plan(run.folder, because, "plan from a run with --worker-size 1")
    votes = int(summary.is_elastic)
    planned = traffic(
        method,
        shape,
        workers=summary.workers,
        votes=votes,
        added_nbytes=summary.added_nbytes or 0,
    )
    expected = planned.sent_after(summary.steps), planned.received_after(summary.steps)
    counted = summary.sent_bytes_per_worker, summary.received_bytes_per_worker
    if not summary.is_elastic and counted != expected:
        because = f"it counted {counted[0]} bytes sent and {counted[1]} received, and the planner "
        because += f"makes that {expected[0]} and {expected[1]}: workers came or went, or a file "
        because += "is of another run"
        raise _cannot_plan(run.folder, because, "pass a run of one number of workers")
    return planned


def _measured(run: FinishedRun) -> Measured:
    last = run.records[-1]
    return Measured(
        training_s=_known(run, last.training_s, "training_s"),
        inner_s=_known(run, last.inner_s, "inner_s"),
        wait_s=last.wait_s,
        sent_nbytes=run.summary.sent_bytes_per_worker,
        received_nbytes=run.summary.received_bytes_per_worker,
    )


def _check_apart(run: FinishedRun) -> None:
    here = _known(run, run.summary.workers_here, "workers_here", file="summary.json")
    if here != 1:
        raise _cannot_plan(
            run.folder,
            f"its {here} workers shared a process and its cores, so that no worker had a step "
            "time of its own",
            "give the step time of one worker, or pass a run under torchrun",
        )


def _spans(run: FinishedRun) -> list[_Span]:
    """Between all records but the first, before which everything is slow that is done once."""
    spans = [
        _Span(steps=d[0], exchanges=d[1], training_s=d[2], inner_s=d[3], wait_s=d[4])
        for before, after in pairwise(_counters(run, record) for record in run.records)
        if min(d := [now - then for then, now in zip(before, after, strict=True)]) >= 0
    ]
    if not spans:
        raise _cannot_plan(
            run.folder,
            f"metrics.jsonl has {len(run.records)} records, and the time of a step is taken from "
            "those after the first",
            "train with a smaller --log-steps, or give the step time",
        )
    return spans


def _counters(run: FinishedRun, record: RunRecord) -> list[float]:
    return [
        record.step,
        _known(run, record.rounds, "rounds"),
        _known(run, record.training_s, "training_s"),
        _known(run, record.inner_s, "inner_s"),
        record.wait_s,
    ]


def _known(
    run: FinishedRun, value: float | None, name: str, *, file: str = "metrics.jsonl"
) -> float:
    """`value`, if the run has it."""
    if value is None:
        because = f"{file} has no {name}, as those of older versions"
        raise _cannot_plan(run.folder, because, "train again for a few rounds")
    return value


def _cannot_plan(folder: Path, because: str, do: str) -> ConfigurationError:
    return ConfigurationError(f"plan from the run in {folder}", because=because, do=do)
