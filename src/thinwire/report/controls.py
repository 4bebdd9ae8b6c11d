"""What a reader chooses in a report: methods, a loss, a link."""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from html import escape
from typing import Final, final

from thinwire.report.blocks import Block

__all__ = ["LinkControls", "MethodControls"]

_DASHES: Final = ("", "9 6", "2.5 5", "9 4 2.5 4", "14 6", "14 4 2.5 4")
_COLOURS: Final = 8
# As chart.js has them, in the middle of a line of 34 x 10.
_SYMBOLS: Final = (
    "M12.5 5a4.5 4.5 0 1 0 9 0a4.5 4.5 0 1 0 -9 0z",
    "M13 1h8v8h-8z",
    "M17 0l5 5l-5 5l-5 -5z",
    "M17 0l5 9h-10z",
    "M17 10l5 -9h-10z",
    "M15.5 0h3v3.5h3.5v3h-3.5v3.5h-3v-3.5h-3.5v-3h3.5z",
    "M14 0l3 3l3 -3l2 2l-3 3l3 3l-2 2l-3 -3l-3 3l-2 -2l3 -3l-3 -3z",
)


@final
@dataclass(frozen=True, kw_only=True, slots=True)
class MethodControls(Block):
    """The legend of all charts: what it does not tick is not drawn; and which loss they show.

    Args:
        labels: of the methods.
        styles: of `styles_of`.
        front: indices of the methods that no other beats in loss and bytes.
    """

    labels: Sequence[str]
    styles: Sequence[Mapping[str, int]]
    front: Sequence[int]

    def html(self) -> str:
        """A box for each method, with its line beside it, and buttons that tick many at once."""
        choices = {"all": range(len(self.labels)), "none": (), "the Pareto front": self.front}
        buttons = "".join(
            f'<button type="button" data-tick="{" ".join(map(str, ticked))}">{name}</button>'
            for name, ticked in choices.items()
        )
        boxes = "".join(
            f'<label><input type="checkbox" data-arm="{index}" checked>{_line(style)}'
            f"<span>{escape(label)}</span></label>"
            for index, (label, style) in enumerate(zip(self.labels, self.styles, strict=True))
        )
        return (
            '<div class="controls" id="methods"><fieldset><legend>Methods</legend>'
            f'{boxes}</fieldset><p class="choices">Show {buttons}</p>'
            "<fieldset><legend>Loss</legend>"
            '<label><input type="radio" name="loss" value="validation" checked>'
            "<span>validation, of the outer parameters</span></label>"
            '<label><input type="radio" name="loss" value="training">'
            "<span>training, mean of the workers</span></label></fieldset></div>"
        )


def _line(style: Mapping[str, int]) -> str:
    variant = style["variant"]
    dash, symbol = _DASHES[variant % len(_DASHES)], _SYMBOLS[variant % len(_SYMBOLS)]
    colour = f"var(--series-{style['series'] % _COLOURS})"
    return (
        f'<svg width="34" height="10" aria-hidden="true"><line x1="0" y1="5" x2="34" y2="5" '
        f'stroke="{colour}" stroke-width="3" stroke-dasharray="{dash}"/>'
        f'<path d="{symbol}" fill="{colour}"/></svg>'
    )


@final
@dataclass(frozen=True, kw_only=True, slots=True)
class LinkControls(Block):
    """The link on which wall-clock is worked out.

    Args:
        labels: of the methods that can be played over it.
        topologies: among which to choose.
    """

    labels: Sequence[str]
    topologies: Sequence[str]

    def html(self) -> str:
        """A slider and a number for each quantity: the one to play with, the other to be exact."""
        sliders = "".join(
            (
                _slider("bandwidth", "Bandwidth up and down, Mbit/s", low=-1, high=6, value=100),
                _slider("latency", "Latency one way, ms", low=-1, high=4, value=50),
                _slider("step", "Inner step of a worker, ms", low=0, high=5, value=100),
            )
        )
        topologies = "".join(f"<option>{escape(name)}</option>" for name in self.topologies)
        return (
            f'<div class="controls" id="link"><fieldset><legend>Link</legend>{sliders}'
            '<label class="field"><span>Who sends to whom</span>'
            f'<select id="topology">{topologies}</select></label></fieldset>'
            '<p class="told" id="link-told" role="status"></p></div>'
        )


def _slider(name: str, label: str, *, low: float, high: float, value: float) -> str:
    return (
        f'<label class="field" for="{name}"><span>{label}</span><span class="pair">'
        f'<input type="range" id="{name}-range" aria-label="{label}, slider" min="{low}" '
        f'max="{high}" step="0.02" value="{math.log10(value):.2f}">'
        f'<input type="number" id="{name}" min="0" step="any" value="{value:g}"></span></label>'
    )
