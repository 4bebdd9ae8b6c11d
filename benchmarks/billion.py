"""A round of a billion parameters through every preset: seconds and memory of one worker of two.

python benchmarks/billion.py          an hour and a half on two cores and 24 GiB; --parameters and
                                      --only to try, with --sealed under a token;
                                      OMP_NUM_THREADS=1 for demo and decoupled_momentum, if
                                      anything else runs

A separate process makes what the other worker sends, and ends before the measured one begins, so
the machine holds one worker at a time. The round is the first one, of all fragments that are sent
after the same inner step; inner steps are noise.

`round`     construction, begin() and finish(): seconds, and peak memory above what stays
`store`     one elastic worker over a hub (SeaweedFS, TLS) sends three rounds and writes a snapshot;
            another loads it and goes on: seconds and memory of each
"""

import argparse
import json
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, nullcontext
from pathlib import Path
from typing import Any, TypeVar

import torch
from torch import Tensor, nn

from hub_process import SECRET, hub
from setting import setting
from speed.models import llama
from speed.round_costs import with_short_rounds
from thinwire import OuterLoop, presets
from thinwire.transport import Elastic, Sealed
from thinwire.transport.base import Posts, Round, RoundTag, RunningExchange, Transport

T = TypeVar("T")

OUT = Path(__file__).parent / "results" / "billion.json"
WIDTH, VOCABULARY = 2048, 32_000
LAYER = 4 * WIDTH**2 + 3 * WIDTH**2 * 11 // 4
METHODS = (*presets.names(), "muloco:bits=2")
PIECE = 1 << 22


def build(parameters: int, dtype: torch.dtype) -> nn.Module:
    """A Llama of about that many parameters, the same at each call."""
    layers = max(1, round((parameters - VOCABULARY * WIDTH) / LAYER))
    with torch.device("meta"):
        model = llama(vocabulary=VOCABULARY, width=WIDTH, layers=layers)
    model = model.to(dtype).to_empty(device="cpu")
    add_noise(model, seed=0, fresh=True)
    return model


@torch.no_grad()
def add_noise(model: nn.Module, *, seed: int, fresh: bool = False, as_grad: bool = False) -> None:
    """One inner step."""
    generator = torch.Generator().manual_seed(seed)
    noise = torch.randn(PIECE, generator=generator).mul_(0.02 if fresh else 1e-3)
    for p in model.parameters():
        if fresh:
            p.zero_()
        if as_grad:
            p.grad = torch.zeros_like(p)
        for piece in (p.grad if as_grad else p).view(-1).split(PIECE):
            piece.add_(noise[: len(piece)])


class _Alone(Transport):
    """One worker of two: writes what it sends to files, or reads there what the other sent.

    Args:
        folder: folder of the files.
        rank: 1 writes, 0 reads.
    """

    def __init__(self, folder: Path, rank: int) -> None:
        self._folder, self._rank, self.begun = folder, rank, 0

    @property
    def rank(self) -> int:
        return self._rank

    @property
    def world_size(self) -> int:
        return 2

    def announce(self, card: bytes, tag: RoundTag) -> dict[int, bytes]:
        del tag
        return {self._rank: card}

    def run(self, posts: Posts[T], tag: RoundTag) -> Round[T]:
        del tag
        running, file = RunningExchange(posts), self._folder / str(self.begun)
        self.begun += 1
        assert running.post is not None
        if self._rank:
            running.post.to[0].numpy().tofile(file)
        elif file.exists():
            received = torch.empty(file.stat().st_size, dtype=torch.uint8)
            with file.open("rb", buffering=0) as source:
                at = 0
                while at < len(received):
                    at += source.readinto(received.numpy().data[at:])
            return _Answered(running, {1: received})
        return _Answered(running, {})


class _Answered(Round[T]):
    def __init__(self, running: RunningExchange[T], answer: dict[int, Tensor]) -> None:
        self._running, self._answer = running, answer

    def wait(self) -> T:
        self._running.answer(self._answer)
        return self._running.wait()


# -- one worker, in a process of its own -----------------------------------------------------------


class Watched:
    """Seconds and memory of the parts of a program; the kernel counts the memory."""

    def __init__(self) -> None:
        self.found: dict[str, Any] = {}

    @contextmanager
    def part(self, name: str) -> Iterator[None]:
        """Measure the block."""
        Path("/proc/self/clear_refs").write_text("5")  # resets the peak memory
        before, began_s = _memory("VmRSS"), time.perf_counter()
        yield
        self.found[name] = {
            "s": time.perf_counter() - began_s,
            "before": before,
            "most": _memory("VmHWM"),
            "after": _memory("VmRSS"),
        }


def _memory(name: str) -> int:
    lines = Path("/proc/self/status").read_text().splitlines()
    (line,) = (line for line in lines if line.startswith(f"{name}:"))
    return 1024 * int(line.split()[1])


def round_of(
    folder: Path, rank: int, method: str, dtype: torch.dtype, size: int, is_sealed: bool
) -> Any:
    """Time and memory of the first round of worker `rank`."""
    watched, described = Watched(), with_short_rounds(method, late=8)
    model = build(size, dtype)
    parameters = sum(p.numel() for p in model.parameters())
    optimizer = torch.optim.SGD(model.parameters(), lr=1.0)
    alone = _Alone(folder, rank)
    transport = Sealed(alone, SECRET) if is_sealed else alone
    with watched.part("construction"):
        loop = OuterLoop(model, optimizer, described, transport=transport)
    sizes = {f.exchange.sizes.sent_nbytes for f in loop._state.fragments}
    largest = max(f.outer.flat_anchor().numel() for f in loop._state.fragments)
    for step in range(described.sync_every + 1):
        # These methods exchange gradients, and the optimizer steps with the result.
        add_noise(model, seed=2 * step + rank, as_grad=method in ("ddp", "demo"))
        optimizer.step()
        sent = alone.begun
        with watched.part("begin") if not sent else nullcontext():
            loop.begin()
        if rank and alone.begun:
            return {}
        with watched.part("finish"):
            loop.finish()
        if loop.stats.rounds:
            break
    return {
        "parameters": parameters,
        "largest_fragment": largest,
        "largest_message": max(sizes),
        **watched.found,
    }


def worker_of(address: str, name: str, size: int, steps: int) -> Any:
    """A lone elastic worker over a hub, until the run is at `steps`."""
    watched, model = Watched(), build(size, torch.float32)
    optimizer = torch.optim.SGD(model.parameters(), lr=1.0)
    elastic = Elastic(address, run="run", token=SECRET, identity=name, snapshot_after=0.1)
    with watched.part("construction"):
        loop = OuterLoop(model, optimizer, presets.diloco(sync_every=1), transport=elastic)
    with watched.part("join"):
        loop.join()
        joined = loop.digest()
    start = loop.inner_step
    with watched.part("rounds"):
        while loop.inner_step < steps:
            add_noise(model, seed=loop.inner_step)
            optimizer.step()
            loop.step()
    with watched.part("snapshot"):
        while start == 0 and elastic._shard.written.version < 0:
            time.sleep(0.1)
    digest = loop.digest()
    loop.close()
    parameters = sum(p.numel() for p in model.parameters())
    found = {"parameters": parameters, "began_at": start, "joined": joined, "digest": digest}
    return found | watched.found


# -- all of them -----------------------------------------------------------------------------------


def _in_a_process(*arguments: object) -> Any:
    command = [sys.executable, __file__, "--worker", json.dumps([str(each) for each in arguments])]
    done = subprocess.run(command, stdout=subprocess.PIPE, check=False)
    if done.returncode:
        return {"failed": done.returncode}
    return json.loads(done.stdout)


def row_of(method: str, dtype: str, size: int, is_sealed: bool) -> Any:
    """Both workers of a round, one after the other."""
    with tempfile.TemporaryDirectory() as folder:
        for rank in (1, 0):
            found = _in_a_process("round", folder, rank, method, dtype, size, int(is_sealed))
    if "failed" in found:
        return {"method": method, "dtype": dtype, "sealed": is_sealed, **found}
    per = found["parameters"]
    row = {"method": method, "dtype": dtype, "sealed": is_sealed, "parameters": per}
    row["message_nbytes"] = found["largest_message"]
    row["construction_s"] = found["construction"]["s"]
    row["state_bytes"] = found["construction"]["after"] / per
    for half in ("begin", "finish"):
        part = found[half]
        row[f"{half}_s"] = part["s"]
        kept = max(part["before"], part["after"])
        row[f"{half}_extra_bytes"] = (part["most"] - kept) / found["largest_fragment"]
    row["most_bytes"] = max(found[half]["most"] for half in ("begin", "finish")) / per
    return row


def taken_over(size: int) -> Any:
    """A worker that sends three rounds over a hub, and another that continues from its snapshot."""
    with tempfile.TemporaryDirectory() as folder, hub(Path(folder)) as started:
        first = _in_a_process("store", started.address, "a", size, 3)
        second = _in_a_process("store", started.address, "b", size, 5)
    return {"first": first, "second": second}


def main() -> None:
    """Measure, and write results/billion.json."""
    parser = argparse.ArgumentParser(description=main.__doc__)
    parser.add_argument("--parameters", type=float, default=1e9)
    parser.add_argument("--only", nargs="*", default=[*METHODS, "store"])
    parser.add_argument("--out", type=Path, default=OUT)
    parser.add_argument("--sealed", action="store_true")
    parser.add_argument("--worker", help=argparse.SUPPRESS)
    given = parser.parse_args()
    if given.worker is not None:
        print(json.dumps(_worker(*json.loads(given.worker))))
        return
    size, found = int(given.parameters), {"rows": [], "store": {}}
    if given.out.exists():
        found |= json.loads(given.out.read_text())
    done = {_case(row) for row in found["rows"] if "failed" not in row}
    for method in METHODS:
        for dtype in ("float32", "bfloat16"):
            if method in given.only and (method, dtype, given.sealed) not in done:
                row = row_of(method, dtype, size, given.sealed)
                print(json.dumps(row), flush=True)
                others = [each for each in found["rows"] if _case(each) != _case(row)]
                found["rows"] = [*others, row]
                _write(given.out, found)
    if "store" in given.only:
        found["store"] = taken_over(size)
        print(json.dumps(found["store"]), flush=True)
        _write(given.out, found)


def _case(row: Mapping[str, Any]) -> tuple[str, str, bool]:
    return row["method"], row["dtype"], row["sealed"]


def _worker(what: str, *arguments: str) -> Any:
    if what == "round":
        folder, rank, method, dtype, *numbers = arguments
        size, is_sealed = map(int, numbers)
        kind = getattr(torch, dtype)
        return round_of(Path(folder), int(rank), method, kind, size, bool(is_sealed))
    address, name, size, steps = arguments
    return worker_of(address, name, int(size), int(steps))


def _write(out: Path, found: dict[str, Any]) -> None:
    what = "the first round of one worker of two; bytes are per parameter"
    command = "python benchmarks/billion.py"
    memory_nbytes = os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    context = {"what": what, "command": command, **setting(), "memory_nbytes": memory_nbytes}
    out.write_text(json.dumps(context | found, indent=2) + "\n")


if __name__ == "__main__":
    main()
