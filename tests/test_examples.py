"""Every example runs alone and with two workers, which end equal."""

import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from elastic_team import TOKEN
from processes import free_port, output_of, start, start_two

FOLDER = Path(__file__).parent.parent / "examples"
ELASTIC = sorted(FOLDER.glob("*_elastic.py"))
# A server and its workers are processes of two roles: tests/asynchronous/test_objects.py runs such.
TITAN = FOLDER / "torchtitan_trainer.py"
OTHERS = [*ELASTIC, TITAN, FOLDER / "asynchronous.py"]
EXAMPLES = sorted(file for file in FOLDER.glob("*.py") if file not in OTHERS)
APART = [f for f in EXAMPLES if f.stem.endswith(("_trainer", "_like"))]
# Compiling takes longer than everything else.
FLAGS = {"nanochat_like": ["--no-compile"]}
TOGETHER = [file for file in EXAMPLES if file not in APART]


def check_two_that_end_equal(output: str) -> None:
    # Two processes may write to one pipe, so lines may run into each other.
    digests = re.findall(r"[0-9a-f]{64}", output)
    assert len(re.findall(r"sent_bytes=[1-9]", output)) == len(digests) == 2
    assert len(set(digests)) == 1


def ends(team: list[subprocess.Popen]) -> list[str]:
    """The last lines of processes, without what depends on the clock."""
    lines = [output_of(process).splitlines()[-1] for process in team]
    return [re.sub(r"wait_s=.*overlapped_s=[^,]*", "", line) for line in lines]


@pytest.mark.slow_cases("hugging_face", "lightning", "nano", "plain")
@pytest.mark.parametrize("example", EXAMPLES, ids=lambda p: p.stem)
def test_example_alone(example: Path) -> None:
    output = output_of(start([sys.executable, str(example), *FLAGS.get(example.stem, [])]))
    found = r"^worker 0: loss [\d.]+ Stats\(rounds=[1-9]\d*, sent_bytes=0,"
    assert re.search(found, output, re.MULTILINE)


@pytest.mark.slow_cases("hugging", "lightning", "nanochat", "nanogpt")
@pytest.mark.parametrize("example", APART, ids=lambda p: p.stem)
def test_example_with_two_workers_that_meet(example: Path) -> None:
    team = start_two([sys.executable, str(example), *FLAGS.get(example.stem, [])])
    check_two_that_end_equal("".join(output_of(process) for process in team))


@pytest.mark.slow
@pytest.mark.parametrize("example", ELASTIC, ids=lambda p: p.stem)
def test_example_with_two_workers_that_come_and_go(example: Path, tmp_path: Path) -> None:
    run = {"THINWIRE_TOKEN": TOKEN, "THINWIRE_AT": f"file://{tmp_path}/store/first"}
    workers = [start([sys.executable, str(example)], **run) for _ in range(2)]
    output = "".join(output_of(process) for process in workers)
    output += output_of(start([sys.executable, str(example)], **run))  # joins after the end
    assert len(set(re.findall(r"[0-9a-f]{64}", output))) == 1
    assert len(re.findall(r"^loss [\d.]+ Stats", output, re.MULTILINE)) == 3


@pytest.mark.slow
def test_the_script_with_checkpoints_of_its_own_resumes_bit_for_bit(tmp_path: Path) -> None:
    """The loop is built after the weights were loaded, in the middle of a round."""
    text = (FOLDER / "nanogpt_like.py").read_text()
    script = tmp_path / "script.py"
    script.write_text(text.replace("if (step + 1) % 15 == 0:", "if step + 1 == 15:"))
    assert script.read_text() != text
    command = [sys.executable, str(script), str(tmp_path)]
    straight = ends(start_two(command))
    assert sorted(f.name for f in tmp_path.glob("*.pt")) == ["worker0.pt", "worker1.pt"]
    assert ends(start_two(command)) == straight


@pytest.mark.slow
def test_the_script_like_nanochat_is_killed_and_resumes_bit_for_bit(tmp_path: Path) -> None:
    """In the middle of a round, with weights that were loaded before the loop was built."""

    def workers(folder: Path, *more: str) -> list[subprocess.Popen]:
        command = [sys.executable, str(FOLDER / "nanochat_like.py"), "--no-compile"]
        return start_two([*command, "--checkpoint-dir", str(folder), *more])

    straight = ends(workers(tmp_path / "straight"))
    killed = workers(tmp_path / "killed")
    for process in killed:
        assert process.stdout is not None
        assert "saved step 15" in process.stdout.readline()
    for process in killed:
        process.kill()
        process.communicate()
    # They were killed before they came to the end.
    assert not list((tmp_path / "killed").rglob("step30.pt"))
    assert ends(workers(tmp_path / "killed", "--resume-from-step", "15")) == straight


@pytest.mark.slow
def test_torchtitan_resumes_bit_for_bit(tmp_path: Path) -> None:
    if not torch.cuda.is_available():
        pytest.skip("torchtitan has no CPU mode, and there is no GPU here")
    pytest.importorskip("torchtitan", reason="torchtitan 0.3 is not installed")

    def digests(folder: str) -> list[str]:
        port = free_port()
        team = []
        for worker in range(2):
            # Both on one GPU, if there is only one: they do not know of each other's ranks.
            launch = [sys.executable, "-m", "torch.distributed.run", "--nproc-per-node=1"]
            launch += ["--master-port", str(free_port()), "-m", "torchtitan.train"]
            launch += ["--module", TITAN.stem, "--config", "debug"]
            launch += ["--dump_folder", str(tmp_path / folder / str(worker))]
            environment = {
                "THINWIRE_AT": f"tcp://127.0.0.1:{port}?workers=2&worker={worker}",
                "PYTHONPATH": os.pathsep.join([str(FOLDER), *sys.path]),
            }
            team.append(start(launch, **environment))
        found = []
        for process in team:
            out, err = process.communicate(timeout=500)
            assert process.returncode == 0, err
            found += re.findall(r"worker \d\.\d: .* ([0-9a-f]{64})", out + err)
        return found

    straight = digests("straight")
    assert len(straight) == 2
    assert len(set(straight)) == 1
    assert digests("resumed") == straight
    # Its last steps are trained once more, from the checkpoint of step 8.
    for worker in range(2):
        shutil.rmtree(tmp_path / "resumed" / str(worker) / "checkpoint" / "step-12")
    assert digests("resumed") == straight


@pytest.mark.slow
@pytest.mark.parametrize("example", TOGETHER, ids=lambda p: p.stem)
def test_example_under_torchrun(example: Path) -> None:
    launch = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node=2"]
    check_two_that_end_equal(output_of(start([*launch, str(example)])))
