"""What a round of real processes costs as they become many: seconds and requests to a hub.

python benchmarks/many_workers_real.py OUT       resumable

Processes are forked after torch is imported, so that many fit into memory. They train for six
rounds over `thinwire hub` (SeaweedFS, TLS, sealed payloads) on the same machine: 65 numbers by
gather, or 266,240 by reduce-scatter. If workers die, a tenth is killed in the third round and as
many in the fifth, after they sent their shards and before they send the shard that they own. The
run fails unless all digests are equal and, if none dies, bytes of messages match the plan.
"""

import json
import multiprocessing
import os
import signal
import statistics
import sys
import time
from dataclasses import replace
from itertools import count
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import obstore.store  # noqa: F401 - before processes are forked
import torch

import thinwire as tw
import thinwire.elastic.session
from setting import write_runs
from thinwire import presets
from thinwire.elastic.timeouts import ElasticOptions
from thinwire.exchange import Gather, ReduceScatter
from thinwire.plan.shape import Shape
from thinwire.plan.traffic import traffic
from thinwire.security.sealing import SEAL_NBYTES
from thinwire.transport import wrapped

sys.path.append(str(Path(__file__).parents[1] / "tests"))

from hub_process import SECRET, hub

EXCHANGES = {"gather": Gather(), "reduce-scatter": ReduceScatter()}
CASES = [("gather", workers, False) for workers in (8, 16, 32, 64)]
CASES += [("reduce-scatter", 32, False), ("reduce-scatter", 32, True)]
CASES += [("reduce-scatter", 64, False), ("reduce-scatter", 64, True)]
ROUNDS, TRAIN_S, EVERY, FATAL = 6, 5.0, 2, (3, 5)


def method(exchange: str) -> tw.Method:
    return replace(presets.diloco(), sync_every=EVERY, exchange=EXCHANGES[exchange])


def model(exchange: str) -> torch.nn.Module:
    torch.manual_seed(0)
    return torch.nn.Linear(64, 1 if exchange == "gather" else 4096)


def doomed(connection: Any, last: int) -> None:
    """Kill this process in exchange number `last`, once shards were exchanged."""
    run, numbers = connection.run, count(1)

    def dying(posts: Any, tag: Any) -> Any:
        def carry(post: Any) -> Any:
            received = yield post
            os.kill(os.getpid(), signal.SIGKILL)
            return received

        return run(wrapped(posts, carry) if next(numbers) == last else posts, tag)

    connection.run = dying


def work(address: str, name: str, exchange: str, least: int, last: int, results: Any) -> None:
    """One of at least `least` workers, to the end, or to exchange `last` if that is not 0."""
    torch.set_num_threads(1)
    net, described, marks = model(exchange), method(exchange), list[Any]()
    optimizer = described.inner.build(net)
    connection = tw.transport.Elastic(
        address,
        run="many",
        identity=name,
        token=SECRET,
        options=ElasticOptions(min_workers=least),
    )
    if last:
        doomed(connection, last)
    outer = tw.OuterLoop(net, optimizer, described, transport=connection)
    outer.join()
    while outer.inner_step < EVERY * ROUNDS:
        if outer.inner_step % EVERY == 0:
            marks.append((time.monotonic(), outer.stats))
        time.sleep(TRAIN_S / EVERY)
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


def measured(address: str, exchange: str, workers: int, *, die: bool) -> dict[str, Any]:
    """One run; time and requests of its rounds, from the second to the last."""
    context = multiprocessing.get_context("fork")
    results, running = context.SimpleQueue(), list[Any]()
    # The first optimizer makes torch import for seconds: do it here, once for all processes.
    method(exchange).inner.build(model(exchange))
    # Every fifth worker dies, alternately in one round and in the other.
    lasts = {n: FATAL[n % 10 // 5] for n in range(workers) if die and n % 5 == 3}
    least = workers - len(lasts)
    began_s = time.monotonic()
    for number in range(workers):
        given = address, f"w{number:03}", exchange, least, lasts.get(number, 0), results
        running.append(context.Process(target=work, args=given))
        running[-1].start()
    found = [results.get() for _ in range(least)]
    for process in running:
        process.join()
    shape = Shape.of_model(model(exchange))
    plans = [
        traffic(method(exchange), shape, workers=workers, rank=rank, added_nbytes=SEAL_NBYTES)
        for rank in range(workers)
    ]
    assert len({each["digest"] for each in found}) == 1, found
    if not die and not any(each["lost"] for each in found):
        numbers = {(each["sent"], each["received"]) for each in found}
        assert numbers == {(p.sent_nbytes(), p.received_nbytes()) for p in plans}, numbers
    plan = plans[0]
    every = {kind: [each["requests"][kind] for each in found] for kind in found[0]["requests"]}
    return {
        "workers": workers,
        "killed": len(lasts),
        "wall_s": round(time.monotonic() - began_s, 1),
        "round_s": round(statistics.median(each["round_s"] for each in found), 2),
        "rounds_lost": max(each["lost"] for each in found),
        "planned": {"puts": plan.puts(), "gets": plan.gets()},
        "sent_bytes": plan.sent_nbytes(),
        "received_bytes": plan.received_nbytes(),
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
    row |= {"puts": plan.puts(), "gets": plan.gets()}
    return row | {"sent": plan.sent_nbytes(), "received": plan.received_nbytes()}


def main() -> None:
    out, runs = Path(sys.argv[1]), dict[str, list[dict[str, Any]]]()
    out.mkdir(parents=True, exist_ok=True)
    of_plan = [planned(each, k) for each in (Gather(), ReduceScatter()) for k in (8, 64, 256, 1024)]
    for exchange, workers, die in CASES:
        name = f"{exchange}, {workers} workers" + (", two tenths die" if die else "")
        file = out / f"{name.replace(', ', '-').replace(' ', '-')}.json"
        if not file.exists():
            with TemporaryDirectory() as folder, hub(Path(folder)) as started:
                row = measured(started.address, exchange, workers, die=die)
            file.write_text(json.dumps(row))
        runs[name] = [json.loads(file.read_text())]
        print(name, runs[name], flush=True)
        write_runs(__file__, str(__doc__).splitlines()[0], runs, planned=of_plan)


if __name__ == "__main__":
    main()
