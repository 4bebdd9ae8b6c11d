"""The tables of settings of a report."""

import dataclasses

from run_folders import config_of, runs_in, write_run
from thinwire.report.settings import differences_table, shared_table
from thinwire.runs.variants import variants_of


def test_methods_have_rows_and_parts_have_columns(tmp_path) -> None:
    tuned = config_of("diloco", workers=8)
    inner = dataclasses.replace(tuned.method.inner, lr=0.125)
    tuned = dataclasses.replace(tuned, method=dataclasses.replace(tuned.method, inner=inner))
    for name, config in {
        "a": config_of("ddp"),
        "b": tuned,
        "c": config_of("muloco:bits=2"),
        "d": config_of("sparseloco:density=1/64"),
    }.items():
        write_run(tmp_path / name, config)
    variants = variants_of(runs_in(tmp_path))
    table = differences_table(variants)
    assert table.head[0] == "method"
    assert {"inner", "codec", "K", "H"} <= set(table.head)
    # What differs most comes first, and is what a narrow window shows.
    kinds = [len({row[n][0] for row in table.rows}) for n in range(1, len(table.head))]
    assert kinds == sorted(kinds, reverse=True)
    assert table.main == table.head[1:3]
    cells = {
        row[0][0]: {name: cell for name, (cell, _) in zip(table.head, row, strict=True)}
        for row in table.rows
    }
    ddp, diloco, muloco, sparseloco = cells.values()
    assert ddp["codec"] == diloco["codec"] == "Identity"
    assert muloco["codec"].startswith("Quantise")
    assert sparseloco["codec"].startswith("TopK")
    assert (ddp["K"], diloco["K"]) == ("4", "8")
    assert diloco["inner"] == "AdamW, lr 0.125"
    # What all Muon have is no difference, though AdamW lacks it; nothing is lost.
    assert not any("scale" in text for its in cells.values() for text in its.values())
    shared = dict(shared_table(variants).rows)
    assert shared["method.inner.scale"] == "rms of Muon"
    assert shared["steps"] == "23"
    told = set(shared)
    differ = {name for variant in variants for name in variant.settings} - told
    assert {"method.inner.lr", "method.codec.kind", "workers"} <= differ
