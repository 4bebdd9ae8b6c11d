"""The rooms of the package and what imports what, as a picture and as counts.

    python tools/architecture.py                  # draws docs/pictures/rooms.svg
    python tools/architecture.py --check          # 1 if the committed picture is out of date
    python tools/architecture.py --count [SRC]    # counts of any checkout's src folder

A room is a module or package directly below `thinwire`, except `__init__` (which only re-exports)
and `__main__`. An arrow goes from a room to one it imports, anywhere in it, also inside functions,
but not where only type checkers read it (the contract's `exclude_type_checking_imports`). Rows of
the picture are the layers of the import contract in pyproject.toml. An arrow is left out where a
way over other rooms says the same (transitive reduction).
"""

import argparse
import ast
import html
import statistics
import sys
import textwrap
import tomllib
from collections.abc import Iterable, Mapping, Sequence
from functools import cache
from itertools import combinations, pairwise
from pathlib import Path
from typing import NamedTuple

import grimp
import source_counts

ROOT = Path(__file__).parents[1]
PICTURE = ROOT / "docs" / "pictures" / "rooms.svg"
PACKAGE = "thinwire"

BOX_WIDTH, BOX_HEIGHT, GAP, PITCH, MARGIN = 200, 72, 12, 108, 20
PASSING = 12  # the width kept free for an arrow that passes a row
IN_A_ROW = 4  # a layer of more rooms takes several rows
CHARACTERS = 30  # of a line in a box

Arrow = tuple[str, str]


class Node(NamedTuple):
    """A place in a row: a room, or with a `number` the passage of one long arrow."""

    room: str
    number: int = 0

    @property
    def width(self) -> int:
        """Of a box, or of the way that is kept free for an arrow."""
        return PASSING if self.number else BOX_WIDTH


class Graph(NamedTuple):
    """Rooms, and all arrows between them."""

    rooms: frozenset[str]
    arrows: frozenset[Arrow]


def graph_of(src: Path) -> Graph:
    """The import graph of `src/thinwire`, room by room."""
    if not (src / PACKAGE / "__init__.py").exists():
        # Without this, the package that is installed would be read in its place.
        sys.exit(
            f"cannot read {src}; because it has no package {PACKAGE}; "
            "do: pass a checkout's src folder"
        )
    sys.path.insert(0, str(src))
    try:
        # As the contract has it: a name that only type checkers need is not an import.
        modules = grimp.build_graph(PACKAGE, cache_dir=None, exclude_type_checking_imports=True)
    finally:
        sys.path.remove(str(src))
    rooms = {_room(module) for module in modules.modules} - {""}
    arrows = {
        (_room(importer), _room(imported))
        for importer in modules.modules
        for imported in modules.find_modules_directly_imported_by(importer)
    }
    inside = {(a, b) for a, b in arrows if a in rooms and b in rooms and a != b}
    return Graph(frozenset(rooms), frozenset(inside))


def _room(module: str) -> str:
    first = module.split(".")[1:2]
    return "" if not first or first[0].startswith("__") else first[0]


def circles(graph: Graph) -> list[list[str]]:
    """Groups of rooms that import each other, directly or around a corner."""
    below = {room: _reachable(graph, room) for room in sorted(graph.rooms)}
    groups = {
        frozenset({room, *(other for other in below[room] if room in below[other])})
        for room in graph.rooms
    }
    return sorted(sorted(group) for group in groups if len(group) > 1)


def _reachable(graph: Graph, start: str) -> set[str]:
    found: set[str] = set()
    waiting = [start]
    while waiting:
        room = waiting.pop()
        new = {b for a, b in graph.arrows if a == room} - found
        found |= new
        waiting.extend(new)
    return found


def floors(graph: Graph) -> int:
    """Rooms on the longest chain of imports; a circle counts as one room."""
    member = {room: group[0] for group in circles(graph) for room in group}
    arrows = {(member.get(a, a), member.get(b, b)) for a, b in graph.arrows}

    @cache
    def height(room: str) -> int:
        return 1 + max((height(b) for a, b in arrows if a == room != b), default=0)

    return max(height(member.get(room, room)) for room in graph.rooms)


def reduced(graph: Graph) -> list[Arrow]:
    """The arrows without which a room would no longer reach what it imports."""
    below = {room: _reachable(graph, room) for room in graph.rooms}
    return sorted(
        (a, b)
        for a, b in graph.arrows
        if not any(b in below[via] for start, via in graph.arrows if start == a and via != b)
    )


def layers(pyproject: Path, rooms: Iterable[str]) -> list[list[str]]:
    """The contract's layers from top to bottom, with the rooms that exist."""
    contracts = tomllib.loads(pyproject.read_text())["tool"]["importlinter"]["contracts"]
    [contract] = [c for c in contracts if c["type"] == "layers" and c["containers"] == [PACKAGE]]
    existing = set(rooms)
    named = [
        [name.strip(" ()") for name in layer.replace(":", "|").split("|")]
        for layer in contract["layers"]
    ]
    kept = [[name for name in layer if name in existing] for layer in named]
    return [layer for layer in kept if layer]


def summary(src: Path, room: str) -> str:
    """The first line of a room's docstring, without the room's own name in front."""
    package = src / PACKAGE / room / "__init__.py"
    path = package if package.exists() else src / PACKAGE / f"{room}.py"
    text = (ast.get_docstring(ast.parse(path.read_text())) or "").split("\n\n")[0]
    name, colon, rest = " ".join(text.split()).partition(": ")
    said = rest if colon and name.lower().replace(" ", "_") == room else " ".join(text.split())
    return (said[:1].upper() + said[1:]).removesuffix(".").replace("`", "")


def picture(src: Path, pyproject: Path) -> str:
    """The SVG: rooms in the rows of the contract, arrows from importer to imported."""
    graph = graph_of(src)
    contract = layers(pyproject, graph.rooms)
    rows, bands = _rows(contract)
    arrows = reduced(graph)
    row_of = {room: number for number, row in enumerate(rows) for room in row}
    missing = sorted(graph.rooms - row_of.keys())
    if missing:
        sys.exit(
            f"cannot draw {', '.join(missing)}; because the import contract has no layer for it; "
            f"do: add it to the layers in {pyproject.name}"
        )
    upward = sorted(a for a in graph.arrows if row_of[a[0]] >= row_of[a[1]])
    if upward:
        sys.exit(
            f"cannot draw the rooms; because the contract does not hold for {upward}; "
            "do: lint-imports"
        )
    nodes, ways = _with_passages(rows, arrows, row_of)
    ordered = _fewest_crossings(nodes, ways)
    return _svg(ordered, ways, bands, {room: summary(src, room) for room in graph.rooms})


def _rows(contract: Sequence[Sequence[str]]) -> tuple[list[list[str]], list[int]]:
    """Rows of at most IN_A_ROW rooms, and the number of the contract's layer of each."""
    rows: list[list[str]] = []
    bands: list[int] = []
    for number, layer in enumerate(contract):
        parts = -(-len(layer) // IN_A_ROW)
        rows += [list(layer[part::parts]) for part in range(parts)]
        bands += [number] * parts
    return rows, bands


def _with_passages(
    rows: Sequence[Sequence[str]], arrows: Sequence[Arrow], row_of: Mapping[str, int]
) -> tuple[list[list[Node]], list[list[Node]]]:
    """The nodes of each row, and each arrow as the nodes it goes through.

    Arrows to one room share their passages, so that they arrive as one bundle.
    """
    nodes = [[Node(room) for room in row] for row in rows]
    ways: list[list[Node]] = []
    for importer, imported in arrows:
        top, bottom = row_of[importer], row_of[imported]
        passages = [Node(imported, row) for row in range(top + 1, bottom)]
        for passage in passages:
            if passage not in nodes[passage.number]:
                nodes[passage.number].append(passage)
        ways.append([Node(importer), *passages, Node(imported)])
    return nodes, ways


def _fewest_crossings(nodes: list[list[Node]], ways: Sequence[Sequence[Node]]) -> list[list[Node]]:
    """Rows sorted by the mean place of their neighbours, down and up, the best of 24 sweeps."""
    steps = sorted({step for way in ways for step in pairwise(way)})
    best, fewest = nodes, _crossings(nodes, steps)
    for sweep in range(24):
        upper_first = sweep % 2 == 0
        nodes = [list(row) for row in nodes]
        for row in nodes[1:] if upper_first else nodes[-2::-1]:
            place = {node: i / len(r) for r in nodes for i, node in enumerate(r)}
            around = {
                node: [
                    place[a if upper_first else b]
                    for a, b in steps
                    if node == (b, a)[not upper_first]
                ]
                for node in row
            }
            row.sort(key=lambda n: statistics.fmean(around[n]) if around[n] else place[n])
        crossings = _crossings(nodes, steps)
        if crossings < fewest:
            best, fewest = nodes, crossings
    return best


def _crossings(nodes: Sequence[Sequence[Node]], steps: Sequence[tuple[Node, Node]]) -> int:
    row_of = {node: number for number, row in enumerate(nodes) for node in row}
    place = {node: i for row in nodes for i, node in enumerate(row)}
    return sum(
        (place[a] - place[c]) * (place[b] - place[d]) < 0
        for (a, b), (c, d) in combinations(steps, 2)
        if row_of[a] == row_of[c]
    )


def _columns(nodes: Sequence[Sequence[Node]], ways: Sequence[Sequence[Node]]) -> dict[Node, float]:
    """The middle of each node: near its neighbours, in its row's order, without overlap."""
    steps = {step for way in ways for step in pairwise(way)}
    around: dict[Node, list[Node]] = {node: [] for row in nodes for node in row}
    for a, b in sorted(steps):
        around[a].append(b)
        around[b].append(a)
    x: dict[Node, float] = {}
    for row in nodes:
        width = sum(node.width + GAP for node in row)
        x |= _spread(row, [(i + 0.5) * width / len(row) - width / 2 for i in range(len(row))])
    for _ in range(40):
        for row in nodes:
            x |= _spread(row, [statistics.fmean([x[n], *(x[o] for o in around[n])]) for n in row])
    left = min(x[node] - node.width / 2 for node in x)
    return {node: x[node] - left + MARGIN for node in x}


def _spread(row: Sequence[Node], wanted: Sequence[float]) -> dict[Node, float]:
    """The places nearest to the wanted ones (least squares) that keep the order and the gaps."""
    offsets = [0.0]
    for a, b in pairwise(row):
        offsets.append(offsets[-1] + (a.width + b.width) / 2 + GAP)
    pools: list[list[float]] = []  # pool adjacent violators
    for value in (w - o for w, o in zip(wanted, offsets, strict=True)):
        pools.append([value])
        while len(pools) > 1 and statistics.fmean(pools[-2]) > statistics.fmean(pools[-1]):
            last = pools.pop()
            pools[-1] += last
    places = [statistics.fmean(pool) for pool in pools for _ in pool]
    return {node: p + o for node, p, o in zip(row, places, offsets, strict=True)}


def _svg(
    nodes: Sequence[Sequence[Node]],
    ways: Sequence[Sequence[Node]],
    bands: Sequence[int],
    says: Mapping[str, str],
) -> str:
    x = _columns(nodes, ways)
    y = {node: MARGIN + number * PITCH for number, row in enumerate(nodes) for node in row}
    width = round(max(x[node] + node.width / 2 for node in x) + MARGIN)
    height = len(nodes) * PITCH + MARGIN
    return "\n".join([
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {width} {height}" '
        f'width="{width}" height="{height}" font-family="sans-serif">',
        "<!-- drawn by tools/architecture.py from the import contract; do not edit -->",
        "<title>The rooms of thinwire: each imports only from rooms below it</title>",
        '<defs><marker id="tip" viewBox="0 0 8 8" refX="7" refY="4" markerWidth="7" '
        'markerHeight="7" orient="auto"><path d="M0 0 8 4 0 8z" fill="#5b7083"/></marker></defs>',
        f'<rect width="{width}" height="{height}" fill="#ffffff"/>',
        *_bands(bands, width),
        *(_arrow(way, x, y) for way in ways),
        *(_box(node, x[node], y[node], says) for row in nodes for node in row if not node.number),
        "</svg>\n",
    ])  # fmt: skip


def _bands(bands: Sequence[int], width: int) -> list[str]:
    """A grey stripe behind every other layer of the contract."""
    return [
        f'<rect y="{MARGIN / 2 + row * PITCH - 9:g}" width="{width}" height="{PITCH}" '
        'fill="#f3f6f9"/>'
        for row, band in enumerate(bands)
        if band % 2 == 0
    ]


def _arrow(way: Sequence[Node], x: Mapping[Node, float], y: Mapping[Node, int]) -> str:
    path = f"M{x[way[0]]:.0f} {y[way[0]] + BOX_HEIGHT}"
    for a, b in pairwise(way):
        start, end = y[a] + BOX_HEIGHT, y[b] - (0 if b.number else 1)
        middle = (start + end) / 2
        path += f"C{x[a]:.0f} {middle:.0f} {x[b]:.0f} {middle:.0f} {x[b]:.0f} {end}"
        if b.number:
            path += f"V{y[b] + BOX_HEIGHT}"
    return (
        f'<path d="{path}" fill="none" stroke="#5b7083" stroke-width="1.3" opacity="0.75" '
        'marker-end="url(#tip)"/>'
    )


def _box(node: Node, x: float, y: int, says: Mapping[str, str]) -> str:
    left = x - BOX_WIDTH / 2
    lines = textwrap.wrap(says[node.room], CHARACTERS, max_lines=3, placeholder=" …")
    spans = "".join(
        f'<tspan x="{left + 9:.0f}" dy="14.5">{html.escape(line)}</tspan>' for line in lines
    )
    return (
        f'<rect x="{left:.0f}" y="{y}" width="{BOX_WIDTH}" height="{BOX_HEIGHT}" rx="6" '
        'fill="#ffffff" stroke="#2f4858"/>'
        f'<text x="{left + 9:.0f}" y="{y + 18}" font-size="14" font-weight="bold" fill="#12232e">'
        f'{html.escape(node.room)}</text><text y="{y + 20}" font-size="12" fill="#41545f">'
        f"{spans}</text>"
    )


def counts(src: Path) -> dict[str, str]:
    """All counts of `src/thinwire`, by name."""
    graph = graph_of(src)
    found = circles(graph)
    return {
        "rooms": str(len(graph.rooms)),
        "floors": str(floors(graph)),
        "arrows between rooms": str(len(graph.arrows)),
        "circles": f"{len(found)}{': ' * bool(found)}{'; '.join(map(', '.join, found))}",
        **source_counts.counts(src / PACKAGE),
    }


def main(arguments: Sequence[str]) -> int:
    """Draw, check or count; 1 if the committed picture is out of date."""
    parser = argparse.ArgumentParser(description="The rooms of the package and their arrows.")
    parser.add_argument("--check", action="store_true", help="compare with the committed picture")
    parser.add_argument("--count", action="store_true", help="print counts and draw nothing")
    parser.add_argument("src", nargs="?", type=Path, default=ROOT / "src")
    chosen = parser.parse_args(arguments)
    if chosen.count:
        for name, value in counts(chosen.src).items():
            print(f"{name:26} {value}")
        return 0
    drawn = picture(chosen.src, ROOT / "pyproject.toml")
    if not chosen.check:
        PICTURE.write_text(drawn, encoding="utf-8")
    elif not PICTURE.exists() or PICTURE.read_text(encoding="utf-8") != drawn:
        print(
            f"{PICTURE.relative_to(ROOT)} is out of date; because rooms, their imports or their "
            "first docstring lines changed; do: python tools/architecture.py"
        )
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
