"""What ranks of torchrun send where there is a token, and what a run folder and the planner say."""

import pytest

from thinwire.plan.calibration import calibrate
from thinwire.train.trainer import train
from training import run_ranked


@pytest.mark.slow_cases("streaming")
@pytest.mark.parametrize("method", ["diloco", "streaming_diloco"])
def test_ranks_with_a_token_seal_and_reach_the_digest_of_one_process(
    tiny, tmp_path, monkeypatch, method: str
) -> None:
    config = tiny(method)
    plain = train(config, tmp_path / "plain")
    assert "added_bytes_per_message" not in plain
    monkeypatch.setenv("THINWIRE_TOKEN", "a secret of many characters")
    sealed = run_ranked(config, tmp_path / "sealed")
    assert sealed["outer_digest"] == plain["outer_digest"]
    assert sealed["added_bytes_per_message"] == 28
    found = calibrate(tmp_path / "sealed", step_s=1)
    messages = found.traffic.puts_after(config.steps)
    assert sealed["sent_bytes_per_worker"] == plain["sent_bytes_per_worker"] + 28 * messages
    # What it is planned for again is sealed, too.
    assert found.job.added_nbytes == 28
