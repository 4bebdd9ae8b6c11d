import dataclasses
import hashlib
import json
import os
import pickle
import random
import re
import shutil
import subprocess
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
import torch
from transformers import AutoModelForCausalLM

import thinwire as tw
from forked import Forked
from processes import free_port, rank_environment
from thinwire.exchange.message import HEADER_NBYTES
from thinwire.fragments.layout import Layout, wire_order
from thinwire.plan.calibration import calibrate
from thinwire.train import recipes
from thinwire.train.config import Intervals, Runtime, TrainConfig
from thinwire.train.data import Data
from thinwire.train.models import Model
from thinwire.train.trainer import resume, train
from training import kill_when, records, run_ranked, script, start_ranked, stop_after

SUMMARY_FIELDS = (
    "method workers workers_here parameters steps tokens val_loss sent_bytes_per_worker "
    "received_bytes_per_worker peak_sent_bytes_per_step outer_digest wall_s tokens_per_s wait_s "
    "versions"
)
CONSENSUS_FIELDS = "consensus_sent_bytes consensus_received_bytes"


def message_nbytes(config: TrainConfig, out: Path) -> int:
    model = AutoModelForCausalLM.from_pretrained(out / "model")
    shapes = {name: tuple(p.shape) for name, p in model.named_parameters()}
    layout = Layout.of({name: shapes[name] for name in wire_order(shapes)})
    return HEADER_NBYTES + config.method.codec.bind(layout).nbytes


@pytest.mark.slow_cases("decoupled", "demo", "muloco", "sparseloco", "streaming_diloco")
@pytest.mark.parametrize("method", tw.presets.names())
def test_a_run_leaves_config_metrics_summary_and_a_model_that_loads(tiny, tmp_path, method) -> None:
    out = tmp_path / "run"
    summary = train(tiny(method), out)
    consensus = CONSENSUS_FIELDS if tiny(method).method.outer.has_own_anchors else ""
    assert summary.keys() == {*SUMMARY_FIELDS.split(), *consensus.split()}
    assert json.loads((out / "summary.json").read_text()) == summary
    assert [r["step"] for r in records(out)] == [3, 6, 9, 12]
    assert [r["step"] for r in records(out) if "val_loss" in r] == [6, 12]
    assert summary["tokens"] == 12 * 4 * 16
    assert summary["workers_here"] == 2
    assert all(0 < r["inner_s"] < r["training_s"] < r["wall_s"] for r in records(out))
    averages_gradients = method in ("ddp", "demo")
    rounds = 12 if averages_gradients else 3  # two whole rounds and the rest
    if "streaming" not in method:
        assert summary["sent_bytes_per_worker"] == rounds * message_nbytes(tiny(method), out)
    evaluated = records(out)[-1]
    assert evaluated["anchor_bytes"] == (0 if averages_gradients else 4 * summary["parameters"])
    assert bool(evaluated["feedback_bytes"]) == (tiny(method).method.feedback != tw.NoFeedback())
    model = AutoModelForCausalLM.from_pretrained(out / "model")
    assert tw.digest(dict(model.named_parameters())) == summary["outer_digest"]
    assert list((out / "model").glob("*.safetensors"))


def test_golden_metrics_of_the_first_steps(tiny, tmp_path) -> None:
    """Guards data order, initial weights, loss and optimizer against silent change."""
    train(tiny("diloco", steps=2, periods=Intervals(log_steps=1)), tmp_path / "run")
    first, second = records(tmp_path / "run")
    assert first["loss"] == pytest.approx(5.53310, abs=2e-4)
    assert second["loss"] == pytest.approx(5.54201, abs=2e-4)
    assert first["lr"] == pytest.approx(4e-3 * 2 / 20)


def test_a_run_notes_who_was_clipped_how_often(tiny, tmp_path) -> None:
    # One of two workers has no window to validate on.
    data = dataclasses.replace(tiny().data, validation_sequences=1)
    summary = train(tiny("diloco:clip_norms=1", data=data), tmp_path / "run")
    last = records(tmp_path / "run")[-1]
    assert last["val_loss"] == summary["val_loss"] < 6
    counts = summary["contributions"]
    # Of two workers the longer one is scaled down in every round.
    assert sum(found["clipped"] for found in counts.values()) == last["clipped"] == last["rounds"]
    assert counts.keys() <= {"worker 0", "worker 1"}
    assert "contributions" not in train(tiny("diloco:clip_norms=1000"), tmp_path / "free")
    assert records(tmp_path / "free")[-1]["clipped"] == 0


def test_equal_seeds_give_equal_digests_and_accumulation_and_bf16_change_the_rounding(
    tiny, tmp_path
) -> None:
    half = Runtime(device="cpu", threads=1, precision="bf16")
    changes = [{}, {}, {"seed": 1}, {"accumulate": 2}, {"machine": half}]
    runs = [train(tiny(**given), tmp_path / str(n)) for n, given in enumerate(changes)]
    same, again, *others = (run["outer_digest"] for run in runs)
    assert same == again
    assert len({same, *others}) == 4
    losses = [run["val_loss"] for run in runs]
    assert losses[3] == pytest.approx(losses[0], abs=1e-5)
    assert losses[4] == pytest.approx(losses[0], rel=0.02)


DROPOUT = {
    **{"model_type": "gpt2", "vocab_size": 256, "n_embd": 16, "n_layer": 1, "n_head": 2},
    **{"n_positions": 64, "resid_pdrop": 0.2, "embd_pdrop": 0.2},
}


@pytest.mark.slow_cases("muloco", "noloco", "streaming", "dropout")
@pytest.mark.parametrize("case", ["sealed", "muloco", "noloco", "streaming_diloco", "dropout"])
def test_torchrun_reaches_the_digest_of_one_process(tiny, tmp_path, monkeypatch, case: str) -> None:
    """Also where numbers are drawn in every step, and where a token seals what ranks send."""
    (file := tmp_path / "dropout.json").write_text(json.dumps(DROPOUT))
    workers = 3 if case == "noloco" else 2
    method = "diloco" if case in ("sealed", "dropout") else case
    size = Model(size=str(file)) if case == "dropout" else Model()
    config = tiny(method, model=size, workers=workers, steps=11, global_batch=4 * workers)
    simulated, out = train(config, tmp_path / "simulated"), tmp_path / "ranked"
    monkeypatch.setenv("THINWIRE_TOKEN", "a secret of many characters" if case == "sealed" else "")
    ranked = run_ranked(config, out)
    assert simulated["outer_digest"] == ranked["outer_digest"]
    assert simulated["val_loss"] == ranked["val_loss"]
    more, added = 0, ranked.get("added_bytes_per_message")
    if case == "sealed":  # and so is what it is planned for again
        found = calibrate(out, step_s=1)
        assert added == found.job.added_nbytes == 28
        more = 28 * found.traffic.puts(config.steps)
    assert bool(more) == bool(added)
    assert ranked["sent_bytes_per_worker"] == simulated["sent_bytes_per_worker"] + more


@pytest.mark.slow
def test_nothing_of_the_process_group_outlives_a_run(tiny, tmp_path) -> None:
    """A gloo thread that is still there when the interpreter ends can abort the process."""
    command = script(tiny("diloco"), tmp_path / "run")
    with Path(command[1]).open("a") as file:
        file.write(
            "from pathlib import Path\n"
            "names = [(t / 'comm').read_text() for t in Path('/proc/self/task').iterdir()]\n"
            "assert not [n for n in names if 'gloo' in n], names\n"
        )
    port = free_port()
    processes = [
        subprocess.Popen(command, env=rank_environment(rank, 2, port)) for rank in range(2)
    ]
    assert [process.wait(timeout=120) for process in processes] == [0, 0]


@pytest.mark.slow_cases("1", "2", "3")
@pytest.mark.parametrize("seed", range(4))
def test_a_run_killed_at_any_moment_and_resumed_ends_as_if_it_had_not_been(
    tiny, tmp_path, seed: int
) -> None:
    method = ("diloco", "muloco", "streaming_diloco:tau=3", "noloco")[seed]
    config = tiny(method, workers=4 if method == "noloco" else 2, steps=60, global_batch=8)
    undisturbed = train(config, tmp_path / "undisturbed")
    out, draw = tmp_path / "killed", random.Random(seed)
    log = out / "metrics.jsonl"
    for lines in (draw.randrange(2, 5), draw.randrange(7, 13)):
        process = Forked(script(config, out)[1:], dict(os.environ))
        kill_when(process, lambda n=lines: log.exists() and log.read_text().count("\n") > n)
    assert list((out / "checkpoints").glob("*.json"))
    assert not (out / "summary.json").exists()
    resumed = resume(config, out)
    for field in ("outer_digest", "sent_bytes_per_worker"):
        assert resumed[field] == undisturbed[field]
    found, wanted = records(out), records(tmp_path / "undisturbed")
    assert [(r["step"], r["loss"]) for r in found] == [(r["step"], r["loss"]) for r in wanted]
    inner_s = [r["inner_s"] for r in found]
    assert inner_s == sorted(inner_s), "seconds before the kill are forgotten"


@pytest.mark.skipif(not Path("/proc/self/maps").exists(), reason="needs Linux")
@pytest.mark.slow_cases("sparseloco")
@pytest.mark.parametrize(("method", "inner"), [("muloco", 4), ("sparseloco", 8)])
def test_a_resume_holds_no_second_copy(
    tiny, tmp_path, monkeypatch, method: str, inner: float
) -> None:
    config = tiny(method, workers=1, global_batch=1)
    file, out = Path(config.model.size), tmp_path / "run"
    wide = {"hidden_size": 256, "intermediate_size": 1024, "num_hidden_layers": 3}
    file.write_text(json.dumps(json.loads(file.read_text()) | wide))
    stop_after(config, out, monkeypatch, 4)
    pickled = tmp_path / "config.pickle"
    pickled.write_bytes(pickle.dumps(config))
    helper = str(Path(__file__).parents[1] / "resumed_memory.py")
    process = Forked([helper, str(pickled), str(out)], dict(os.environ))
    printed, error = process.communicate(timeout=60)
    assert process.returncode == 0, error
    found = json.loads(printed)
    assert found["step"] == 4
    assert not found["mapped"], "the file would stay on the disk for as long"
    assert found["extra"] < 0.5, found
    # What an inner optimizer has is there from its first step on.
    assert found["kept"] < inner + 0.5, found


@pytest.mark.slow_cases("noloco", "streaming")
@pytest.mark.parametrize("method", ["diloco", "streaming_diloco:tau=3", "noloco"])
def test_a_killed_rank_ends_the_others_and_all_resume(tiny, tmp_path, method: str) -> None:
    config = tiny(method, steps=120, global_batch=8)
    undisturbed = train(config, tmp_path / "undisturbed")
    out = tmp_path / "killed"
    processes = start_ranked(config, out, "resume")
    kill_when(processes[1], (out / "checkpoints" / "step-00000012.worker-1.json").exists)
    _, error = processes[0].communicate(timeout=60)
    processes[1].communicate()
    assert processes[0].returncode not in (0, None)
    assert "ExchangeError: cannot exchange" in error
    assert run_ranked(config, out, "resume")["outer_digest"] == undisturbed["outer_digest"]


def test_the_last_n_checkpoints_stay_and_stray_files_and_damaged_lines_stop_nothing(
    tiny, tmp_path, monkeypatch
) -> None:
    out = tmp_path / "run"
    config = tiny(periods=Intervals(log_steps=3, checkpoint_steps=2, keep_checkpoints=2))
    stop_after(config, out, monkeypatch, 9)
    stems = [f"step-{step:08}.worker-{worker}" for step in (6, 8) for worker in (0, 1)]
    names = sorted(p.name for p in (out / "checkpoints").iterdir())
    assert names == [f"{stem}.{end}" for stem in stems for end in ("json", "pt")]
    stems = ["9 (copy).worker-0.json", "9.worker-one.json", "9.worker-0.pt.json", "99.worker-7.tmp"]
    stray = (*(f"step-0000000{stem}" for stem in stems), "step-x.worker-0.json", "notes.txt")
    for name in stray:
        (out / "checkpoints" / name).write_text("{}")
    with (out / "metrics.jsonl").open("ab") as file:
        file.write(b'\xff\xfe{"step": 3}\n{"step": "3"}\n{"step": true}\n[3]\n')
        file.write(b'{"loss": 1}\nnot json\n{"step": 10, "lo')
    assert resume(config, out)["steps"] == 12
    assert {(out / "checkpoints" / name).read_text() for name in stray} == {"{}"}
    assert [r["step"] for r in records(out)] == [3, 6, 9, 12]


def seal(state: object) -> Callable[[Path], object]:
    """Put `state`, or bytes, into a checkpoint, and let its seal say that this is right."""

    def write(file: Path) -> None:
        if isinstance(state, bytes):
            file.write_bytes(state)
        else:
            torch.save(state, file)
        content = file.read_bytes()
        told(bytes=len(content), sha256=hashlib.sha256(content).hexdigest())(file)

    return write


def told(**facts: object) -> Callable[[Path], object]:
    """Facts in the seal of a checkpoint."""

    def write(file: Path) -> None:
        seal = file.with_suffix(".json")
        seal.write_text(json.dumps(json.loads(seal.read_text()) | facts))

    return write


def without_model(file: Path) -> None:
    state = torch.load(file)
    del state["worker"]["model"]
    seal(state)(file)


def flip(file: Path) -> None:
    content = bytearray(file.read_bytes())
    content[len(content) // 2] ^= 1
    file.write_bytes(content)


NO_CHECKPOINTS = [
    *(
        (seal(state), "")
        for state in (b"none", pickle.dumps(object), 3, {}, {"run": 3}, {"run": {"config": 3}})
    ),
    (without_model, "'model'"),
    *(
        (lambda f, t=text: f.with_suffix(".json").write_text(t, encoding="latin-1"), "")
        for text in ("[]", "null", "\xff", "{", '{"ranks": 2}')
    ),
    *((told(ranks=ranks), "ranks") for ranks in (-1, True, "2", None)),
    (lambda f: f.write_bytes(f.read_bytes()[:-7]), ""),
    (flip, ""),
]


def test_a_checkpoint_or_seal_that_is_none_is_named(tiny, tmp_path, monkeypatch) -> None:
    out, name = tmp_path / "run", "step-00000008.worker-0.pt"
    stop_after(tiny(), out, monkeypatch, 9)
    for case, (spoil, words) in enumerate(NO_CHECKPOINTS):
        copy = shutil.copytree(out, tmp_path / str(case))
        spoil(copy / "checkpoints" / name)
        before = {p: p.read_bytes() for p in copy.rglob("*") if p.is_file()}
        with pytest.raises(tw.CheckpointError, match=rf"{re.escape(name)}.*{words}.*one before"):
            resume(tiny(), copy)
        assert {p: p.read_bytes() for p in copy.rglob("*") if p.is_file()} == before
    (copy / "checkpoints" / name).with_suffix(".json").unlink()
    assert resume(tiny(), copy)["outer_digest"] == train(tiny(), tmp_path / "b")["outer_digest"]


def test_a_file_that_is_none_of_a_run_or_missing_is_named(tiny, tmp_path, monkeypatch) -> None:
    stop_after(tiny(), tmp_path / "run", monkeypatch, 5)
    for name in ("config.json", "summary.json"):
        out = shutil.copytree(tmp_path / "run", tmp_path / name.removesuffix(".json"))
        no_config = '{"workers": "two"}', '{"kind": "TrainConfig", "workers": 2}'
        for text in ("[]", "3", "{}", *no_config):
            (out / name).write_text(text)
            with pytest.raises(tw.CheckpointError, match=name):
                resume(tiny(), out)
    # Checkpoints without their run are not taken for another one's.
    (out / "summary.json").unlink()
    (out / "config.json").unlink()
    with pytest.raises(tw.ConfigurationError, match="holds a run already"):
        train(tiny(), out)
    with pytest.raises(tw.CheckpointError, match=r"config\.json"):
        resume(tiny(), out)


def test_resuming_with_another_configuration_is_refused_by_field(
    tiny, tmp_path, monkeypatch, corpus
) -> None:
    mine, out = shutil.copytree(corpus, tmp_path / "mine"), tmp_path / "run"
    config = tiny(data=Data(corpus=str(mine), sequence_length=16, validation_sequences=6))
    stop_after(config, out, monkeypatch, 5)
    for changes, field in (
        ({"seed": 5}, "seed"),
        ({"steps": 13}, "steps"),
        ({"method": recipes.laptop("muloco").method}, "method.inner.kind"),
        ({"model": Model()}, "model.size"),
    ):
        with pytest.raises(tw.MismatchError, match=field):
            resume(dataclasses.replace(config, **changes), out)
    file = Path(config.model.size)
    said = json.loads(file.read_text())
    for change, field in (
        ({"rope_theta": 500_000.0}, r"rope_parameters\.rope_theta"),
        ({"hidden_act": "gelu"}, "hidden_act"),
        ({"num_attention_heads": 4, "num_key_value_heads": 4}, ""),
    ):
        file.write_text(json.dumps(said | change))
        with pytest.raises(tw.MismatchError, match=rf"model\.configuration\.{field}"):
            resume(dataclasses.replace(config, model=Model(size=str(file))), out)
    file.write_text(json.dumps(said, indent=4, sort_keys=True))
    stop_after(dataclasses.replace(config, model=Model(size=str(file))), out, monkeypatch, 6)
    # A run that did not note its model's configuration.
    described = json.loads((out / "config.json").read_text())
    del described["model"]["configuration"]
    (out / "config.json").write_text(json.dumps(described))
    stop_after(config, out, monkeypatch, 9)
    (mine / "03.txt").write_text("other words " * 90)
    with pytest.raises(tw.MismatchError, match="corpus"):
        resume(config, out)


def test_a_start_that_fails_leaves_no_folder_and_a_run_or_a_file_is_not_overwritten(
    tiny, tmp_path
) -> None:
    out, file = tmp_path / "run", tmp_path / "file"
    with pytest.raises(tw.CorpusError):
        train(tiny(data=Data(corpus="no-such-corpus")), out)
    assert not out.exists()
    summary = train(tiny(), out)
    with pytest.raises(tw.ConfigurationError, match="holds a run already"):
        train(tiny(), out)
    assert resume(tiny(), out) == summary
    file.write_text("mine")
    for place in (file, file / "run"):
        with pytest.raises(tw.ConfigurationError, match="pass another --out"):
            train(tiny(), place)
    assert file.read_text() == "mine"


def test_a_diverging_run_stops_with_parameter_and_step_and_keeps_its_checkpoint(
    tiny, tmp_path
) -> None:
    # At 1e9 some processors' matrix products still come out finite.
    inner = tw.inner.SGD(lr=1e18)
    method = dataclasses.replace(recipes.laptop("diloco").method, inner=inner)
    periods = Intervals(checkpoint_steps=1)
    out = tmp_path / "run"
    with pytest.raises(tw.NonFiniteError, match=r"step \d+") as caught:
        train(tiny(method=method, clip_norm=0.0, periods=periods, steps=50), out)
    assert "model." in str(caught.value)
    assert list((out / "checkpoints").glob("*.json"))
    assert not (out / "summary.json").exists()
    for file in (out / "checkpoints").glob("*.pt"):
        weights = torch.load(file, weights_only=True)["worker"]["model"]
        assert all(bool(torch.isfinite(w).all()) for w in weights.values())


def test_weights_that_are_not_finite_at_the_end_are_no_result(tiny, tmp_path, monkeypatch) -> None:
    """The last step of ddp may spoil the weights after the last loss was fine."""
    from thinwire.train.trainer import _Trainer

    original = _Trainer._one_step

    def spoil_last(self):
        losses = original(self)
        for worker in self._group.workers if self._group.step == 12 else ():
            next(worker.model.parameters()).data.fill_(float("nan"))
        return losses

    monkeypatch.setattr(_Trainer, "_one_step", spoil_last)
    with pytest.raises(tw.NonFiniteError, match="validation loss"):
        train(tiny("ddp"), tmp_path / "run")
    assert not (tmp_path / "run" / "summary.json").exists()
    assert not (tmp_path / "run" / "model").exists()


@pytest.mark.slow
def test_ranks_that_were_given_other_arguments_do_not_start(tiny, tmp_path) -> None:
    fewer = Runtime(device="cpu", threads=2)  # hosts may have other numbers of cores
    configs = [tiny(steps=12), tiny(steps=14, machine=fewer)]
    port, processes = free_port(), []
    for rank, config in enumerate(configs):
        command = script(config, tmp_path / f"run{rank}", begin="train")[1:]
        processes.append(Forked(command, rank_environment(rank, 2, port)))
    for process in processes:
        _, error = process.communicate(timeout=60)
        assert process.returncode == 1
        assert "workers 0 and 1 differ in steps" in error
        assert "worker 0 has 12 and worker 1 has 14" in error


def test_a_token_outside_the_vocabulary_is_named(tiny, tmp_path) -> None:
    tokens = np.arange(4000, dtype=np.uint16) % 200
    tokens[2000:2600] = 300
    (tmp_path / "train.bin").write_bytes(tokens.tobytes())
    (tmp_path / "val.bin").write_bytes(tokens[:500].tobytes())
    sizes = {"sequence_length": 16, "validation_sequences": 6}
    data = Data(corpus=str(tmp_path), tokenizer="ids:256", **sizes)
    with pytest.raises(tw.CorpusError, match="token 300 and the vocabulary has 256"):
        train(tiny(data=data, steps=100), tmp_path / "run")


NO_GPU = pytest.mark.skipif(torch.cuda.is_available(), reason="there is a GPU")


@pytest.mark.parametrize(
    ("changes", "match"),
    [
        ({"workers": 3}, r"global batch of 4.*3 workers"),
        *(({f: 0}, f"{f} to 0") for f in ("workers", "steps", "global_batch", "accumulate")),
        pytest.param({"machine": Runtime(device="cuda")}, "device 'cuda'", marks=NO_GPU),
    ],
)
def test_what_cannot_be_trained_is_refused_at_the_start(tiny, tmp_path, changes, match) -> None:
    with pytest.raises(tw.ConfigurationError, match=match):
        train(tiny(**changes), tmp_path / "run")
    assert not (tmp_path / "run").exists()


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
@pytest.mark.parametrize("method", tw.presets.names())
def test_a_gpu_trains_and_resumes_bit_for_bit(tiny, tmp_path, monkeypatch, method: str) -> None:
    config = tiny(method, machine=Runtime(device="cuda"))
    undisturbed = train(config, tmp_path / "undisturbed")
    stop_after(config, tmp_path / "run", monkeypatch, 6)
    assert resume(config, tmp_path / "run")["outer_digest"] == undisturbed["outer_digest"]
