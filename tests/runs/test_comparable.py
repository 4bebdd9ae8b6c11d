"""Which runs can be compared, and which are variants of each other."""

import pytest

from run_folders import change, config_of, runs_in, write_run
from thinwire.runs.comparable import not_comparable
from thinwire.runs.variants import repeated_runs, variants_of
from thinwire.train.data import Data
from thinwire.train.models import Model


@pytest.mark.parametrize(
    ("other", "reason"),
    [
        ({"steps": 40}, "tokens is 5120, not 2944"),
        ({"model": Model(size="1m")}, "model.size is 1m, not 250k"),
        ({"data": Data(sequence_length=8)}, "data.sequence_length is 8, not 16"),
    ],
)
def test_other_tokens_models_and_data_are_left_out(tmp_path, other, reason: str) -> None:
    if "model" in other:
        folder = write_run(tmp_path / "other", config_of("muloco"))
        change(folder / "config.json", model__size="1m")
    else:
        write_run(tmp_path / "other", config_of("muloco", **other))
    for seed in (0, 1):
        write_run(tmp_path / f"run{seed}", config_of("diloco", seed=seed))
    ((folder, why),) = not_comparable(runs_in(tmp_path)).items()
    assert folder.name == "other"
    assert reason in why


def test_one_name_of_a_corpus_may_mean_other_tokens(tmp_path) -> None:
    a, b, c = (
        write_run(tmp_path / name, config_of("diloco", seed=seed))
        for seed, name in enumerate("abc")
    )
    change(c / "summary.json", versions__python="3.12.1")
    (why,) = not_comparable(runs_in(tmp_path)).values()
    assert "corpus fingerprint is not recorded (Python 3.12.1)" in why
    for folder in (a, c):
        (folder / "data.json").write_text('{"fingerprint": "abc"}')
    assert list(not_comparable(runs_in(tmp_path))) == [b]


def test_nothing_is_comparable_with_nothing() -> None:
    assert not_comparable([]) == {}


def test_a_copy_of_a_run_is_no_second_seed(tmp_path) -> None:
    for name in ("a", "b"):
        write_run(tmp_path / name, config_of("diloco"))
    ((folder, why),) = repeated_runs(runs_in(tmp_path)).items()
    assert folder.name == "b"
    assert why == f"the same configuration and seed as {tmp_path / 'a'}, which is shown"


def test_threads_and_periods_make_no_other_method(tmp_path) -> None:
    a = write_run(tmp_path / "a", config_of("diloco"))
    change(a / "config.json", machine__threads=7, periods__log_steps=1)
    write_run(tmp_path / "b", config_of("diloco", seed=1))
    (variant,) = variants_of(runs_in(tmp_path))
    assert variant.seeds == (0, 1)
