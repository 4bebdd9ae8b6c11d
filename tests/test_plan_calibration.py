"""From a run's folder to the same job over another link."""

import dataclasses
import json
import math
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

import thinwire as tw
from thinwire import codecs, presets
from thinwire.method import describe
from thinwire.plan.calibration import calibrate
from thinwire.plan.described import method_of
from thinwire.plan.link import Link
from thinwire.plan.simulate import simulate
from thinwire.plan.tcp import OverTcp
from thinwire.plan.topology import Mesh, Ring, Star
from thinwire.train import recipes
from thinwire.train.config import Machine, Periods, TrainConfig
from thinwire.train.data import Data
from thinwire.train.models import Model
from thinwire.train.trainer import train

METHODS = ("diloco", "streaming_diloco:tau=2", "muloco:bits=2", "sparseloco", "ddp")
NO_LIMIT = Link.of(math.inf)


@pytest.fixture(scope="session")
def make_config(tmp_path_factory) -> Callable[..., TrainConfig]:
    folder = tmp_path_factory.mktemp("inputs")
    (folder / "corpus").mkdir()
    (folder / "corpus" / "a.txt").write_text("thin wires carry little " * 400)
    model = {
        "model_type": "llama",
        "architectures": ["LlamaForCausalLM"],
        "vocab_size": 257,  # a prime, of which the tokenizer needs 256
        "hidden_size": 12,
        "num_hidden_layers": 3,
        "num_attention_heads": 2,
        "num_key_value_heads": 2,
        "intermediate_size": 31,
        "max_position_embeddings": 16,
        "tie_word_embeddings": True,
    }
    (folder / "config.json").write_text(json.dumps(model))

    def make(text: str, **changes: Any) -> TrainConfig:
        config = dataclasses.replace(
            recipes.laptop(text),
            model=Model(size=str(folder / "config.json")),
            data=Data(corpus=str(folder / "corpus"), sequence_length=8, validation_sequences=2),
            workers=2,
            steps=13,
            global_batch=4,
            periods=Periods(log_steps=3),
            machine=Machine(device="cpu", threads=1),
        )
        if text != "ddp":
            method = dataclasses.replace(config.method, sync_every=5)
            config = dataclasses.replace(config, method=method)
        return dataclasses.replace(config, **changes)

    return make


@pytest.fixture(scope="session")
def simulated(make_config, tmp_path_factory) -> Callable[[str], Path]:
    """The folder of a run of two workers in one process; nobody may write to it."""
    made: dict[str, Path] = {}

    def run(text: str) -> Path:
        if text not in made:
            made[text] = tmp_path_factory.mktemp("run") / "out"
            train(make_config(text), made[text])
        return made[text]

    return run


def change(folder: Path, name: str, **fields: Any) -> None:
    """Give fields of a JSON file other values; None takes them away."""
    held = json.loads((folder / name).read_text()) | fields
    kept = {key: value for key, value in held.items() if value is not None}
    (folder / name).write_text(json.dumps(kept))


@pytest.fixture
def timed(simulated, tmp_path) -> Callable[..., Path]:
    """A folder as of workers apart, whose records say what the test wants."""

    def make(
        *, step_s: float, coding_s: float, wait_s: float, text: str = "diloco", first_s: float = 9.0
    ) -> Path:
        folder = tmp_path / "timed"
        shutil.copytree(simulated(text), folder)
        change(folder, "summary.json", workers_here=1)
        # In the first and in the third span something else was slow.
        slow = {3: (first_s, 5.0), 9: (7.0, 5.0)}
        total, lines = dict.fromkeys(("rounds", "inner_s", "wait_s", "training_s"), 0.0), []
        for step in range(3, 31, 3):
            inner_s, more_s = slow.get(step, (3 * step_s, 0.0))
            total["rounds"] += 1
            total["inner_s"] += inner_s
            total["wait_s"] += wait_s + more_s
            total["training_s"] += inner_s + coding_s + wait_s + more_s
            lines.append(json.dumps({"step": step} | total))
        (folder / "metrics.jsonl").write_text("\n".join(lines) + "\n")
        return folder

    return make


# -- what is taken from a run ----------------------------------------------------------------------


@pytest.mark.parametrize("text", METHODS)
def test_bytes_method_and_model_are_those_of_the_run(simulated, make_config, text: str) -> None:
    job = calibrate(simulated(text), step_s=0.5)
    summary = json.loads((simulated(text) / "summary.json").read_text())
    assert job.traffic.sent_after(13) == summary["sent_bytes_per_worker"] > 0
    assert job.traffic.received_after(13) == summary["received_bytes_per_worker"] > 0
    assert job.traffic.peak_sent_after(13) == summary["peak_sent_bytes_per_step"]
    assert job.method == make_config(text).method
    assert (job.workers, job.steps, job.tokens_per_step) == (2, 13, 32)
    assert job.shape.parameters == summary["parameters"]
    outcome = simulate(job.scenario(Link.of(1e6)), steps=job.steps)
    assert outcome.sent_nbytes == job.measured.sent_nbytes == summary["sent_bytes_per_worker"]


def test_seconds_are_medians_after_the_first_record(timed) -> None:
    job = calibrate(timed(step_s=0.25, coding_s=0.5, wait_s=0.125), link=NO_LIMIT)
    assert job.compute.step_s == pytest.approx(0.25, rel=1e-12)
    assert job.coding.outer_s(job.shape.parameters) == pytest.approx(0.5, rel=1e-12)
    assert job.late_s == pytest.approx(0.125, rel=1e-12)


def test_without_its_link_nothing_is_known_of_lateness(timed) -> None:
    assert calibrate(timed(step_s=0.25, coding_s=0.5, wait_s=0.125)).late_s == 0


def test_what_the_link_explains_is_not_lateness(timed) -> None:
    folder = timed(step_s=0.25, coding_s=0.0, wait_s=0.5)
    job, link = calibrate(folder), Link.of(1e6, latency_s=0.1)
    crossing_s = job.scenario(link).crossing(0, share=1, workers=2).total_s
    assert 0 < crossing_s < 0.5
    assert calibrate(folder, link=link).late_s == pytest.approx(0.5 - crossing_s, rel=1e-12)
    assert calibrate(folder, link=Link.of(1.0)).late_s == 0


def test_fragments_share_what_coding_takes(timed) -> None:
    folder = timed(step_s=0.25, coding_s=0.5, wait_s=0.0, text="streaming_diloco:tau=2")
    job = calibrate(folder)
    messages = job.traffic.messages
    assert len(messages) > 1
    outer_s = [job.coding.outer_s(message.parameters) for message in messages]
    assert sum(outer_s) / len(messages) == pytest.approx(0.5, rel=1e-12)


def test_a_slower_link_is_slower_by_what_crosses_it(timed) -> None:
    job = calibrate(timed(step_s=0.25, coding_s=0.5, wait_s=0.125), link=NO_LIMIT)
    free = simulate(job.scenario(NO_LIMIT), steps=13)
    # Two whole rounds and what is left over.
    assert free.wall_s == pytest.approx(13 * 0.25 + 3 * (0.5 + 0.125), rel=1e-12)
    slow = simulate(job.scenario(Link.of(1e5, latency_s=0.3)), steps=13)
    wire_nbytes = job.traffic.sent_after(13) * (1500 + 26) / 1448
    more_s = 8 * wire_nbytes / 1e5 + 3 * 2 * 0.3
    assert slow.wall_s - free.wall_s == pytest.approx(more_s, rel=1e-12)
    assert slow.utilisation == pytest.approx(13 * 0.25 / slow.wall_s, rel=1e-12)


def test_a_step_time_given_needs_no_records(simulated) -> None:
    job = calibrate(simulated("diloco"), step_s=0.75)
    assert (job.compute.step_s, job.late_s, job.coding.outer_s(1)) == (0.75, 0, 0)


# -- folders that cannot be used -------------------------------------------------------------------


def refused(folder: Path) -> str:
    with pytest.raises(tw.ConfigurationError) as caught:
        calibrate(folder)
    text = str(caught.value)
    assert "\n" not in text
    assert str(folder) in text
    return text


def test_workers_of_one_process_have_no_step_time(simulated) -> None:
    assert "2 workers shared a process" in refused(simulated("diloco"))


@pytest.mark.parametrize("name", ["config.json", "metrics.jsonl", "summary.json"])
def test_incomplete_folders_are_refused(timed, name: str) -> None:
    folder = timed(step_s=1, coding_s=0, wait_s=0)
    (folder / name).unlink()
    assert name in refused(folder)
    assert "config.json" in refused(folder / "nowhere")


@pytest.mark.parametrize("name", ["config.json", "metrics.jsonl", "summary.json"])
@pytest.mark.parametrize("content", [b'{"step": 3', b"[1]", b"\xff\xfe"])
def test_damaged_files_are_refused(timed, name: str, content: bytes) -> None:
    folder = timed(step_s=1, coding_s=0, wait_s=0)
    (folder / name).write_bytes(content)
    assert name in refused(folder)


@pytest.mark.parametrize(
    ("name", "fields", "reason"),
    [
        ("config.json", {"kind": "Other"}, "not that of a run"),
        ("config.json", {"method": None}, "no method"),
        ("config.json", {"method": 3}, "damaged"),
        ("config.json", {"global_batch": "4"}, "damaged"),
        ("config.json", {"data": {}}, "data.sequence_length"),
        ("config.json", {"machine": {"worker_size": 2}}, "2 ranks each"),
        ("summary.json", {"workers_here": None}, "no workers_here, as those of older versions"),
        ("summary.json", {"steps": math.nan}, "steps=nan"),
        ("summary.json", {"parameters": 7}, "the run had 7"),
        ("summary.json", {"sent_bytes_per_worker": 8}, "it counted 8 "),
        ("summary.json", {"workers": 3}, "it counted"),
    ],
)
def test_contents_that_do_not_fit_are_refused(
    timed, name: str, fields: dict[str, Any], reason: str
) -> None:
    folder = timed(step_s=1, coding_s=0, wait_s=0)
    change(folder, name, **fields)
    assert reason in refused(folder)


def test_records_of_older_versions_and_single_ones_are_refused(timed) -> None:
    folder = timed(step_s=1, coding_s=0, wait_s=0)
    lines = (folder / "metrics.jsonl").read_text().splitlines()
    (folder / "metrics.jsonl").write_text(lines[0] + "\n")
    assert "has 1 records" in refused(folder)
    (folder / "metrics.jsonl").write_text("")
    assert "no training_s" in refused(folder)
    old = [{k: v for k, v in json.loads(line).items() if k != "inner_s"} for line in lines]
    (folder / "metrics.jsonl").write_text("\n".join(map(json.dumps, old)) + "\n")
    assert "no inner_s, as those of older versions" in refused(folder)


def test_without_a_model_nothing_is_known_of_sizes(timed) -> None:
    folder = timed(step_s=1, coding_s=0, wait_s=0)
    shutil.rmtree(folder / "model")
    assert "no model/config.json" in refused(folder)


def test_votes_of_elastic_runs_are_planned_and_not_compared(timed) -> None:
    folder = timed(step_s=1, coding_s=0, wait_s=0)
    change(folder, "summary.json", events={}, sent_bytes_per_worker=8)
    assert all(message.vote_nbytes > 0 for message in calibrate(folder).traffic.messages)


# -- methods from their descriptions ---------------------------------------------------------------


def test_every_preset_is_found_again_in_its_description() -> None:
    for name in presets.names():
        method = presets.from_text(name)
        assert method_of(json.loads(json.dumps(describe(method)))) == method, name
    for text in ("muloco:bits=2", "streaming_muloco", "sparse_muloco", "streaming_diloco:tau=2"):
        method = recipes.laptop(text).method
        assert method_of(json.loads(json.dumps(describe(method)))) == method, text


@pytest.mark.parametrize(
    ("slot", "value", "reason"),
    [
        ("codec", {"kind": "Mine"}, "Mine is no part of this package"),
        ("codec", {"kind": "from_id"}, "from_id is no part"),
        ("codec", {"kind": "register", "codec": 1}, "register is no part"),
        ("inner", {"kind": "ByWorkerCount", "table": []}, "ByWorkerCount is no part"),
        ("codec", {"kind": "CastBF16", "more": 1}, "another version"),
        ("codec", {"kind": "Codec"}, "Codec is no part"),
        ("codec", 3, "another version"),
        ("sync_every", 0, "another version"),
        ("merge", 1, "another version"),
        ("overlap", {"kind": "Delay", "tau": 0}, "overlap.mixing differs"),
    ],
)
def test_descriptions_that_are_not_ours_are_refused(slot: str, value: Any, reason: str) -> None:
    with pytest.raises(tw.ConfigurationError, match=reason):
        method_of(describe(presets.diloco(codec=codecs.CastBF16())) | {slot: value})


# -- what TCP adds ---------------------------------------------------------------------------------


def test_packets_and_announcements_come_on_top_by_hand() -> None:
    link, tcp = Link.of(8 * 1526, latency_s=0.5), OverTcp(late_s=0.25)
    # Two packets of 1448 bytes, each way: a second each, and their receiver is ready after 0.5 s.
    crossing = tcp.gather(1448, 3, link)
    assert crossing.total_s == 2 * 1 + 2 * 0.5 + 0.5 + 0.25
    assert crossing.held_s == 2 * 1 + 0.5
    assert tcp.swap(1448, 7, link).total_s == 1 + 0.5 + 0.5 + 0.25
    assert tcp.scatter(1448, 3, link).total_s == 2 * 1 + 0.5 + 0.5 + 0.25
    star = OverTcp(over=Star()).gather(1448, 3, link)
    assert star.total_s == 1 + 2 + 2 * 0.5 + 0.5


def test_large_packets_are_those_of_the_bare_link() -> None:
    link = Link.of(1e6)
    for topology in (Ring(), Mesh()):
        bare = topology.gather(10**6, 4, link).total_s
        large = OverTcp(over=topology, packet_nbytes=10**12).gather(10**6, 4, link).total_s
        assert large == pytest.approx(bare, rel=1e-9)
        assert OverTcp(over=topology).gather(10**6, 4, link).total_s > 1.05 * bare


@pytest.mark.parametrize("fields", [{"packet_nbytes": 52}, {"late_s": -1.0}, {"late_s": math.nan}])
def test_packets_without_room_are_refused(fields: dict[str, Any]) -> None:
    with pytest.raises(tw.ConfigurationError, match="headers take 52 bytes"):
        OverTcp(**fields)
