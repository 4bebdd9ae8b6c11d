"""The recipes of docs/launching.md, as far as they can be run on one machine."""

import os
import re
import subprocess
from pathlib import Path

import pytest
import yaml

from thinwire.address import Address

FOLDER = Path(__file__).parent.parent / "examples" / "launch"
VARIABLES = {"THINWIRE_AT"}


@pytest.mark.parametrize("recipe", sorted(FOLDER.iterdir()), ids=lambda p: p.name)
def test_a_recipe_can_be_read_and_names_all_that_a_worker_needs(recipe: Path) -> None:
    assert set(re.findall(r"THINWIRE_[A-Z]+", recipe.read_text())) >= VARIABLES
    if recipe.suffix == ".sh":
        subprocess.run(["bash", "-n", str(recipe)], check=True)
    if recipe.name == "skypilot.yaml":
        assert set(yaml.safe_load(recipe.read_text())["envs"]) == VARIABLES


def test_pods_find_worker_0_by_its_name_and_know_their_numbers() -> None:
    service, team = yaml.safe_load_all((FOLDER / "kubernetes.yaml").read_text())
    assert service["spec"]["clusterIP"] == "None"
    name, spec = team["metadata"]["name"], team["spec"]
    (container,) = spec["template"]["spec"]["containers"]
    (command,) = container["args"]
    port = service["spec"]["ports"][0]["port"]
    setting = command.split()[0]
    shell = f"HOSTNAME={name}-1; {setting}; echo $THINWIRE_AT"
    at = Address.read(subprocess.check_output(["bash", "-c", shell], text=True))
    assert at == Address(f"{name}-0.{spec['serviceName']}:{port}", "", spec["replicas"], 1)


def test_ssh_starts_workers_of_two_ranks_and_ends_all_if_one_fails(tmp_path: Path) -> None:
    """With stand-ins for ssh and torchrun: each worker prints its node and command."""
    for name, lines in {
        "ssh": 'shift 2; export NODE="$1"; bash -c "$2"',
        "torchrun": 'echo "$NODE $THINWIRE_AT: $*"; if [[ $NODE == "$FAILS" ]]; then exit 7; fi\n'
        'if [[ -n "$FAILS" ]]; then exec sleep 1 > /dev/null 2>&1; fi',
    }.items():
        (file := tmp_path / name).write_text(f"#!/usr/bin/env bash\n{lines}\n")
        file.chmod(0o755)

    def launch(fails: str) -> subprocess.CompletedProcess:
        own = {"PATH": f"{tmp_path}:{os.environ['PATH']}", "MEET": "127.0.0.1:29400"}
        return subprocess.run(
            ["bash", str(FOLDER / "ssh.sh"), "a", "b", "--", "train.py", "--steps", "3"],
            capture_output=True,
            text=True,
            env=os.environ | own | {"GPUS": "2", "FAILS": fails},
        )

    done = launch("")
    assert done.returncode == 0, done.stderr
    assert sorted(done.stdout.splitlines()) == [
        f"[{node}] {node} tcp://127.0.0.1:29400?workers=2&worker={number}: "
        "--standalone --nproc-per-node 2 train.py --steps 3"
        for number, node in enumerate("ab")
    ]
    assert launch("b").returncode == 7
