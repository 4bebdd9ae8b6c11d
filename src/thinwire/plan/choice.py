"""What can be chosen: a preset and the numbers that a command line gives it."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Final

if TYPE_CHECKING:
    from collections.abc import Iterator

    from thinwire.method import Method

INTERVALS: Final = (5, 7, 10, 15, 20, 30, 40, 50, 64, 80, 100, 128, 160, 200, 256)
"""H that are tried. Losses were measured up to 64; longer rounds are told apart."""

_TAUS: Final = (1, 2, 5)
_LAYERS: Final = (1, 3)
_DENSITIES: Final = (1 / 8, 1 / 32, 1 / 64, 1 / 128)
_BITS: Final = (16, 4, 2, 1)
# MuLoCo's inner rates are published for these.
_LEAST_PUBLISHED, _MOST_PUBLISHED = 150e6, 15e9


@dataclass(frozen=True, kw_only=True, slots=True)
class Choice:
    """A preset and numbers of it, as `--method` has them; None is left to the preset.

    Args:
        preset: its name.
        sync_every: H.
        bits: of a number on the wire.
        density: share of the numbers that is sent.
        tau: inner steps that an exchange may take.
        layers: in a fragment.
        exchange: gather or reduce_scatter.
        parameters: for which a preset chooses its inner optimizer.

    >>> choice = Choice(preset="muloco", bits=1, sync_every=64)
    >>> choice.text, choice.python
    ('muloco:bits=1:sync_every=64', 'tw.presets.muloco(bits=1, sync_every=64)')
    """

    preset: str
    sync_every: int | None = None
    bits: int | None = None
    density: float | None = None
    tau: int | None = None
    layers: int | None = None
    exchange: str | None = None
    parameters: float | None = None

    @property
    def text(self) -> str:
        """The value of `--method`."""
        return ":".join((self.preset, *(f"{name}={value}" for name, value in self._arguments())))

    @property
    def label(self) -> str:
        """`text` without H and the size of the model, for tables that have both elsewhere."""
        return replace(self, sync_every=None, parameters=None).text

    @property
    def python(self) -> str:
        """The same as an expression, with thinwire as `tw`."""
        return f"tw.presets.{self.preset}({', '.join(self._keywords())})"

    def method(self) -> Method:
        """The method."""
        from thinwire import presets

        return presets.from_text(self.text)

    @property
    def has_rounds(self) -> bool:
        """Whether H can be chosen."""
        return self.preset not in ("ddp", "demo")

    @property
    def is_alone(self) -> bool:
        """Whether the preset has one exchange only."""
        return self.preset in ("ddp", "demo", "noloco")

    @property
    def is_coded(self) -> bool:
        """Whether numbers are rounded, or left out, before they are sent."""
        return self.preset not in ("ddp", "diloco", "noloco") and (self.preset, self.bits) != (
            "muloco",
            None,
        )

    def _arguments(self) -> Iterator[tuple[str, str]]:
        if self.parameters is not None:
            yield "parameters", _size_text(self.parameters)
        if self.bits is not None:
            yield "bits", str(self.bits)
        if self.density is not None:
            yield "density", f"1/{round(1 / self.density)}"
        for name in ("layers", "tau"):
            value: int | None = getattr(self, name)
            if value is not None:
                yield name, str(value)
        if self.sync_every is not None:
            yield "sync_every", str(self.sync_every)
        if self.exchange is not None:
            yield "exchange", self.exchange

    def _keywords(self) -> Iterator[str]:
        rules = {"gather": "tw.Gather()", "reduce_scatter": "tw.ReduceScatter()"}
        for name, value in self._arguments():
            yield f"{name}={rules.get(value, value)}"


def choices(parameters: float) -> Iterator[Choice]:
    """All choices for a model of so many parameters, each at its preset's H.

    Left out is decoupled momentum as released, which is there to be reproduced; and a
    reduce-scatter of codes, which rounds twice, for no run says what that costs.
    """
    yield Choice(preset="ddp")
    yield Choice(preset="demo")
    is_published = _LEAST_PUBLISHED <= parameters <= _MOST_PUBLISHED
    muon = Choice(preset="muloco", parameters=parameters if is_published else None)
    for dense in (Choice(preset="diloco"), muon):
        for exchange in (None, "gather", "reduce_scatter"):
            yield replace(dense, exchange=exchange)
    coded = [replace(muon, bits=bits) for bits in _BITS]
    coded += [
        Choice(preset=preset, density=density)
        for preset in ("sparseloco", "sparse_muloco")
        for density in _DENSITIES
    ]
    coded += [
        Choice(preset=preset, layers=layers, tau=tau)
        for preset in ("streaming_diloco", "streaming_muloco")
        for layers in _LAYERS
        for tau in _TAUS
    ]
    for choice in coded:
        for exchange in (None, "gather"):
            yield replace(choice, exchange=exchange)
    yield Choice(preset="noloco")


def _size_text(parameters: float) -> str:
    """Three digits and a power of ten that both a command line and Python read.

    >>> _size_text(416_123_456), _size_text(15e9)
    ('416e6', '15e9')
    """
    power = 9 if parameters >= 1e9 else 6
    return f"{float(f'{parameters:.3g}') / 10**power:g}e{power}"
