"""Measure this machine: ratios to a named baseline of the same run.

python benchmarks/bench.py codecs round --out benchmarks/results
"""

import argparse
import importlib.metadata
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path

import torch

from setting import setting
from speed.codecs import codecs
from speed.gpu_kernels import gpu_kernels, gpu_rounds
from speed.measuring import Report, Table, threads
from speed.round_costs import round_memory, round_scaling
from speed.rounds import round
from speed.training import muon, plain_loop, simulation
from thinwire.codecs.kernels import kernel_backend
from thinwire.runs.folder import write_json

BENCHMARKS: Mapping[str, Callable[[], Report]] = {
    "simulation": simulation,
    "plain-loop": plain_loop,
    "muon": muon,
    "round": round,
    "round-memory": round_memory,
    "round-scaling": round_scaling,
    "codecs": codecs,
    "gpu-kernels": gpu_kernels,
    "gpu-rounds": gpu_rounds,
}


def main(arguments: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description="Speed and memory on this machine, as ratios.")
    names = ", ".join(BENCHMARKS)
    what = f"of {names}; by default all, and those of a GPU only where one has kernels"
    parser.add_argument("what", nargs="*", metavar="BENCHMARK", help=what)
    parser.add_argument("--out", type=Path, help="folder for one JSON file per benchmark")
    given = parser.parse_args(arguments)
    if unknown := set(given.what) - BENCHMARKS.keys():
        parser.error(f"no benchmark is called {' or '.join(sorted(unknown))}: there are {names}")
    for name in given.what or _on_this_machine():
        with threads(torch.get_num_threads()):
            report = BENCHMARKS[name]()
        for table in report.tables:
            print(text_of(table), end="\n\n")
        if given.out is not None:
            context = {"name": name, "command": f"python benchmarks/bench.py {name}", **setting()}
            context["thinwire"] = importlib.metadata.version("thinwire")
            given.out.mkdir(parents=True, exist_ok=True)
            write_json(given.out / f"{name}.json", context | report.data)


def _on_this_machine() -> list[str]:
    has_kernels = torch.cuda.is_available() and kernel_backend(torch.device("cuda")) != "torch"
    return [name for name in BENCHMARKS if has_kernels or not name.startswith("gpu-")]


def text_of(table: Table) -> str:
    """Columns as wide as their widest text; the first is left-aligned, the others right-aligned.

    >>> print(text_of(Table("speed", ("of", "ms"), [("a loop", "12.5"), ("ours", "3.1")])))
    speed
    of        ms
    a loop  12.5
    ours     3.1
    """
    rows = [table.columns, *table.rows]
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    lines = [table.title]
    for first, *others in rows:
        numbers = (f"  {x:>{width}}" for x, width in zip(others, widths[1:], strict=True))
        lines.append(f"{first:<{widths[0]}}" + "".join(numbers))
    return "\n".join(lines)


if __name__ == "__main__":
    main()
