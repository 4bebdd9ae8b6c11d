"""`thinwire serve` and `thinwire work`: an asynchronous run of a language model by processes."""

import json
import os

import pytest

import thinwire as tw
from forked import Forked
from processes import free_port
from thinwire.train.asynchronous import without_rounds
from training import corpus, tiny

__all__ = ["corpus", "tiny"]


def command(*arguments: str) -> Forked:
    told = {
        "THINWIRE_TOKEN": "a token for the tests",
        "OMP_NUM_THREADS": "1",
        "HF_HUB_OFFLINE": "1",
    }
    return Forked(["-m", "thinwire", *arguments], os.environ | told)


@pytest.mark.slow
def test_a_run_is_served_and_another_one_is_refused(tiny, corpus, tmp_path) -> None:
    port, out = free_port(), tmp_path / "out"
    run = (
        *("--method", "diloco", "--workers", "2", "--steps", "12", "--sync-every", "3"),
        *("--model", tiny().model.size, "--corpus", str(corpus), "--sequence-length", "16"),
        *("--global-batch", "4", "--device", "cpu", "--threads", "1"),
    )
    server = command("serve", "--bind", f"127.0.0.1:{port}", "--out", str(out), *run)
    where = f"127.0.0.1:{port}"
    others = [
        command("work", where, "--worker", "0", *run, "--inner-lr", "0.1"),
        command("work", where, "--worker", "0", *run[:5], "13", *run[6:]),
    ]
    workers: list[Forked] = []
    try:
        for other, field in zip(others, ("method.inner.lr", "steps"), strict=True):
            _, errors = other.communicate(timeout=60)
            assert other.returncode == 1
            assert f"{field} differs" in errors
        workers += [command("work", where, "--worker", str(k), *run) for k in range(2)]
        output, errors = server.communicate(timeout=60)
        assert server.returncode == 0, errors
        for worker in workers:
            told, errors = worker.communicate(timeout=30)
            assert worker.returncode == 0, errors
            assert "the run is finished" in told
    finally:
        for process in (server, *others, *workers):
            process.kill()
    summary = json.loads((out / "server.json").read_text())
    assert f"validation loss {summary['val_loss']:.4f} after 768 tokens" in output
    assert summary["steps_done"] == 24
    assert (out / "model" / "model.safetensors").exists()


def test_a_method_in_rounds_becomes_one_for_arrivals_if_its_outer_optimizer_can() -> None:
    found = without_rounds(tw.presets.muloco(bits=2), 16)
    assert found.outer == tw.outer.DelayedNesterov(lr=1, momentum=0.9, every=16)
    assert found.codec == tw.presets.muloco(bits=2).codec
    plain = without_rounds(tw.presets.sparseloco(), 3)
    assert plain.outer == tw.outer.DelayedNesterov(lr=1.0, momentum=0.0, every=3)
    assert without_rounds(found, 4) == found
    for method in (
        tw.presets.ddp(),
        tw.presets.diloco(outer=tw.outer.AdamW()),
        tw.presets.diloco(outer=tw.outer.SGD(lr=0.7, momentum=0.9)),
    ):
        with pytest.raises(tw.ConfigurationError, match="arrive one by one"):
            without_rounds(method, 4)
