"""Calibration: from the folder of a run to the same job over another link."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from statistics import median
from typing import final

from thinwire.errors import ConfigurationError
from thinwire.method import Method
from thinwire.plan.compute import Coding, Compute
from thinwire.plan.described import method_of
from thinwire.plan.link import Link
from thinwire.plan.records import Records, Span, cannot_plan, read_records
from thinwire.plan.resolve import resolve
from thinwire.plan.scenario import Scenario
from thinwire.plan.shape import Shape
from thinwire.plan.simulate import simulate
from thinwire.plan.tcp import OverTcp
from thinwire.plan.topology import Ring, Topology
from thinwire.plan.traffic import Traffic, traffic

__all__ = ["Calibration", "Measured", "calibrate"]


@final
@dataclass(frozen=True, kw_only=True, slots=True)
class Measured:
    """What a run found, in the words of a prediction.

    Args:
        training_s: that worker 0 trained and exchanged, without start, evaluation and saving.
        inner_s: of them in inner steps; of all workers where they share a process.
        wait_s: of them standing still for exchanges.
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


@final
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
        coding: everything else but waiting.
        late_s: by which an answer comes later than any link explains.
        measured: what the run found.
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

    @property
    def workers(self) -> int:
        """K."""
        return self.traffic.workers

    def scenario(self, link: Link, *, topology: Topology | None = None) -> Scenario:
        """The job over `link`.

        Args:
            link: of every worker.
            topology: who sends to whom; default as `Distributed` does it over gloo.
        """
        over = OverTcp(over=Ring() if topology is None else topology, late_s=self.late_s)
        return Scenario(
            freight=self.traffic,
            compute=self.compute,
            coding=self.coding,
            link=link,
            topology=over,
        )


def calibrate(
    folder: Path | str, *, link: Link | None = None, step_s: float | None = None
) -> Calibration:
    """What the run in `folder` says of its job.

        step   = median (inner seconds / steps)              between records after the first
        coding = median (training - inner - wait) / exchanges
        late   = median (wait / exchanges) - what the simulation waits over `link`, at least 0

    Args:
        folder: of a finished run.
        link: over which it ran, if that is known: what waits took longer is then taken for the
            workers' own lateness, and expected on every link. Pass one of infinite rate where
            messages took no time.
        step_s: of an inner step of one worker, in place of the measured one. Workers that shared a
            process need it: they also shared its cores and its memory's bandwidth, so that nobody
            knows how long one of them takes by itself.

    Raises:
        ConfigurationError: the folder is not that of a run, is incomplete or damaged, or says too
            little; one line says which.
    """
    records = read_records(Path(folder))
    method, shape = _method(records), _shape(records)
    sends = _traffic(records, method, shape)
    job = Calibration(
        method=method,
        shape=shape,
        steps=records.counted("steps"),
        tokens_per_step=_tokens_per_step(records),
        traffic=sends,
        compute=Compute(step_s=1.0 if step_s is None else step_s),
        measured=_measured(records),
    )
    if step_s is not None:
        return job
    _check_apart(records)
    timed = _timed(job, records.spans())
    return timed if link is None else replace(timed, late_s=_late_s(timed, records.spans(), link))


def _timed(job: Calibration, spans: Sequence[Span]) -> Calibration:
    messages = job.traffic.messages
    per_exchange_s = _median_of(spans, lambda span: span.coding_s)
    parameters = sum(message.parameters for message in messages) / len(messages)
    step_s = median(span.inner_s / span.steps for span in spans)
    coding = Coding(outer_s_per_parameter=per_exchange_s / parameters)
    return replace(job, compute=Compute(step_s=step_s), coding=coding)


def _late_s(job: Calibration, spans: Sequence[Span], link: Link) -> float:
    expected_s = sum(simulate(job.scenario(link), steps=job.steps).wait_s)
    exchanges = job.traffic.exchanges_after(job.steps)
    return max(0.0, _median_of(spans, lambda span: span.wait_s) - expected_s / exchanges)


def _median_of(spans: Sequence[Span], seconds: Callable[[Span], float]) -> float:
    """Of the seconds of an exchange; 0 if there was none."""
    exchanging = [span for span in spans if span.exchanges]
    return median(seconds(s) / s.exchanges for s in exchanging) if exchanging else 0.0


def _method(records: Records) -> Method:
    description = records.configured("method")
    if not isinstance(description, Mapping):
        raise cannot_plan(records.folder, "config.json is damaged: method", "restore the file")
    try:
        return method_of(description)
    except ConfigurationError as error:
        raise cannot_plan(records.folder, error.because, error.do) from error


def _shape(records: Records) -> Shape:
    folder = records.folder / "model"
    if not (folder / "config.json").is_file():
        because = "it has no model/config.json: another worker's folder has it"
        raise cannot_plan(records.folder, because, "pass the folder of worker 0")
    shape, counted = resolve(str(folder)), records.counted("parameters")
    if shape.parameters != counted:
        because = f"model/ has {shape.parameters} parameters and the run had {counted}"
        raise cannot_plan(records.folder, because, "restore model/")
    return shape


def _traffic(records: Records, method: Method, shape: Shape) -> Traffic:
    size = records.config.get("machine", {}).get("worker_size", 1)
    if size != 1:
        because = f"its workers have {size} ranks each, which divide what is sent"
        raise cannot_plan(records.folder, because, "plan from a run with --worker-size 1")
    elastic = "events" in records.summary
    workers, steps = records.counted("workers"), records.counted("steps")
    planned = traffic(method, shape, workers=workers, votes=int(elastic))
    sent, received = planned.sent_after(steps), planned.received_after(steps)
    counted = records.counted("sent_bytes_per_worker"), records.counted("received_bytes_per_worker")
    # Workers that come and go also repeat rounds and heal.
    if not elastic and counted != (sent, received):
        because = f"it counted {counted[0]} and {counted[1]} bytes sent and received, and its "
        because += f"method makes {sent} and {received}: workers came or went, or a file is foreign"
        raise cannot_plan(records.folder, because, "pass a run of one number of workers")
    return planned


def _tokens_per_step(records: Records) -> int:
    sequences, length = (
        records.configured("global_batch"),
        records.configured("data", "sequence_length"),
    )
    if not (isinstance(sequences, int) and isinstance(length, int) and sequences * length > 0):
        raise cannot_plan(records.folder, "config.json is damaged: its batch", "restore the file")
    return sequences * length


def _measured(records: Records) -> Measured:
    return Measured(
        training_s=records.last("training_s"),
        inner_s=records.last("inner_s"),
        wait_s=records.last("wait_s"),
        sent_nbytes=records.counted("sent_bytes_per_worker"),
        received_nbytes=records.counted("received_bytes_per_worker"),
    )


def _check_apart(records: Records) -> None:
    here = records.counted("workers_here")
    if here != 1:
        raise cannot_plan(
            records.folder,
            f"its {here} workers shared a process and its cores, so that none had a step time of "
            "its own",
            "give the step time of one worker, or pass a run under torchrun",
        )
