"""Asynchronous training: a server, and workers that do not wait for each other.

Needs: pip install -e '.[elastic]'

export THINWIRE_TOKEN=$(openssl rand -hex 16)
python FILE serve s3://my-bucket/runs --checkpoint server.pt    # or file:///shared/folder
python FILE work s3://my-bucket/runs --worker 0       # and 1, 2; kill one and start it again
"""

import argparse
import time
from pathlib import Path

import torch

import thinwire as tw
from thinwire.asynchronous import Assignment, AsyncOptions, AsyncServer, AsyncWorker
from thinwire.asynchronous.objects import AsyncStoreServer, AsyncStoreWorker
from thinwire.files import replace_file
from thinwire.security.token import find_token

WORKERS = 3
METHOD = tw.presets.async_diloco(every=WORKERS, sync_every=20, inner=tw.inner.AdamW(lr=0.01))
RUN = "example"


def build_model() -> torch.nn.Module:
    """The model of server and workers."""
    torch.manual_seed(0)  # server and workers agree on the shapes; theta comes from the server
    return torch.nn.Sequential(torch.nn.Linear(8, 32), torch.nn.Tanh(), torch.nn.Linear(32, 1))


def batch_loss(model: torch.nn.Module, data: torch.Generator) -> torch.Tensor:
    """The loss of one batch."""
    x = torch.randn(64, 8, generator=data)
    return (model(x) - x.sin().sum(1, keepdim=True)).square().mean()


def serve(store: str, steps: int, checkpoint: Path) -> None:
    """Hold theta until all steps are in it."""
    options = AsyncOptions(lost_after_s=30.0)  # what a dead worker was given goes to others
    server = AsyncServer(build_model(), METHOD, workers=WORKERS, total_steps=steps, options=options)
    serving = AsyncStoreServer(
        server, store, run=RUN, token=find_token(), log=lambda line: print(line, flush=True)
    )
    if checkpoint.exists():
        serving.load_state_dict(torch.load(checkpoint))
        print(f"going on from {server.version} arrivals", flush=True)
    # The file is replaced as a whole: a server that is killed while it writes has the one before.
    serving.run(
        lambda: replace_file(checkpoint, lambda path: torch.save(serving.state_dict(), path))
    )
    loss = batch_loss(server.model, torch.Generator().manual_seed(99))
    print(f"loss {loss:.4f} {server.stats} {server.digest()}", flush=True)


def work(store: str, number: int, slow_s: float) -> None:
    """Train until the run is finished."""
    model = build_model()
    optimizer = METHOD.inner.build(model)
    worker = AsyncWorker(model, optimizer, METHOD, rank=number)
    data = torch.Generator().manual_seed(time.time_ns() % 2**31)  # a restart reads new data

    def train(assignment: Assignment) -> float:
        loss = torch.zeros(())
        for _ in range(assignment.steps):
            time.sleep(slow_s)
            loss = batch_loss(model, data)
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
        print(f"worker {number}: {assignment.steps} steps, loss {loss:.4f}", flush=True)
        return loss.item()

    AsyncStoreWorker(worker, store, run=RUN, token=find_token(), patience_s=60.0).run(train)
    print(f"worker {number}: finished", flush=True)


def main() -> None:
    """Parse and run."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("role", choices=["serve", "work"])
    parser.add_argument("store", help="s3://, gs://, az:// or file:// place that all share")
    parser.add_argument("--worker", type=int, default=0, help="this worker's number, from 0")
    parser.add_argument("--slow-s", type=float, default=0.0, help="added to each inner step")
    parser.add_argument("--steps", type=int, default=6000, help="inner steps of all workers")
    parser.add_argument("--checkpoint", type=Path, help="file of the server's state")
    given = parser.parse_args()
    if given.role == "serve":
        serve(given.store, given.steps, given.checkpoint or Path("server.pt"))
    else:
        work(given.store, given.worker, given.slow_s)


if __name__ == "__main__":
    main()
