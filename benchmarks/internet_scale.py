"""A run of K workers and P parameters over a store, on paper: what breaks first.

python benchmarks/internet_scale.py

Bytes and requests are the planner's, for MuLoCo with 2 bits and one fragment. A worker of any size
trains for 1000 s in a round; its requests take 50 ms, 16 at a time; its link has 1 Gbit/s each way.
One worker in a hundred is lost in an hour, a round with a loss waits 10 s, and the replacement
reads 8 bytes a parameter before it trains. Egress from the store costs 0.09 dollars a GB, and
nothing in some stores (aws.amazon.com/s3/pricing, to the internet). S3 takes 3,500 writes a second
below a prefix, 5 GiB in one write, and uploads in 10,000 parts (docs.aws.amazon.com/AmazonS3,
"Performance guidelines" and "Uploading objects"), here of 64 MiB.
"""

import math
from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from setting import write_runs
from thinwire import presets
from thinwire.elastic.alive import PER_LOSS
from thinwire.exchange import Gather, ReduceScatter
from thinwire.plan.job import SIGN_OF_LIFE_S, Prices, meeting_requests
from thinwire.plan.shape import Shape
from thinwire.plan.traffic import traffic

WORKERS, PARAMETERS = (64, 1024, 10_000), {10**9: 24, 10**11: 96, 10**12: 128}
TRAIN_S, REQUEST_S, AT_ONCE, RATE_BYTES_PER_S = 1000.0, 0.05, 16, 1e9 / 8
LOST_PER_HOUR, DAY_S = 0.01, 86400.0
SNAPSHOT_NBYTES, EGRESS_PER_GB = 8, 0.09
PUT_NBYTES, PART_NBYTES, PARTS = 5 << 30, 64 << 20, 10_000
PUTS_PER_S = 3500
RAISED = str.maketrans("0123456789", "⁰¹²³⁴⁵⁶⁷⁸⁹")
EXCHANGES = {"gather": Gather(), "reduce-scatter": ReduceScatter()}


def row(exchange: str, workers: int, parameters: int) -> dict[str, Any]:
    """One run, and the limits that it breaks."""
    shape = Shape.of_size(parameters, PARAMETERS[parameters])
    plan = traffic(
        replace(presets.muloco(bits=2), exchange=EXCHANGES[exchange]), shape, workers=workers
    )
    up, down, gets = plan.sent_nbytes(), plan.received_nbytes(), plan.gets()
    moved_s, asked_s = max(up, down) / RATE_BYTES_PER_S, gets * REQUEST_S / AT_ONCE
    losses = LOST_PER_HOUR * workers * TRAIN_S / 3600
    round_s = TRAIN_S + max(moved_s, asked_s)
    # One wait covers all losses of a round.
    round_s += PER_LOSS * SIGN_OF_LIFE_S * -math.expm1(-losses)
    healed_s = SNAPSHOT_NBYTES * parameters / RATE_BYTES_PER_S
    healing = min(1.0, LOST_PER_HOUR * healed_s / 3600)
    signs_per_s, prices = workers / SIGN_OF_LIFE_S, Prices()
    puts, read, _ = meeting_requests(workers)
    parts = plan.messages[0].payload_nbytes / PART_NBYTES
    parts = math.ceil(parts) if parts * PART_NBYTES > PUT_NBYTES else 0
    puts, gets_of_all = workers * (plan.puts() + parts) + puts, workers * gets + read
    cost = prices.put_per_million * (puts * DAY_S / round_s + signs_per_s * DAY_S)
    cost += prices.get_per_million * gets_of_all * DAY_S / round_s
    left = workers * (down * DAY_S / round_s + 24 * LOST_PER_HOUR * SNAPSHOT_NBYTES * parameters)
    broken = {
        "bandwidth": moved_s > TRAIN_S / 4,
        "size of objects": parts > PARTS,
        "number of requests": asked_s > TRAIN_S / 20,
        "signs of life": signs_per_s > PUTS_PER_S / 2,
        "healing": healing > 1 / 20,
    }
    return {
        "workers": workers,
        "parameters": parameters,
        "up_bytes": up,
        "down_bytes": down,
        "moved_s": round(moved_s, 1),
        "gets": gets,
        "asked_s": round(asked_s, 1),
        "lost_in_a_round": round(losses, 2),
        "lost_in_a_day": round(24 * LOST_PER_HOUR * workers),
        "healed_s": round(healed_s),
        "utilisation": round((1 - healing) * TRAIN_S / round_s, 3),
        "signs_of_life_per_s": round(signs_per_s, 1),
        "dollars_a_day_for_requests": round(cost / 10**6, 2),
        "dollars_a_day_for_egress": round(EGRESS_PER_GB * left / 10**9),
        "dollars_a_day_for_signs": round(prices.put_per_million * signs_per_s * DAY_S / 10**6, 2),
        "breaks": [limit for limit, is_broken in broken.items() if is_broken],
    }


def cells(exchange: str, row: Mapping[str, Any]) -> str:
    """A line of the table in docs/scaling.md."""
    numbers = (row["moved_s"], row["asked_s"], row["healed_s"], row["lost_in_a_day"])
    dollars = (row["dollars_a_day_for_requests"], row["dollars_a_day_for_egress"])
    return " | ".join(
        [
            f"{row['workers']:,}",
            f"10{str(int(math.log10(row['parameters']))).translate(RAISED)}",
            exchange,
            *(f"{float(f'{row[way] / 1e9:.3g}'):,g} GB" for way in ("up_bytes", "down_bytes")),
            *(f"{number:,.0f}" for number in numbers),
            f"{row['utilisation']:.0%}".replace("%", " %"),
            *(f"{each:,.0f}" for each in dollars),
            ", ".join(row["breaks"]),
        ]
    ).strip()


def two_levels(workers: int) -> dict[str, Any]:
    """A billion parameters where groups of sqrt(K) combine, shard owners exchange, and all share.

    Compared with a reduce-scatter, a worker gets fewer objects, but also reads the groups' means.
    """
    gets, one = 3 * (math.isqrt(workers) - 1), row("reduce-scatter", workers, 10**9)
    of_all = workers * DAY_S / TRAIN_S * one["utilisation"]
    spared = Prices().get_per_million * of_all * (one["gets"] - gets)
    return {
        "workers": workers,
        "gets": gets,
        "asked_s": round(gets * REQUEST_S / AT_ONCE, 1),
        "dollars_a_day_less_for_requests": round(spared / 10**6),
        "dollars_a_day_more_for_egress": round(EGRESS_PER_GB * of_all * one["up_bytes"] / 2e9),
    }


def main() -> None:
    runs = dict[str, list[dict[str, Any]]]()
    for exchange in EXCHANGES:
        for workers in WORKERS:
            for parameters in PARAMETERS:
                found = row(exchange, workers, parameters)
                runs[f"{exchange}, {workers} workers, {parameters:.0e} parameters"] = [found]
                print(f"| {cells(exchange, found)} |")
    next_design = [two_levels(workers) for workers in WORKERS]
    command = "python benchmarks/internet_scale.py"
    write_runs(
        __file__, str(__doc__).splitlines()[0], runs, command=command, two_levels=next_design
    )


if __name__ == "__main__":
    main()
