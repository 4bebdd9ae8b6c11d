"""Speed and memory on this machine, as ratios to a named baseline: see ../bench.py."""
