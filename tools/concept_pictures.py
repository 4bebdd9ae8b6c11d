"""The pictures of docs/concepts, each in light and dark.

    python tools/concept_pictures.py            # draws docs/pictures/concepts/*.svg
    python tools/concept_pictures.py --check    # 1 if a committed picture is out of date

tools/concept_numbers.py computes what they show, with thinwire itself.
"""

import argparse
import sys
from collections.abc import Callable, Sequence
from pathlib import Path

import concept_numbers as numbers
from svg_canvas import THEMES, Canvas, Theme

ROOT = Path(__file__).parents[1]
FOLDER = ROOT / "docs" / "pictures" / "concepts"


def rounds(theme: Theme) -> Canvas:
    """Three workers over time: H steps alone, one exchange, one outer step."""
    canvas = Canvas(
        theme=theme,
        height=212,
        title="Three workers train alone for 8 steps, exchange, and take the same outer step",
    )
    colours = (theme.blue, theme.orange, theme.green)
    first, pitch, step = 66, 152, 14
    for number, colour in enumerate(colours):
        y = 44 + 40 * number
        canvas.text(12, y + 5, f"worker {number}", colour=theme.muted, size=12)
        for lap in range(2):
            left = first + 10 + lap * pitch
            for inner in range(8):
                canvas.box(left + inner * step, y - 8, step - 3, 16, colour)
    for lap in range(2):
        x = first + 10 + lap * pitch + 8 * step
        for number in range(3):
            y = 44 + 40 * number
            canvas.line([(x, y), (x + 12, 84)], theme.muted)
            canvas.line([(x + 12, 84), (x + 28, y)], theme.muted, arrow=True)
        canvas.dot(x + 12, 84, 5, theme.purple)
    end = first + 10 + 8 * step
    canvas.text(first + 10 + 4 * step, 22, "H inner steps", anchor="middle")
    canvas.text(end + 12, 160, "exchange", colour=theme.purple, anchor="middle", bold=True)
    canvas.text(end + 12, 176, "mean of pseudo-gradients,", anchor="middle", size=12)
    canvas.text(end + 12, 191, "outer step: the new anchor", anchor="middle", size=12)
    canvas.text(12, 202, "time →", colour=theme.muted, size=12)
    canvas.text(end + pitch + 12, 160, "round 2", colour=theme.purple, anchor="middle", bold=True)
    return canvas


def outer_step(theme: Theme) -> Canvas:
    """Where three workers go from one anchor, and where the anchor goes."""
    found = numbers.outer_step()
    canvas = Canvas(
        theme=theme,
        height=268,
        title="One outer step in the plane of two parameters: three paths from one anchor, their "
        "mean, and the new anchor beyond it",
    )

    def place(point: tuple[float, float]) -> tuple[float, float]:
        return 34 + 128 * point[0], 240 - 112 * (point[1] + 1.2)

    colours = (theme.blue, theme.orange, theme.green)
    for path, colour in zip(found.paths, colours, strict=True):
        points = [place(point) for point in path]
        canvas.line(points, colour, width=2)
        for x, y in points[1:-1]:
            canvas.dot(x, y, 2.5, colour)
        canvas.dot(*points[-1], 5, colour)
    start, mean, end = place(found.start), place(found.mean), place(found.end)
    canvas.line([start, mean], theme.text, dash="4 4")
    canvas.line([mean, end], theme.purple, width=2, arrow=True)
    canvas.dot(*start, 6, theme.text)
    canvas.dot(*mean, 4, theme.text)
    canvas.dot(*end, 6, theme.purple)
    canvas.text(start[0] + 14, start[1] + 8, "anchor", bold=True)
    canvas.text(mean[0] + 8, mean[1] + 20, "mean of the three")
    canvas.text(end[0], end[1] - 14, "new anchor", colour=theme.purple, anchor="middle", bold=True)
    places = ((-10, -8, "end"), (6, 22, "middle"), (-12, 0, "end"))
    for number, (path, colour, (dx, dy, anchor)) in enumerate(
        zip(found.paths, colours, places, strict=True)
    ):
        x, y = place(path[-1])
        canvas.text(x + dx, y + dy, f"worker {number}", colour=colour, size=12, anchor=anchor)
    return canvas


def overlap(theme: Theme) -> Canvas:
    """The same link and steps with rounds that block, and with fragments in the background."""
    lines = numbers.overlap_lines()
    canvas = Canvas(
        theme=theme,
        height=232,
        title="On the planner's time line DiLoCo waits for each exchange; three fragments with "
        "tau = 2 travel while training goes on",
    )
    scale = 376 / max(lines["whole"].steps[-1][1], 1)
    fragments = (theme.orange, theme.green, theme.purple)
    heads = {"whole": "DiLoCo: one exchange, waited for", "parts": "3 fragments, tau = 2"}
    for row, (name, line) in enumerate(lines.items()):
        top = 8 + 116 * row
        last = line.steps[-1][1]
        canvas.text(12, top + 12, heads[name], bold=True)
        canvas.text(12, top + 102, f"14 steps after {last:.1f} s", colour=theme.muted, size=12)
        for begin, end in line.steps:
            canvas.box(12 + begin * scale, top + 22, (end - begin) * scale - 1.5, 20, theme.blue)
        for (_, end), (begin, _) in zip(line.steps, line.steps[1:], strict=False):
            if begin - end > 1e-6:
                canvas.frame(12 + end * scale, top + 22, (begin - end) * scale - 1.5, 20, theme.red)
                middle = 12 + (begin + end) / 2 * scale
                canvas.text(middle, top + 37, "waits", colour=theme.red, size=12, anchor="middle")
        for number, begin, end in line.transfers:
            if begin < last - 1e-6:
                colour = theme.muted if name == "whole" else fragments[number]
                width = (min(end, last) - begin) * scale - 1.5
                canvas.box(12 + begin * scale, top + 60, width, 20, colour)
                if name == "parts":
                    canvas.text_on_box(12 + begin * scale + width / 2, top + 75, str(number))
        canvas.text(388, top + 12, "compute, link below", colour=theme.muted, size=12, anchor="end")
    _applied(canvas, lines["parts"], 8 + 116, scale)
    return canvas


def _applied(canvas: Canvas, line: numbers.TimeLine, top: float, scale: float) -> None:
    """Where the first answer is applied: two steps after it was sent."""
    _, begin, _ = line.transfers[0]
    x = 12 + begin * scale
    later = 12 + (begin + 2 * numbers.STEP_S) * scale
    canvas.line([(x, top + 50), (later, top + 50)], canvas.theme.text, arrow=True)
    canvas.text(later + 6, top + 55, "tau: sent here, applied there", size=12)


def error_feedback(theme: Theme) -> Canvas:
    """A small steady number under Top-k, with and without error feedback, and the residual."""
    found = numbers.feedback_curves()
    canvas = Canvas(
        theme=theme,
        height=300,
        title="A number that moves a little in every round: with error feedback what was sent "
        "catches up with what was wanted, without it nothing is ever sent",
    )
    left, bottom, width, high = 44, 196, 336, 166
    peak = found.wanted[-1]

    def line(values: Sequence[float], base: float, tall: float) -> list[tuple[float, float]]:
        last = len(values) - 1
        return [(left + width * i / last, base - tall * v / peak) for i, v in enumerate(values)]

    canvas.text(12, 20, "sum over rounds of one number of 4,096, Top-64", bold=True)
    for share in (0, 0.5, 1):
        y = bottom - high * share
        canvas.line([(left, y), (left + width, y)], theme.grid, width=1)
        canvas.text(left - 6, y + 4, f"{peak * share:g}", colour=theme.muted, size=12, anchor="end")
    canvas.line(line(found.wanted, bottom, high), theme.muted, dash="5 4")
    canvas.line(_stairs(line(found.with_feedback, bottom, high)), theme.blue, width=2.5)
    canvas.line(line(found.without, bottom, high), theme.orange, width=2.5)
    canvas.text(150, 92, "wanted", colour=theme.muted, anchor="end")
    canvas.text(236, 150, "sent, with feedback", colour=theme.blue)
    canvas.text(150, bottom - 8, "sent, without: 0", colour=theme.orange)
    base = 268
    canvas.line([(left, base), (left + width, base)], theme.grid, width=1)
    canvas.line(line(found.residual, base, high), theme.green, width=2)
    canvas.text(left, 216, "residual = wanted - sent", colour=theme.green)
    canvas.text(left - 6, base + 4, "0", colour=theme.muted, size=12, anchor="end")
    canvas.text(left, 289, "round 0", colour=theme.muted, size=12)
    last = f"round {len(found.wanted) - 1}"
    canvas.text(left + width, 289, last, colour=theme.muted, size=12, anchor="end")
    return canvas


def _stairs(points: Sequence[tuple[float, float]]) -> list[tuple[float, float]]:
    """Through `points`, level until the next one."""
    stairs = [points[0]]
    for x, y in points[1:]:
        stairs += [(x, stairs[-1][1]), (x, y)]
    return stairs


def quorum(theme: Theme) -> Canvas:
    """Seven rounds of an elastic run: who takes part, which rounds count, and who heals."""
    found = numbers.elastic_rounds()
    canvas = Canvas(
        theme=theme,
        height=300,
        title="Seven rounds of an elastic run: c is lost in round 3, which counts without it, d "
        "joins in round 5, and c is back in round 7",
    )
    left, pitch = 74, 46
    for number in range(len(found)):
        x = left + number * pitch
        canvas.text(x + 19, 24, str(number + 1), anchor="middle", bold=True)
    canvas.text(12, 24, "round", colour=theme.muted, size=12)
    for row, name in enumerate("abcd"):
        y = 40 + 44 * row
        canvas.text(12, y + 22, f"worker {name}", size=12)
        for number, attended in enumerate(found):
            x = left + number * pitch
            if name not in attended.members:
                continue
            colour = theme.green if name in attended.healed else theme.blue
            word = f"v{attended.versions[name]}"
            if name in attended.lost:
                colour, word = theme.red, "lost"
            canvas.box(x, y, 38, 34, colour)
            canvas.text_on_box(x + 19, y + 22, word)
    _legend(canvas, found)
    return canvas


def _legend(canvas: Canvas, found: list[numbers.Attendance]) -> None:
    theme = canvas.theme
    lines = (
        (theme.blue, "takes part; v: outer steps that its weights have"),
        (theme.red, "lost: the round counts without it"),
        (theme.green, "healed before the round: d takes the state,"),
        ("", f"c replays the outer steps {_missed(found)}"),
    )
    for row, (colour, words) in enumerate(lines):
        y = 232 + 18 * row
        if colour:
            canvas.box(12, y - 10, 12, 12, colour)
        canvas.text(32, y, words, size=12.5)


def _missed(found: list[numbers.Attendance]) -> str:
    """The outer steps that the last returning worker had missed."""
    before, last = found[-2], found[-1]
    [name] = last.healed
    return f"{before.versions[name] + 1} to {max(before.versions.values())}"


PICTURES: dict[str, Callable[[Theme], Canvas]] = {
    "rounds": rounds,
    "outer-step": outer_step,
    "overlap": overlap,
    "error-feedback": error_feedback,
    "quorum": quorum,
}


def files() -> dict[Path, str]:
    """The text of every picture in every theme, by path."""
    return {
        FOLDER / f"{name}-{mode}.svg": draw(theme).svg()
        for name, draw in PICTURES.items()
        for mode, theme in THEMES.items()
    }


def main(arguments: Sequence[str]) -> int:
    """Draw or check; 1 if a committed picture is out of date."""
    parser = argparse.ArgumentParser(description="The pictures of docs/concepts.")
    parser.add_argument("--check", action="store_true", help="compare with the committed pictures")
    chosen = parser.parse_args(arguments)
    drawn = files()
    if chosen.check:
        stale = [p.name for p, svg in drawn.items() if not p.exists() or p.read_text() != svg]
        for name in stale:
            print(f"{name} is not current: run python tools/concept_pictures.py")
        return 1 if stale else 0
    FOLDER.mkdir(parents=True, exist_ok=True)
    for path, svg in drawn.items():
        path.write_text(svg)
    print(f"drew {len(drawn)} pictures in {FOLDER.relative_to(ROOT)}")
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
