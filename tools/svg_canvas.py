"""Draw the documentation's pictures: shapes in a light or a dark theme, as SVG.

A picture is 400 units wide, with text of at least 12 units, so that a phone can show it.
"""

import html
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

__all__ = ["THEMES", "Canvas", "Theme", "contrast"]

WIDTH = 400


class Theme(NamedTuple):
    """Colours by purpose. All but `grid` and `soft` are used for text or lines."""

    background: str
    text: str
    muted: str
    grid: str
    soft: str
    blue: str
    orange: str
    green: str
    purple: str
    red: str


THEMES = {
    "light": Theme(
        background="#ffffff",
        text="#17212b",
        muted="#4d5c69",
        grid="#d5dde4",
        soft="#edf1f5",
        blue="#1765a8",
        orange="#a34a08",
        green="#22713d",
        purple="#6f42a8",
        red="#b3261e",
    ),
    "dark": Theme(
        background="#1b1f27",
        text="#e9eef3",
        muted="#b3bfca",
        grid="#3b4552",
        soft="#29303b",
        blue="#74b8f3",
        orange="#f2a862",
        green="#74cf90",
        purple="#c5a6f2",
        red="#ff9188",
    ),
}


def contrast(first: str, second: str) -> float:
    """The contrast ratio of two colours by WCAG 2, from 1 to 21.

    >>> contrast("#000000", "#ffffff")
    21.0
    """
    high, low = sorted((_luminance(first), _luminance(second)), reverse=True)
    return (high + 0.05) / (low + 0.05)


def _luminance(colour: str) -> float:
    parts = [int(colour[i : i + 2], 16) / 255 for i in (1, 3, 5)]
    linear = [p / 12.92 if p <= 0.04045 else ((p + 0.055) / 1.055) ** 2.4 for p in parts]
    return 0.2126 * linear[0] + 0.7152 * linear[1] + 0.0722 * linear[2]


@dataclass(kw_only=True)
class Canvas:
    """A picture in the making: each method adds a shape. Places are in units from the top left."""

    theme: Theme
    height: int
    title: str
    parts: list[str] = field(default_factory=list)

    def text(
        self,
        x: float,
        y: float,
        words: str,
        *,
        colour: str = "",
        size: float = 13,
        anchor: str = "start",
        bold: bool = False,
    ) -> None:
        """One line of text; `y` is its base line."""
        weight = ' font-weight="bold"' if bold else ""
        self.parts.append(
            f'<text x="{_n(x)}" y="{_n(y)}" font-size="{_n(size)}" text-anchor="{anchor}"'
            f'{weight} fill="{colour or self.theme.text}">{html.escape(words)}</text>'
        )

    def text_on_box(self, x: float, y: float, words: str) -> None:
        """A word in the middle of a box, in the background's colour."""
        ground = self.theme.background
        self.text(x, y, words, colour=ground, size=12, anchor="middle", bold=True)

    def box(self, x: float, y: float, width: float, height: float, fill: str) -> None:
        """A filled rectangle."""
        self.parts.append(
            f'<rect x="{_n(x)}" y="{_n(y)}" width="{_n(width)}" height="{_n(height)}" rx="2" '
            f'fill="{fill}"/>'
        )

    def frame(self, x: float, y: float, width: float, height: float, stroke: str) -> None:
        """The outline of a rectangle, dashed."""
        self.parts.append(
            f'<rect x="{_n(x)}" y="{_n(y)}" width="{_n(width)}" height="{_n(height)}" rx="2" '
            f'fill="none" stroke="{stroke}" stroke-dasharray="3 3"/>'
        )

    def line(
        self,
        points: Sequence[tuple[float, float]],
        stroke: str,
        *,
        width: float = 1.5,
        dash: str = "",
        arrow: bool = False,
    ) -> None:
        """A line through `points`, with a tip at its end if it is an arrow."""
        path = " ".join(f"{_n(x)},{_n(y)}" for x, y in points)
        style = f' stroke-dasharray="{dash}"' if dash else ""
        self.parts.append(
            f'<polyline points="{path}" fill="none" stroke="{stroke}" '
            f'stroke-width="{_n(width)}" stroke-linejoin="round"{style}/>'
        )
        if arrow:
            self._tip(points[-2], points[-1], stroke)

    def dot(self, x: float, y: float, radius: float, fill: str) -> None:
        """A filled circle."""
        self.parts.append(f'<circle cx="{_n(x)}" cy="{_n(y)}" r="{_n(radius)}" fill="{fill}"/>')

    def ring(self, x: float, y: float, rx: float, ry: float, turn: float, stroke: str) -> None:
        """The outline of an ellipse, turned by `turn` degrees."""
        self.parts.append(
            f'<ellipse cx="{_n(x)}" cy="{_n(y)}" rx="{_n(rx)}" ry="{_n(ry)}" fill="none" '
            f'stroke="{stroke}" transform="rotate({_n(turn)} {_n(x)} {_n(y)})"/>'
        )

    def svg(self) -> str:
        """The file."""
        return "\n".join([
            f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {WIDTH} {self.height}" '
            f'width="{WIDTH * 3 // 2}" height="{self.height * 3 // 2}" '
            'font-family="system-ui, sans-serif" role="img">',
            "<!-- drawn by tools/concept_pictures.py; do not edit -->",
            f"<title>{html.escape(self.title)}</title>",
            f'<rect width="{WIDTH}" height="{self.height}" rx="6" '
            f'fill="{self.theme.background}"/>',
            *self.parts,
            "</svg>\n",
        ])  # fmt: skip

    def _tip(self, start: tuple[float, float], end: tuple[float, float], fill: str) -> None:
        dx, dy = end[0] - start[0], end[1] - start[1]
        length = max((dx * dx + dy * dy) ** 0.5, 1e-9)
        ux, uy = dx / length, dy / length
        corners = [
            end,
            *((end[0] - 8 * ux - s * 4 * uy, end[1] - 8 * uy + s * 4 * ux) for s in (1, -1)),
        ]
        path = " ".join(f"{_n(x)},{_n(y)}" for x, y in corners)
        self.parts.append(f'<polygon points="{path}" fill="{fill}"/>')


def _n(value: float) -> str:
    """A number to a tenth of a unit, which is finer than an eye sees."""
    return f"{round(value, 1) + 0.0:g}"
