"""Tables of the settings in which methods differ, and of those that they share."""

from collections.abc import Collection, Mapping, Sequence
from typing import Final

from thinwire.report.blocks import TextTable
from thinwire.report.pareto import first_shown
from thinwire.runs.variants import Variant, differing

_SYMBOLS: Final = {"workers": "K", "sync_every": "H"}


def differences_table(variants: Sequence[Variant]) -> TextTable:
    """A row for each method, a column for each part in which they differ, most values first.

    Settings that are equal in all methods that have them, such as the betas of AdamW, are in
    `shared_table`.
    """
    settings = [variant.settings for variant in variants]
    parts: dict[str, list[str]] = {}
    for name in _differing_fields(settings):
        parts.setdefault(_part(name), []).append(name)
    columns = {part: [_text(part, its, names) for its in settings] for part, names in parts.items()}
    by_worth = sorted(columns, key=lambda part: -len(set(columns[part])))
    head = ("method", *(_SYMBOLS.get(part, part) for part in by_worth))
    shown = first_shown(variants)
    return TextTable(
        title="What differed",
        name="differences",
        head=head,
        rows=tuple(
            (variant.label, *(columns[part][index] for part in by_worth))
            for index, variant in enumerate(variants)
        ),
        main=head[1:3],
        rest=[index for index in range(len(variants)) if index not in shown],
    )


def shared_table(variants: Sequence[Variant]) -> TextTable:
    """Fields of the configurations that are the same for all methods that have them."""
    settings = [variant.settings for variant in variants]
    values = {name: value for its in settings for name, value in its.items()}
    apart = _differing_fields(settings)
    return TextTable(
        title="Settings that all have in common, or all with the same part",
        head=("field", "value"),
        rows=tuple((name, values[name]) for name in sorted(values) if name not in apart),
    )


def _part(name: str) -> str:
    """`inner` of `method.inner.lr`."""
    return name.removeprefix("method.").partition(".")[0]


def _text(part: str, its: Mapping[str, str], names: Collection[str]) -> str:
    """Kind of the part of one method, and its other settings that differ.

    >>> names = ("method.codec.bits", "method.codec.grid.kind", "method.codec.kind")
    >>> _text("codec", dict(zip(names, ("2", "Linear", "Quantise"))), names)
    'Quantise, bits 2, grid Linear'
    """
    found: list[str] = []
    for name in sorted(names, key=lambda name: (name.count("."), name)):
        if name in its:
            inner = name.removeprefix("method.").removeprefix(part).removesuffix(".kind")
            if name.endswith(".kind") and not inner.strip("."):
                found.insert(0, its[name])
            else:
                found.append(f"{inner.strip('.')} {its[name]}".strip())
    return ", ".join(found) or "-"


def _differing_fields(settings: Sequence[Mapping[str, str]]) -> list[str]:
    """Fields with several values, and kinds of parts that only some methods have."""
    return [
        name
        for name in differing(settings)
        if name.endswith(".kind") or len({its[name] for its in settings if name in its}) > 1
    ]
