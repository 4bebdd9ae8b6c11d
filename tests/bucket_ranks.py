"""Cases of workers of elastic/test_fixed.py: `python bucket_ranks.py CASE`, with THINWIRE_AT set.

Each method's run has the name of the environment's and its number.
"""

import json
import os
import signal
import sys
import time
from dataclasses import replace

import torch
from torch import nn

import thinwire as tw
from thinwire.address import Address
from thinwire.elastic.timeouts import ElasticOptions
from thinwire.elastic.transport import Elastic
from toy import Team, adamw, build_model, descend, flush, loss

STEPS = 10
REDUCED = tw.ReduceScatter(owner_feedback=tw.ErrorFeedback())
METHODS = [
    tw.presets.diloco(sync_every=3),
    tw.presets.muloco(bits=2, sync_every=3),
    tw.presets.muloco(bits=2, sync_every=3, exchange=REDUCED),
    tw.presets.streaming_diloco(
        sync_every=4, fragments=tw.Balanced(count=2), overlap=tw.Delay(tau=1)
    ),
    tw.presets.noloco(sync_every=3),
]


def in_one_process(workers: int) -> list[list[str]]:
    """The digests of every worker, by method."""
    digests: list[list[str]] = []
    for method in METHODS:
        team = Team(method, adamw, workers).train(STEPS)
        flush(team.loops)
        digests.append([loop.digest() for loop in team.loops])
    return digests


def one_step(model: nn.Module, optimizer: torch.optim.Optimizer, step: int) -> None:
    worker, workers = (int(os.environ[n]) for n in ("WORKER", "WORKERS"))
    descend(loss(model, step, worker, workers=workers), optimizer)


def train() -> None:
    told, at = [], Address.read(os.environ["THINWIRE_AT"])
    for number, method in enumerate(METHODS):
        model = build_model()
        optimizer = adamw(model)
        own = str(replace(at, run=f"{at.run}-{number}"))
        outer = tw.OuterLoop(model, optimizer, method, connect=own)
        for step in range(STEPS):
            one_step(model, optimizer, step)
            outer.step()
        outer.flush()
        stats = outer.stats
        told.append(
            {
                "digest": outer.digest(),
                "sent_bytes": stats.sent_bytes,
                "received_bytes": stats.received_bytes,
                "requests": dict(stats.requests),
            }
        )
        outer.transport.close()
    print(json.dumps(told))


def train_with_checkpoints() -> None:
    """Kills itself after the step in KILL_AT; resumes from its file if it exists."""
    method = METHODS[int(os.environ["METHOD"])]
    file, kill_at = os.environ["CHECKPOINT"], int(os.environ.get("KILL_AT", -1))
    model = build_model()
    optimizer = adamw(model)
    at = Address.read(os.environ["THINWIRE_AT"])
    transport = Elastic(
        at.place,
        worker=at.worker,
        workers=at.workers,
        run=at.run,
        keep=4,
        options=ElasticOptions(timeout_s=60.0),
    )
    outer = tw.OuterLoop(model, optimizer, method, transport=transport)
    first = 0
    if os.path.exists(file):
        state = torch.load(file)
        model.load_state_dict(state["model"])
        optimizer.load_state_dict(state["optimizer"])
        outer.load_state_dict(state["outer"])
        first = state["step"]
    for step in range(first, STEPS):
        one_step(model, optimizer, step)
        outer.step()
        if step == 3 and first == 0:
            held = {"model": model.state_dict(), "optimizer": optimizer.state_dict()}
            torch.save({"step": step + 1, "outer": outer.state_dict(), **held}, file)
        if step == kill_at:
            time.sleep(0.5)  # what is under way arrives, or not
            os.kill(os.getpid(), signal.SIGKILL)
    outer.flush()
    print(outer.digest())


if __name__ == "__main__":
    torch.set_num_threads(1)
    try:
        globals()[sys.argv[1]]()
    except tw.ThinwireError as error:
        print(type(error).__name__, error, file=sys.stderr)
        sys.exit(1)
