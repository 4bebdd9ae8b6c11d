"""The tables of settings: what methods differ in, a row for each, and what they have in common."""

from collections.abc import Collection, Mapping, Sequence
from typing import Final

from thinwire.report.blocks import TextTable
from thinwire.report.pareto import first_shown
from thinwire.runs.variants import Variant, differing

_SYMBOLS: Final = {"workers": "K", "sync_every": "H"}


def differences_table(variants: Sequence[Variant]) -> TextTable:
    """A row for each method, a column for each part in which they differ, the most telling first.

    Left out is what follows from the kind of a part, such as the betas of all AdamW: `shared_table`
    has it.
    """
    settings = [variant.settings for variant in variants]
    told = [name for name in differing(settings) if not _follows(name, settings)]
    parts: dict[str, list[str]] = {}
    for name in told:
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
    """Fields of the configurations that are the same for all methods, or for those of a part."""
    settings = [variant.settings for variant in variants]
    apart = set(differing(settings))
    rows = [
        (name, _by_kind(name, settings) if name in apart else next(iter(_values(name, settings))))
        for name in sorted({name for its in settings for name in its})
        if name not in apart or _follows(name, settings)
    ]
    return TextTable(
        title="Settings that all have in common, or all with the same part",
        head=("field", "value"),
        rows=tuple(rows),
    )


def _part(name: str) -> str:
    """`inner` of `method.inner.lr`."""
    return name.removeprefix("method.").partition(".")[0]


def _text(part: str, its: Mapping[str, str], names: Collection[str]) -> str:
    """Of one method: the kind of the part, and what else differs in it.

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


def _kind_field(name: str, settings: Sequence[Mapping[str, str]]) -> str | None:
    """The field that says what kind of part `name` belongs to."""
    above = name.removesuffix(".kind")
    while "." in above:
        above = above.rpartition(".")[0]
        if any(f"{above}.kind" in its for its in settings):
            return f"{above}.kind"
    return None


def _values(name: str, settings: Sequence[Mapping[str, str]]) -> Mapping[str, None]:
    return dict.fromkeys(its[name] for its in settings if name in its)


def _kinds(name: str, settings: Sequence[Mapping[str, str]]) -> Mapping[str, set[str | None]]:
    """The values of a field by the kind of its part; None where it is missing."""
    field, found = _kind_field(name, settings), dict[str, set[str | None]]()
    for its in settings if field is not None else ():
        found.setdefault(its.get(field or "", "-"), set()).add(its.get(name))
    return found


def _follows(name: str, settings: Sequence[Mapping[str, str]]) -> bool:
    """Whether the kind of its part says the value of a field."""
    kinds = _kinds(name, settings)
    return bool(kinds) and all(len(values) == 1 for values in kinds.values())


def _by_kind(name: str, settings: Sequence[Mapping[str, str]]) -> str:
    kinds = _kinds(name, settings).items()
    return ", ".join(f"{value} of {kind}" for kind, (value,) in kinds if value is not None)
