"""MuLoCo's idealised wall-clock of a 15B run, by this planner's simulation, beside the printed one.

python benchmarks/muloco_wall_clock.py OUT.json       seconds on one core

Published: arXiv 2505.23725, hours of training over links of 10 and 6400 Gbit/s.

Our reading: a step takes 1.0 s whatever the batch; all parameters are exchanged once in 16 bits,
without overlap and without a ring's factor of 2, after every step for data parallelism and for
K = 1 (within that worker), and after every 30 for K = 16; 304.6 billion tokens.
"""

import json
import sys
import time
from pathlib import Path
from typing import Any

from setting import setting
from thinwire.plan.compute import Compute
from thinwire.plan.link import Link
from thinwire.plan.simulate import Scenario, simulate
from thinwire.plan.traffic import MessageSpec, Traffic

PARAMETERS, TOKENS, STEP_S = 15 * 10**9, 304.6e9, 1.0
NBYTES = 2 * PARAMETERS
METHODS = {  # tokens of all workers in a step, inner steps from one exchange to the next
    "DP Muon": (4.2e6, 1),
    "DP AdamW": (2.1e6, 1),
    "MuLoCo K=1": (16.8e6, 1),
    "MuLoCo K=16": (8.4e6, 30),
    "DiLoCo K=16": (4.2e6, 30),
}
PUBLISHED_H = {
    10: dict(zip(METHODS, (510, 1015, 125, 18, 37), strict=True)),
    6400: dict(zip(METHODS, (20.7, 41, 5.2, 10, 19.5), strict=True)),
}
AT_MOST = 0.06


def row(gbit_per_s: int, method: str, published_h: float) -> dict[str, Any]:
    batch_tokens, sync_every = METHODS[method]
    steps = round(TOKENS / batch_tokens)
    scenario = Scenario(
        traffic=once_over_the_link(sync_every),
        compute=Compute(step_s=STEP_S),
        link=Link.of(gbit_per_s * 1e9),
    )
    outcome = simulate(scenario, steps=steps)
    hours = outcome.wall_s / 3600
    return {
        "gbit_per_s": gbit_per_s,
        "method": method,
        "steps": steps,
        "hours": hours,
        "closed_form_hours": closed_form_s(gbit_per_s, steps, sync_every) / 3600,
        "published_hours": published_h,
        "off": hours / published_h - 1,
        "utilisation": outcome.utilisation,
    }


def once_over_the_link(sync_every: int) -> Traffic:
    """One message without a header, which crosses the link between two workers once."""
    message = MessageSpec(
        offset=0,
        first=sync_every,
        parameters=PARAMETERS,
        payload_nbytes=NBYTES,
        result_nbytes=0,
        sent_nbytes=NBYTES,
        received_nbytes=NBYTES,
        sent_count=1,
        received_count=1,
        exchange="gather",
    )
    return Traffic(sync_every=sync_every, tau=0, messages=(message,), workers=2)


def closed_form_s(gbit_per_s: int, steps: int, sync_every: int) -> float:
    """S steps and ceil(S / H) exchanges, one after the other."""
    exchange_s = 8 * NBYTES / (gbit_per_s * 1e9)
    return steps * STEP_S + -(-steps // sync_every) * exchange_s


def main() -> None:
    started_s = time.perf_counter()
    rows = [
        row(rate, method, hours)
        for rate, published in PUBLISHED_H.items()
        for method, hours in published.items()
    ]
    print(f"{'Gbit/s':>6}  {'method':14}{'hours':>8}{'published':>11}{'off':>8}")
    for r in rows:
        line = f"{r['gbit_per_s']:6}  {r['method']:14}{r['hours']:8.1f}{r['published_hours']:11}"
        print(f"{line}{r['off']:+8.1%}")
    worst = max(abs(r["off"]) for r in rows)
    print(f"at most {worst:.1%} off; {time.perf_counter() - started_s:.1f} s")
    result = {
        "what": "hours of a 15B run over two links, simulated, beside those of arXiv 2505.23725",
        "command": "python benchmarks/muloco_wall_clock.py OUT.json",
        **setting(),
        "worst_off": worst,
        "rows": rows,
    }
    Path(sys.argv[1]).write_text(json.dumps(result, indent=2) + "\n")
    sys.exit(worst > AT_MOST)


if __name__ == "__main__":
    main()
