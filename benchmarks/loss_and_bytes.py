"""Loss against bytes with 4, 8 and 16 workers, from results/claims-small.json: README's picture.

Draws arms with more than four workers if a search found rates for them.

python benchmarks/loss_and_bytes.py docs/pictures/loss-and-bytes.png
"""

import json
import sys
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any

import plotly.graph_objects as go

from claim_settings import SMALL, searched
from picture import COLOURS, write_picture

RESULTS = Path(__file__).parent / "results" / "claims-small.json"
# Arms to draw with four workers: label, and the side on which the label has room.
ARMS = {
    "ddp": ("data parallel, AdamW", "middle left"),
    "diloco": ("DiLoCo", "middle left"),
    "streaming_diloco": ("Streaming DiLoCo, 4 bits", "bottom left"),
    "noloco": ("NoLoCo", "middle left"),
    "sparseloco": ("SparseLoCo, 1/32", "bottom right"),
    "sparseloco 1/64": ("1/64", "top right"),
    "sparseloco 1/128": ("1/128", "top right"),
    "demo": ("DeMo", "top left"),
    "ddp-muon": ("data parallel, Muon", "bottom left"),
    "muloco": ("MuLoCo", "bottom center"),
    "muloco 4 bit, own rates": ("4 bits", "top center"),
    "muloco 2 bit, own rates": ("2 bits", "top center"),
    "muloco 1 bit, own rates": ("1 bit", "bottom left"),
    "sparse_muloco": ("sparse MuLoCo, 1/32", "middle left"),
    "sparse_muloco 1/8": ("1/8", "bottom left"),
    "sparse_muloco 1/64": ("1/64", "middle left"),
    "sparse_muloco 1/128": ("1/128", "middle left"),
}
# Arms to draw with more workers: the same mark in another colour tells them.
LARGER_TEAMS = {
    8: ("diloco", "noloco", "sparseloco", "muloco", "muloco 1 bit", "sparse_muloco"),
    16: ("diloco", "sparseloco", "muloco", "muloco 1 bit", "sparse_muloco"),
}
LARGER_LABELS = {
    "diloco": ("DiLoCo", "middle left"),
    "muloco": ("MuLoCo", "top center"),
    "muloco 1 bit": ("1 bit", "top right"),
    "sparse_muloco": ("sparse", "bottom left"),
    "sparseloco": ("SparseLoCo", "middle left"),
    "noloco": ("NoLoCo", "middle left"),
}
MUON = ("muon", "muloco")


def main() -> None:
    rows = json.loads(RESULTS.read_text())["rows"]
    write_picture(figure(rows), Path(sys.argv[1]), height=600)


def figure(rows: Mapping[str, Any]) -> Any:
    drawn, own_rates = go.Figure(), searched(SMALL)
    teams = {4: tuple(ARMS)} | {
        workers: tuple(f"{arm} K={workers}" for arm in arms if f"{arm} K={workers}" in own_rates)
        for workers, arms in LARGER_TEAMS.items()
    }
    for colour, (workers, names) in zip(COLOURS, teams.items(), strict=False):
        own = {name: rows[name] | {"moved_bytes": moved_bytes(name, rows[name])} for name in names}
        front = list(front_of(own.values()))
        drawn.add_scatter(
            x=[row["moved_bytes"] / 1e6 for row in front],
            y=[_loss(row) for row in front],
            mode="lines",
            line={"color": colour, "width": 1.5, "dash": "dot"},
            showlegend=False,
        )
        for inside, symbol in {"AdamW": "circle", "Muon": "square"}.items():
            arms = [name for name in names if is_muon(name) == (inside == "Muon")]
            labels = [_label(name) for name in arms]
            drawn.add_scatter(
                name=f"K={workers}, {inside} inside",
                x=[own[name]["moved_bytes"] / 1e6 for name in arms],
                y=[_loss(own[name]) for name in arms],
                error_y={
                    "array": [own[name]["val_loss"]["standard_error"] for name in arms],
                    "thickness": 1,
                },
                mode="markers+text",
                # A blank keeps the text off its mark.
                text=[f" {label} " for label, _ in labels],
                textposition=[side for _, side in labels],
                textfont={"color": colour, "size": 12},
                marker={"color": colour, "size": 9, "symbol": symbol},
            )
    drawn.update_xaxes(
        type="log",
        dtick=1,
        title="MB up + down of a worker in 480 steps, through a store (log scale)",
    )
    drawn.update_yaxes(title="validation loss, nats per byte (lower is better)")
    drawn.update_layout(legend={"x": 0.99, "y": 0.99, "xanchor": "right"})
    return drawn


def moved_bytes(arm: str, row: Mapping[str, Any]) -> int:
    """Bytes up + down through a store; for data parallelism, those of a 16-bit all-reduce."""
    if arm.startswith("ddp"):
        return 2 * row["all_reduce_bytes_each_way"]
    return row["sent_bytes_per_worker"] + row["received_bytes_per_worker"]


def is_muon(arm: str) -> bool:
    """Whether the inner optimizer is Muon.

    >>> is_muon("sparse_muloco 1/8"), is_muon("sparseloco")
    (True, False)
    """
    return any(name in arm for name in MUON)


def _label(arm: str) -> tuple[str, str]:
    if arm in ARMS:
        return ARMS[arm]
    return LARGER_LABELS.get(arm.split(" K=")[0], ("", "middle left"))


def _loss(row: Mapping[str, Any]) -> float:
    return row["val_loss"]["mean"]


def front_of(rows: Iterable[Mapping[str, Any]]) -> Iterator[Mapping[str, Any]]:
    """The rows that no other beats in loss with as few bytes, from few bytes to many.

    >>> def row(moved, loss): return {"moved_bytes": moved, "val_loss": {"mean": loss}}
    >>> [_loss(r) for r in front_of([row(2, 1.0), row(1, 2.0), row(3, 1.5)])]
    [2.0, 1.0]
    """
    best = float("inf")
    for row in sorted(rows, key=lambda row: row["moved_bytes"]):
        if _loss(row) < best:
            best = _loss(row)
            yield row


if __name__ == "__main__":
    main()
