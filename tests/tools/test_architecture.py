"""tools/architecture.py: the committed picture is current, and the counts count what they say."""

import json
import sys
from collections.abc import Iterator
from itertools import pairwise
from pathlib import Path
from types import ModuleType
from xml.etree import ElementTree

import pytest

ROOT = Path(__file__).parents[2]
SVG = "{http://www.w3.org/2000/svg}"


@pytest.fixture(scope="module")
def tool() -> Iterator[ModuleType]:
    sys.path.insert(0, str(ROOT / "tools"))
    yield __import__("architecture")
    sys.path.remove(str(ROOT / "tools"))


def graph(tool: ModuleType, *arrows: str):
    pairs = frozenset((arrow[0], arrow[1]) for arrow in arrows)
    return tool.Graph(frozenset("".join(arrows)), pairs)


def test_the_committed_picture_is_current(tool, capsys) -> None:
    assert tool.main(["--check"]) == 0, capsys.readouterr().out


def test_an_old_picture_is_found_and_drawn_anew(tool, capsys, monkeypatch, tmp_path) -> None:
    monkeypatch.setattr(tool, "ROOT", tmp_path)
    monkeypatch.setattr(tool, "PICTURE", tmp_path / "rooms.svg")
    (tmp_path / "pyproject.toml").write_text((ROOT / "pyproject.toml").read_text())
    assert tool.main(["--check", str(ROOT / "src")]) == 1
    assert "rooms.svg is out of date" in capsys.readouterr().out
    assert tool.main([str(ROOT / "src")]) == 0
    assert tool.main(["--check", str(ROOT / "src")]) == 0


def test_every_room_has_one_box_and_no_two_overlap(tool) -> None:
    drawn = ElementTree.fromstring(tool.PICTURE.read_text())
    boxes = [r for r in drawn.findall(f"{SVG}rect") if r.get("rx")]
    names = [t.text for t in drawn.findall(f"{SVG}text") if t.get("font-weight")]
    assert sorted(names) == sorted(tool.graph_of(ROOT / "src").rooms)
    corners = sorted((int(b.get("y", "")), int(b.get("x", ""))) for b in boxes)
    for (y, x), (next_y, next_x) in pairwise(corners):
        assert next_y >= y + tool.BOX_HEIGHT or (next_y == y and next_x >= x + tool.BOX_WIDTH)


def test_refuses_what_it_cannot_draw_or_count(tool, tmp_path) -> None:
    with pytest.raises(SystemExit, match="has no package thinwire"):
        tool.main(["--count", str(tmp_path)])
    rooms = tool.graph_of(ROOT / "src").rooms
    contract = tool.layers(ROOT / "pyproject.toml", rooms)
    with pytest.raises(SystemExit, match="cannot draw codecs; because the import contract"):
        tool.picture(ROOT / "src", write_contract(tmp_path, contract, without="codecs"))
    with pytest.raises(SystemExit, match="the contract does not hold"):
        tool.picture(ROOT / "src", write_contract(tmp_path, contract[::-1]))


def write_contract(folder: Path, layers: list[list[str]], without: str = "") -> Path:
    lines = [" | ".join(room for room in layer if room != without) for layer in layers]
    contract = {"type": "layers", "containers": ["thinwire"], "layers": [*filter(None, lines)]}
    text = "\n".join(f"{key} = {json.dumps(value)}" for key, value in contract.items())
    path = folder / "pyproject.toml"
    path.write_text(f"[[tool.importlinter.contracts]]\n{text}\n")
    return path


def test_an_arrow_that_others_imply_is_left_out(tool) -> None:
    assert tool.reduced(graph(tool, "ab", "bc", "ac", "ad")) == [("a", "b"), ("a", "d"), ("b", "c")]


def test_circles_and_floors(tool) -> None:
    straight = graph(tool, "ab", "bc", "ac", "dc")
    assert tool.circles(straight) == []
    assert tool.floors(straight) == 3
    round_about = graph(tool, "ab", "bc", "cb", "cd")
    assert tool.circles(round_about) == [["b", "c"]]
    assert tool.floors(round_about) == 3


def test_places_keep_order_and_gaps(tool) -> None:
    row = [tool.Node("a"), tool.Node("b"), tool.Node("c")]
    step = tool.BOX_WIDTH + tool.GAP
    assert tool._spread(row, [50, 0, 5000]) == {
        row[0]: 25 - step / 2,
        row[1]: 25 + step / 2,
        row[2]: 5000,
    }


SOURCE = '''"""A module.

In three lines."""

# a comment
X = 1  # not a line of its own
"""What X is."""


class Transport:
    """One line."""

    rank: int
    _own: int

    def run(self):
        """Says something."""
        y = 1

        return y

    def stub(self):
        """Nothing here."""


class Transport: ...


class SGD: ...


class SGD: ...
'''


def test_counts_of_a_source(tool, tmp_path) -> None:
    (tmp_path / "one.py").write_text(SOURCE)
    found = tool.source_counts.counts(tmp_path)
    assert found["lines"] == "32"
    assert found["lines of code"] == "11"
    assert found["docstrings"] == f"{7 / 32:.1%} of lines"
    assert found["comments"] == f"{1 / 32:.1%} of lines"
    assert found["classes"] == "4"
    assert found["class names used twice"] == "1: Transport"
    assert found["functions"] == "1"
    assert found["lines of a function"] == "median 4, mean 4.0"


def test_duplicates(tool, tmp_path) -> None:
    def found(*files: list[str]) -> str:
        for number, lines in enumerate(files):
            (tmp_path / f"{number}.py").write_text("\n".join(lines) + "\n")
        return tool.source_counts.counts(tmp_path)["duplicates"]

    seven = [f"x{n} = {n}" for n in range(7)]
    assert found(seven, ["y = 1"]) == "0 runs of 5 lines or more, 0 lines"
    assert found(seven, ["y = 1", *seven[:4]]) == "0 runs of 5 lines or more, 0 lines"
    assert found(seven, ["y = 1", *seven[2:]]) == "1 runs of 5 lines or more, 5 lines"
    apart = ["if y:", *(f"    {line}" for line in seven[:3]), "# why", "", *seven[3:], "y = 2"]
    assert found(seven, apart) == "1 runs of 5 lines or more, 7 lines"
    assert found(seven, [*apart, *seven]) == "2 runs of 5 lines or more, 14 lines"


def test_counts_of_the_package(tool, capsys) -> None:
    assert tool.main(["--count"]) == 0
    said = dict(line.split(maxsplit=1) for line in capsys.readouterr().out.splitlines() if line)
    assert int(said["rooms"]) == len(tool.graph_of(ROOT / "src").rooms) > 20
    assert said["circles"] == "0"
