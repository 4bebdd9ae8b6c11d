"""The pictures of docs/concepts are current, and can be read in both themes."""

import re
import sys
from pathlib import Path
from types import ModuleType

import pytest

ROOT = Path(__file__).parents[2]


@pytest.fixture(scope="module")
def tool():
    sys.path.insert(0, str(ROOT / "tools"))
    try:
        import concept_pictures

        yield concept_pictures
    finally:
        sys.path.remove(str(ROOT / "tools"))


def test_the_committed_pictures_are_current(tool: ModuleType) -> None:
    drawn = tool.files()
    assert [p.name for p, svg in drawn.items() if p.read_text() != svg] == []
    assert {p.name for p in tool.FOLDER.iterdir()} == {p.name for p in drawn}


def test_another_picture_is_found_out(tool: ModuleType, tmp_path, monkeypatch, capsys) -> None:
    monkeypatch.setattr(tool, "FOLDER", tmp_path)
    assert tool.main(["--check"]) == 1
    assert "rounds-light.svg is not current" in capsys.readouterr().out


def test_text_stands_out_from_what_is_behind_it(tool: ModuleType) -> None:
    from svg_canvas import contrast

    for theme in tool.THEMES.values():
        lines = (theme.text, theme.muted, theme.blue, theme.orange, theme.green, theme.purple)
        for colour in (*lines, theme.red):  # text in the background's colour stands in such boxes
            assert contrast(colour, theme.background) >= 4.5


def test_text_is_large_enough_and_within_the_picture(tool: ModuleType) -> None:
    for svg in tool.files().values():
        sizes = [float(size) for size in re.findall(r'font-size="([\d.]+)"', svg)]
        assert min(sizes) >= 12
        assert {
            x for x in re.findall(r'<text x="([-\d.]+)"', svg) if not 0 <= float(x) <= 400
        } == set()


def test_pictures_show_what_the_library_does(tool: ModuleType) -> None:
    numbers = tool.numbers
    step = numbers.outer_step()
    # The first step of outer SGD(0.7) with Nesterov momentum 0.9 goes 0.7 * 1.9 times as far.
    for start, mean, end in zip(step.start, step.mean, step.end, strict=True):
        assert end - start == pytest.approx(1.33 * (mean - start), rel=1e-4)
    curves = numbers.feedback_curves()
    parts = zip(curves.wanted, curves.with_feedback, curves.residual, strict=True)
    assert all(wanted - sent == pytest.approx(left, abs=1e-3) for wanted, sent, left in parts)
    assert max(curves.without) == 0 < curves.with_feedback[-1]
    rounds = numbers.elastic_rounds()
    assert [r.counts for r in rounds] == [True, True, False, True, True, True, True]
    for attended in rounds:
        assert len({attended.digests[name] for name in attended.members}) == 1
