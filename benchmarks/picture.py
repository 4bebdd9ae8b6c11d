"""Figures for documents: a headless Chromium lays out a plotly figure and writes it as a PNG.

Needs plotly (the extra `dev`) and a program called chromium, as in Debian's package.
"""

import shutil
import subprocess
import tempfile
from pathlib import Path
from typing import Any

COLOURS = ("#1f6feb", "#d1242f", "#1a7f37", "#9a6700", "#8250df", "#57606a")


def write_picture(figure: Any, file: Path, *, width: int = 960, height: int = 460) -> None:
    """Write `figure` to `file`, with two dots per pixel."""
    chromium = shutil.which("chromium") or shutil.which("google-chrome")
    if chromium is None:
        raise SystemExit("cannot draw; because there is no chromium; do: apt install chromium")
    figure.update_layout(
        template="plotly_white",
        width=width,
        height=height,
        margin={"l": 70, "r": 20, "t": 50, "b": 60},
        font={"family": "DejaVu Sans, sans-serif", "size": 14},
    )
    with tempfile.TemporaryDirectory() as folder:
        page = Path(folder) / "figure.html"
        body = figure.to_html(include_plotlyjs=True, full_html=False, config={"staticPlot": True})
        page.write_text(f"<!doctype html><meta charset=utf-8><body style='margin:0'>{body}")
        file.parent.mkdir(parents=True, exist_ok=True)
        command = [
            chromium,
            "--headless",
            "--no-sandbox",
            "--hide-scrollbars",
            f"--user-data-dir={folder}/user",
            "--force-device-scale-factor=2",
            "--virtual-time-budget=5000",
            f"--window-size={width},{height}",
            f"--screenshot={file.resolve()}",
            page.as_uri(),
        ]
        subprocess.run(command, check=True, capture_output=True, timeout=120)
