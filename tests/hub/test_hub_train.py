"""`thinwire join` with the line that a hub prints."""

import json
from urllib.parse import quote

import pytest

import training
from hub_process import SECRET, Hub
from thinwire.cli import main


@pytest.mark.slow
def test_a_pasted_address_is_enough_and_its_token_is_in_no_file_or_line(
    running: Hub,
    tiny,
    tmp_path,
    monkeypatch,
    capsys,
) -> None:
    monkeypatch.setenv("THINWIRE_TOKEN", "")  # so that it is restored
    monkeypatch.delenv("THINWIRE_TOKEN")
    written = quote(SECRET, safe="")
    whole = f"hub://{written}@127.0.0.1:{running.port}/r"
    short = ("--evaluate-steps", "0", "--warmup-steps", "2", "--min-workers", "2")
    with training.Team(tmp_path, tiny("diloco", steps=15), whole, *short) as team:
        said = [team.start("a"), team.start("b")]
        summaries = team.finish()
    assert len({summary["outer_digest"] for summary in summaries.values()}) == 1
    assert main(["status", whole, "--json"]) == 0
    shown = capsys.readouterr()
    told = json.loads(shown.out)
    assert (told["run"]["over"], told["run"]["step"]) == (True, 15)
    assert main(["doctor", whole, "--parameters", "1M", "--layers", "2"]) == 0
    shown_by_doctor = capsys.readouterr()
    assert "put" in shown_by_doctor.out or "store" in shown_by_doctor.out
    texts = [process.stdout + process.stderr for process in said]
    texts += [*shown, *shown_by_doctor]
    texts += [file.read_text(errors="replace") for file in tmp_path.rglob("*") if file.is_file()]
    for text in texts:
        assert SECRET not in text
        assert written not in text
