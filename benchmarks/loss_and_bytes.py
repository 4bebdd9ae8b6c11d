"""Loss against bytes sent, from results/wire-claims.json: the picture of the README.

python benchmarks/loss_and_bytes.py docs/pictures/loss-and-bytes.png
"""

import json
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import plotly.graph_objects as go
from picture import COLOURS, write_picture

RESULTS = Path(__file__).parent / "results" / "wire-claims.json"
# What is drawn: colour by what is inside, and the side on which a label has room.
FAMILIES = {
    "AdamW inside": {
        "ddp, AdamW": ("data parallel", "middle left"),
        "diloco": ("DiLoCo", "middle left"),
        "streaming_diloco, E3M0": ("Streaming DiLoCo, 4 bits", "middle left"),
        "sparseloco, k=128": ("SparseLoCo, 1/32", "middle right"),
    },
    "Muon inside": {
        "ddp, Muon": ("data parallel", "middle left"),
        "muloco": ("MuLoCo", "middle left"),
        "streaming_muloco, E3M0": ("streaming MuLoCo, 4 bits", "middle right"),
        "muloco, 2 bit": ("MuLoCo, 2 bits", "middle left"),
        "muloco, 1 bit, H=30": ("MuLoCo, 1 bit, H=30", "middle right"),
        "sparse_muloco, k=128": ("sparse MuLoCo, 1/32", "middle right"),
    },
}


def main() -> None:
    rows = json.loads(RESULTS.read_text())["rows"]
    write_picture(figure(rows), Path(sys.argv[1]), height=520)


def figure(rows: Mapping[str, Any]) -> Any:
    drawn = go.Figure()
    for colour, (family, arms) in zip(COLOURS, FAMILIES.items(), strict=False):
        drawn.add_scatter(
            name=family,
            x=[rows[arm]["sent_bytes_per_worker"] / 1e6 for arm in arms],
            y=[rows[arm]["val_loss_mean"] for arm in arms],
            error_y={"array": [rows[arm]["val_loss_stderr"] or 0 for arm in arms]},
            mode="markers+text",
            # A blank keeps the text off its mark.
            text=[f" {label} " for label, _ in arms.values()],
            textposition=[side for _, side in arms.values()],
            textfont={"color": colour, "size": 13},
            marker={"color": colour, "size": 9},
        )
    drawn.update_xaxes(
        type="log",
        dtick=1,
        range=[-0.3, 3.4],
        title="MB sent by each worker in the run (log scale)",
    )
    drawn.update_yaxes(title="validation loss, nats per byte (lower is better)")
    drawn.update_layout(legend={"x": 0.99, "y": 0.99, "xanchor": "right"})
    return drawn


if __name__ == "__main__":
    main()
