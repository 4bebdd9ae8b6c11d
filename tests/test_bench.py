import json

from thinwire import bench
from thinwire.cli import main


def test_outer_step_is_measured_against_its_baseline(tmp_path, capsys) -> None:
    assert main(["bench", "outer-step", "--out", str(tmp_path)]) == 0
    row = json.loads((tmp_path / "outer-step.json").read_text())
    assert row["speed_ratio"] > 0
    assert len(row["ours_s"]) == len(row["baseline_s"]) == 9
    assert {"torch", "thinwire", "python", "cores", "command"} <= row.keys()
    assert "outer-step" in capsys.readouterr().out


def test_simulation_is_measured_against_one_worker() -> None:
    result = bench.simulation(workers=2, steps=1, repeats=1)
    assert result.speed_ratio == result.baseline_s[0] / result.ours_s[0]
    assert result.ours == "2 simulated workers"
