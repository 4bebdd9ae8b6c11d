"""One elastic worker: `python elastic_worker.py LIGHTHOUSE IDENTITY OPTIONS`; tells what it does in
JSON lines on standard output.

OPTIONS is JSON: steps, every (H), method, step_s (how long an inner step takes), terms (of
transport.Terms), checkpoint (a file to write at the end and to start from).
"""

import faulthandler
import json
import os
import signal
import sys
import time
from pathlib import Path

import torch

import thinwire as tw
from toy import adamw, build_model, loss


def tell(**what) -> None:
    print(json.dumps({"at_s": time.time(), **what}), flush=True)


def main() -> None:
    faulthandler.register(signal.SIGUSR1)
    lighthouse, identity, options = sys.argv[1], sys.argv[2], json.loads(sys.argv[3])
    torch.set_num_threads(1)
    every, steps = options.get("every", 4), options.get("steps", 40)
    method = tw.presets.from_text(options.get("method", "diloco"), sync_every=every)
    model = build_model()
    optimizer = adamw(model)
    transport = tw.transport.Elastic(
        lighthouse,
        identity=identity,
        terms=tw.transport.Terms(**options.get("terms", {})),
        host=options.get("host"),
    )
    transport.events.listen(lambda event: tell(event=event.describe(), worker=identity))
    if "damage" in options:
        import elastic_faults

        transport = elastic_faults.Damaging(transport, **options["damage"])
    outer = tw.OuterLoop(model, optimizer, method, transport=transport)
    checkpoint = Path(options.get("checkpoint", "none"))
    if checkpoint.exists():
        outer.load_shared_state(torch.load(checkpoint, weights_only=True))
    taken = 0
    while True:
        share = outer.share
        step = outer.inner_step
        if step >= steps:
            break
        tell(step=step, share=share, workers=outer.workers, version=outer.stats.rounds)
        loss(model, step, share % 5, workers=5).backward()
        time.sleep(options.get("step_s", 0.01))
        optimizer.step()
        optimizer.zero_grad()
        outer.step()
        taken += 1
    outer.flush()
    tell(
        digest=outer.digest(),
        version=outer.stats.rounds,
        step=outer.inner_step,
        taken=taken,
        wait_s=outer.stats.wait_s,
        events=dict(transport.events.summary()),
    )
    if "checkpoint" in options:
        torch.save(outer.shared_state(), checkpoint)
    outer.close()
    # What torch leaves running must not decide how this ends.
    sys.stdout.flush()
    os._exit(0)


if __name__ == "__main__":
    main()
