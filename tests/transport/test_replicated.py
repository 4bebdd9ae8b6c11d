import re

import pytest
import torch.distributed as dist

import thinwire as tw
from processes import run_ranks
from ranks import GROUPS, TIMEOUT_S
from thinwire.transport import in_process
from thinwire.transport.gloo import gloo_group
from thinwire.transport.replicated import ReplicatedRanks

SEVERAL_WORKERS = r"MismatchError: .* its rank 0 is worker 0 of 2 and its rank 1 is worker 1 of 2"
SEVERAL_OF_FOUR = r"MismatchError: .* its rank 0 is worker 0 of 2 and its rank 2 is worker 1 of 2"
OUTSIDE = r"ConfigurationError: .* because this rank is not in "
SILENT = r"ExchangeTimeout: "
ALONE = r"MismatchError: .* its rank 0 is worker {} of 2 and its rank 1 is worker 0 of 1"
UNDIVIDED = r"MismatchError: .* ranks of ddp_group; because worker 0 has 2 and worker 1 has none"
UNMATCHED = r"Exchange.*: .* not every rank of the group passed it as ddp_group"


WANTED = {
    "right": ["built"] * 4,
    "workers_group": [SEVERAL_WORKERS] * 4,
    "all_ranks": [SEVERAL_OF_FOUR] * 4,
    "alone": [ALONE.format(0), ALONE.format(0), ALONE.format(1), ALONE.format(1)],
    "one_worker_undivided": [UNDIVIDED] * 4,
    "not_in_group": [SILENT, SILENT, OUTSIDE, OUTSIDE],
    "other_mesh": [SILENT, SILENT, OUTSIDE, OUTSIDE],
    "first_ranks_only": [UNMATCHED, "built", UNMATCHED, "built"],
}


@pytest.mark.slow_cases("ddp_group_in_vain")
@pytest.mark.parametrize("groups", GROUPS)
def test_a_ddp_group_is_taken_or_refused_on_every_rank(groups: str) -> None:
    for rank, process in enumerate(run_ranks(groups, 4)):
        assert process.returncode == 0, process.stdout + process.stderr
        for case, line in zip(GROUPS[groups], process.stdout.splitlines(), strict=True):
            assert re.match(f"{case} {WANTED[case][rank]}", line), (rank, line)
            assert float(line.split()[-1]) < 10 + 3 * TIMEOUT_S


def test_what_is_no_group_is_refused() -> None:
    unknown = gloo_group(dist.HashStore(), 0, 1, host="127.0.0.1", timeout_s=5)
    for group in ([0, 1], "worker", dist.group, dist.GroupMember.NON_GROUP_MEMBER, unknown):
        with pytest.raises(tw.ConfigurationError, match=r"is no process group of torch.*do: pass"):
            ReplicatedRanks(in_process(1)[0], group)
