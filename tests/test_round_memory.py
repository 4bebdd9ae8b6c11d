"""What a worker's round may take beside state and payload, by method: a table that only falls."""

import pytest

import thinwire as tw
from thinwire.bench import round_memory

PROMISED = 4.0
"""Bytes a parameter of the largest fragment."""


# Of two workers the longer contribution is scaled.
CLIPPED = ["diloco:clip_norms=1", "muloco:bits=2:clip_norms=1:drop_outliers=10"]


@pytest.mark.slow_cases("decoupled", "demo", "diloco:clip", "muloco:bits=2:clip", "sparse_muloco")
@pytest.mark.parametrize("method", [*tw.presets.names(), "muloco:bits=2", *CLIPPED])
def test_a_round_takes_no_more_memory_than_it_may(method: str) -> None:
    for row in round_memory(methods=[method]).rows:
        most = max(row.begin_bytes, row.finish_bytes)
        print(row)
        # A thousandth for sums and flags.
        assert most <= PROMISED + 0.001, row
