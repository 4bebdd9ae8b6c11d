"""Workers of several ranks: two workers of two, in real processes."""

import pytest

from processes import run_ranks


def run(cases: str) -> list[str]:
    processes = run_ranks(cases, 4, script="sharded_ranks.py", timeout_s=200)
    assert [p.returncode for p in processes] == [0] * 4, processes[0].stderr + processes[-1].stderr
    return processes[0].stdout.splitlines()


@pytest.mark.slow_cases("host_memory", "outer_parameters")
@pytest.mark.parametrize(
    "cases", ["outer_parameters", "codecs,replicated,hybrid", "host_memory,checkpoints,refused"]
)
def test_shards_keep(cases: str) -> None:
    assert len(run(cases)) == len(cases.split(","))
