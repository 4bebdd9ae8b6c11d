"""From a run's folder to the same job over another link."""

import json
import math
import shutil
from collections.abc import Callable
from pathlib import Path

import pytest

import thinwire as tw
from plan_runs import corpus, simulated, tiny
from plan_scenarios import peak_sent_after
from run_folders import change
from thinwire.plan.calibration import calibrate
from thinwire.plan.link import Link
from thinwire.plan.simulate import simulate

__all__ = ["corpus", "simulated", "tiny"]

METHODS = ("diloco", "streaming_diloco:tau=2", "muloco:bits=2", "ddp")
NO_LIMIT = Link.of(math.inf)


@pytest.fixture
def timed(simulated, tmp_path) -> Callable[..., Path]:
    """A folder as of workers apart, whose records say what the test wants."""

    def make(*, step_s: float, coding_s: float, wait_s: float, text: str = "diloco") -> Path:
        folder = tmp_path / "timed"
        shutil.copytree(simulated(text), folder)
        change(folder / "summary.json", workers_here=1)
        last = json.loads((folder / "metrics.jsonl").read_text().splitlines()[-1])
        # In the first and in the third span something else was slow.
        slow = {1: (9.0, 5.0), 3: (7.0, 5.0)}
        total, lines = dict.fromkeys(("inner_s", "wait_s", "training_s"), 0.0), []
        for step in range(1, last["step"] + 1):
            inner_s, more_s = slow.get(step, (step_s, 0.0))
            total["inner_s"] += inner_s
            total["wait_s"] += wait_s + more_s
            total["training_s"] += inner_s + coding_s + wait_s + more_s
            lines.append(json.dumps(last | {"step": step, "rounds": step} | total))
        (folder / "metrics.jsonl").write_text("\n".join(lines) + "\n")
        return folder

    return make


@pytest.mark.parametrize("text", METHODS)
def test_bytes_method_and_model_are_those_of_the_run(simulated, tiny, text: str) -> None:
    job = calibrate(simulated(text), step_s=0.5)
    summary = json.loads((simulated(text) / "summary.json").read_text())
    assert job.traffic.sent_nbytes(13) == summary["sent_bytes_per_worker"] > 0
    assert job.traffic.received_nbytes(13) == summary["received_bytes_per_worker"] > 0
    assert peak_sent_after(job.traffic, 13) == summary["peak_sent_bytes_per_step"]
    assert job.method == tiny(text).method
    assert (job.job.workers, job.steps, job.job.tokens_per_step) == (2, 13, 32)
    assert job.job.shape.parameters == summary["parameters"]
    assert job.measured.sent_nbytes == summary["sent_bytes_per_worker"]


def test_seconds_are_medians_and_a_slower_link_is_slower_by_what_crosses_it(
    timed, simulated
) -> None:
    folder = timed(step_s=0.25, coding_s=0.5, wait_s=0.125)
    job = calibrate(folder)
    assert job.job.compute.step_s == pytest.approx(0.25, rel=1e-12)
    assert job.job.compute.outer_s_per_parameter * job.job.shape.parameters == pytest.approx(
        0.5, rel=1e-12
    )
    free = simulate(job.scenario(NO_LIMIT, late_s=0.125), steps=13)
    # Two whole rounds and what is left over.
    assert free.wall_s == pytest.approx(13 * 0.25 + 3 * (0.5 + 0.125), rel=1e-12)
    slow = simulate(job.scenario(Link.of(1e5, latency_s=0.3), late_s=0.125), steps=13)
    wire_nbytes = job.traffic.sent_nbytes(13) * (1500 + 26) / 1448
    more_s = 8 * wire_nbytes / 1e5 + 3 * 2 * 0.3
    assert slow.wall_s - free.wall_s == pytest.approx(more_s, rel=1e-12)
    assert slow.utilisation == pytest.approx(13 * 0.25 / slow.wall_s, rel=1e-12)
    # A step time that is given needs no records.
    job = calibrate(simulated("diloco"), step_s=0.75)
    assert (job.job.compute.step_s, job.job.compute.outer_s_per_parameter) == (0.75, 0)


def test_fragments_share_what_coding_takes(timed) -> None:
    folder = timed(step_s=0.25, coding_s=0.5, wait_s=0.0, text="streaming_diloco:tau=2")
    job = calibrate(folder)
    messages = job.traffic.messages
    assert len(messages) > 1
    outer_s = [job.job.compute.outer_s_per_parameter * m.parameters for m in messages]
    assert sum(outer_s) / len(messages) == pytest.approx(0.5, rel=1e-12)


def refused(folder: Path) -> str:
    with pytest.raises(tw.ConfigurationError) as caught:
        calibrate(folder)
    text = str(caught.value)
    assert "\n" not in text
    assert str(folder) in text
    return text


# Damage to one of its files is in tests/runs/test_schema.py.
@pytest.mark.parametrize(
    ("name", "fields", "reason"),
    [
        ("config.json", {"global_batch": "4"}, "$.global_batch"),
        ("config.json", {"data": {}}, "field `sequence_length`"),
        ("config.json", {"machine": {"worker_size": 2}}, "2 ranks each"),
        ("summary.json", {"workers_here": None}, "no workers_here, as those of older versions"),
        ("summary.json", {"steps": math.nan}, "NaN and Infinity are no JSON"),
        ("summary.json", {"parameters": 7}, "the run had 7"),
        ("summary.json", {"received_bytes_per_worker": 8}, "sent and 8 received"),
    ],
)
def test_contents_that_do_not_fit_are_refused(timed, name: str, fields, reason: str) -> None:
    folder = timed(step_s=1, coding_s=0, wait_s=0)
    change(folder / name, **fields)
    assert reason in refused(folder)


def test_records_of_older_versions_and_single_ones_are_refused(timed, simulated) -> None:
    assert "2 workers shared a process" in refused(simulated("diloco"))
    assert "config.json" in refused(simulated("diloco") / "nowhere")
    folder = timed(step_s=1, coding_s=0, wait_s=0)
    lines = (folder / "metrics.jsonl").read_text().splitlines()
    old = [{k: v for k, v in json.loads(line).items() if k != "inner_s"} for line in lines]
    for told, reason in (
        (lines[-1:], "has 1 records"),
        ([], "metrics.jsonl is empty"),
        (map(json.dumps, old), "no inner_s, as those of older versions"),
    ):
        (folder / "metrics.jsonl").write_text("".join(f"{line}\n" for line in told))
        assert reason in refused(folder)
    (folder / "metrics.jsonl").write_text("\n".join(lines))
    shutil.rmtree(folder / "model")
    assert "no model/config.json" in refused(folder)
