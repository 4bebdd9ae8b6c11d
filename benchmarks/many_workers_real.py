"""What a round of real processes costs as they become many: seconds and requests to a folder.

python benchmarks/many_workers_real.py OUT       resumable

Processes that are forked once torch is imported, so that many fit into memory, train a model of 65
numbers for six rounds; all of them share a folder. Bytes and requests of messages are those of the
plan, and all digests are equal, or the run fails.
"""

import json
import multiprocessing
import statistics
import sys
import time
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch

import thinwire as tw
from setting import write_runs
from thinwire import presets
from thinwire.elastic.timeouts import ElasticOptions
from thinwire.exchange import Gather, ReduceScatter
from thinwire.plan.shape import Shape
from thinwire.plan.traffic import traffic

WORKERS, ROUNDS, TRAIN_S = (8, 16, 32, 64), 6, 5.0
METHOD = replace(presets.diloco(), sync_every=2, exchange=Gather())


def model() -> torch.nn.Module:
    torch.manual_seed(0)
    return torch.nn.Linear(64, 1)


def work(address: str, name: str, workers: int, results: Any) -> None:
    """One worker, from joining to its end."""
    torch.set_num_threads(1)
    net, steps, marks = model(), METHOD.sync_every * ROUNDS, list[Any]()
    optimizer = METHOD.inner.build(net)
    connection = tw.transport.Elastic(
        address, run="many", identity=name, options=ElasticOptions(min_workers=workers)
    )
    outer = tw.OuterLoop(net, optimizer, METHOD, transport=connection)
    outer.join()
    while outer.inner_step < steps:
        if outer.inner_step % METHOD.sync_every == 0:
            marks.append((time.monotonic(), outer.stats))
        time.sleep(TRAIN_S / METHOD.sync_every)
        net(torch.full((4, 64), 0.01 * outer.share)).square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()
        outer.step()
    outer.flush()
    (first_s, first), (last_s, last) = marks[1], marks[-1]
    rounds = len(marks) - 2
    requests = {k: (n - first.requests[k]) / rounds for k, n in last.requests.items()}
    found = {"requests": requests, "round_s": (last_s - first_s) / rounds}
    found["lost"] = rounds - (last.rounds - first.rounds)
    found["sent"] = (last.sent_bytes - first.sent_bytes) / rounds
    found["received"] = (last.received_bytes - first.received_bytes) / rounds
    found["digest"] = outer.digest()
    outer.close()
    results.put(found)


def measured(folder: Path, workers: int) -> dict[str, Any]:
    """One run; what its rounds took and asked of the store, from the second to the last."""
    context = multiprocessing.get_context("fork")
    results, address = context.SimpleQueue(), f"file://{folder.resolve()}/store"
    names = [f"w{number:03}" for number in range(workers)]
    running = [context.Process(target=work, args=(address, n, workers, results)) for n in names]
    began_s = time.monotonic()
    for process in running:
        process.start()
    found = [results.get() for _ in running]
    for process in running:
        process.join()
    plan = traffic(METHOD, Shape.of_model(model()), workers=workers)
    assert len({each["digest"] for each in found}) == 1, found
    if not any(each["lost"] for each in found):
        numbers = {(each["sent"], each["received"]) for each in found}
        assert numbers == {(plan.sent_per_round, plan.received_per_round)}, numbers
    every = {kind: [each["requests"][kind] for each in found] for kind in found[0]["requests"]}
    return {
        "workers": workers,
        "wall_s": round(time.monotonic() - began_s, 1),
        "round_s": round(statistics.median(each["round_s"] for each in found), 2),
        "rounds_lost": max(each["lost"] for each in found),
        "planned": {"puts": plan.puts_per_round, "gets": plan.gets_per_round},
        "sent_bytes": plan.sent_per_round,
        "received_bytes": plan.received_per_round,
        "requests": {
            kind: {"median": statistics.median(n), "most": max(n), "all": sum(n)}
            for kind, n in every.items()
        },
    }


def planned(exchange: Gather | ReduceScatter, workers: int) -> dict[str, Any]:
    """What one worker sends and receives in a round of a billion parameters, with 2 bits each."""
    method = replace(presets.muloco(bits=2), exchange=exchange)
    plan = traffic(method, Shape.of_size(10**9, 24), workers=workers)
    row = {"exchange": plan.messages[0].exchange, "workers": workers}
    row |= {"puts": plan.puts_per_round, "gets": plan.gets_per_round}
    return row | {"sent": plan.sent_per_round, "received": plan.received_per_round}


def main() -> None:
    out, runs = Path(sys.argv[1]), dict[str, list[dict[str, Any]]]()
    of_plan = [planned(each, k) for each in (Gather(), ReduceScatter()) for k in (8, 64, 256, 1024)]
    for workers in WORKERS:
        folder = out / str(workers)
        folder.mkdir(parents=True, exist_ok=True)
        file = folder / "result.json"
        if not file.exists():
            file.write_text(json.dumps(measured(folder, workers)))
        runs[f"{workers} workers"] = [json.loads(file.read_text())]
        print(runs[f"{workers} workers"], flush=True)
        write_runs(__file__, str(__doc__).splitlines()[0], runs, planned=of_plan)


if __name__ == "__main__":
    main()
