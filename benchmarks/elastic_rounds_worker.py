"""A worker of elastic_rounds.py: its inner steps take a fixed time, and it reports in JSON lines.

It joins once a line arrives on standard input, and runs until it is killed.
"""

import json
import sys
import time
from pathlib import Path
from typing import Any

import torch
from torch import nn

import thinwire as tw
from thinwire.transport import ElasticOptions


def tell(**what: Any) -> None:
    sys.stdout.write(json.dumps(what) + "\n")
    sys.stdout.flush()


def main() -> None:
    given: dict[str, Any] = json.loads(sys.argv[1])
    torch.set_num_threads(1)
    torch.manual_seed(given["seed"])
    width, layers = given["model"]
    model = nn.Sequential(*[nn.Linear(width, width, bias=False) for _ in range(layers)])
    optimizer = torch.optim.SGD(model.parameters())
    transport = connect(given)
    transport.events.listen(lambda event: tell(event=event.describe(), at_s=time.monotonic()))
    outer = tw.OuterLoop(model, optimizer, method(given), transport=transport)
    if given["trace"]:
        trace()
    tell(ready=True)
    sys.stdin.readline()
    joins_s = time.monotonic()
    outer.join()
    while True:
        began_s = time.monotonic()
        if outer.inner_step % given["every"] == 0:
            with torch.no_grad():
                for parameter in model.parameters():
                    parameter.mul_(0.999)
        time.sleep(max(0.0, began_s + given["step_s"] - time.monotonic()))
        stats, (received, sent) = outer.stats, wire_bytes()
        tell(
            joins_s=joins_s,
            began_s=began_s,
            ended_s=time.monotonic(),
            step=outer.inner_step,
            version=stats.rounds,
            workers=outer.workers,
            wait_s=stats.wait_s,
            sent=sent,
            received=received,
            requests=dict(stats.requests),
        )
        outer.step()


def method(given: dict[str, Any]) -> tw.Method:
    fields: dict[str, Any] = {"sync_every": given["every"]}
    if given["payload"] == "2 bits":
        fields |= {"codec": tw.codecs.Quantise(bits=2), "feedback": tw.ErrorFeedback(decay=0.9)}
    return tw.presets.diloco(**fields)


def connect(given: dict[str, Any]) -> Any:
    options = ElasticOptions(min_workers=given["min_workers"])
    if given["engine"] == "lighthouse":
        return tw.transport.Elastic(given["where"], identity=given["name"], options=options)
    from thinwire.elastic.transport import Elastic

    return Elastic(given["where"], run="run", identity=given["name"], options=options)


def wire_bytes() -> tuple[int, int]:
    """Bytes received and sent over this node's line, headers included."""
    lines = Path("/proc/self/net/dev").read_text().splitlines()
    fields = next(line.split(":")[1].split() for line in lines if "wan0:" in line)
    return int(fields[0]), int(fields[8])


def trace() -> None:
    """Report each request to the store with its time and outcome."""
    import obstore

    def traced(name: str, request: Any) -> Any:
        async def asked(store: Any, key: Any, *args: Any, **options: Any) -> Any:
            began_s, outcome = time.monotonic(), "done"
            try:
                return await request(store, key, *args, **options)
            except BaseException as error:
                outcome = type(error).__name__
                raise
            finally:
                nbytes = len(args[0]) if args else None
                ended_s = time.monotonic()
                tell(request=name, key=key, nbytes=nbytes, outcome=outcome, at_s=[began_s, ended_s])

        return asked

    names = {"get": "get_async", "put": "put_async", "head": "head_async", "delete": "delete_async"}
    for name, function in names.items():
        setattr(obstore, function, traced(name, getattr(obstore, function)))
    pages_of = obstore.list

    async def pages(store: Any, prefix: Any, **options: Any) -> Any:
        began_s = time.monotonic()
        async for page in pages_of(store, prefix, **options):
            yield page
        tell(request="list", key=prefix, outcome="done", at_s=[began_s, time.monotonic()])

    vars(obstore)["list"] = pages


if __name__ == "__main__":
    main()
