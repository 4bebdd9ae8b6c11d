"""`import thinwire` is for libraries and notebooks: it must stay as light as torch."""

import subprocess
import sys

HEAVY = {"transformers", "datasets", "triton", "plotly", "tokenizers", "torchdata", "tyro", "rich"}


def test_import_pulls_in_nothing_heavy() -> None:
    code = "import sys, thinwire; print(' '.join(sys.modules))"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert not HEAVY & set(done.stdout.split())


def test_import_loads_nothing_of_elastic_runs() -> None:
    code = (
        "import sys, thinwire as tw; before = set(sys.modules); tw.transport.Elastic; "
        "print(*before); print(*sys.modules)"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    before, after = (set(line.split()) for line in done.stdout.splitlines())
    assert not [module for module in before if module.startswith("thinwire.elastic")]
    assert "thinwire.elastic.transport" in after  # the control: naming it does


def test_import_takes_at_most_a_fifth_longer_than_torch() -> None:
    def seconds(module: str) -> float:
        # A collection of what torch has made is due about now, and falls on whoever comes next.
        code = (
            "import gc, time; gc.disable(); t = time.process_time(); "
            f"import {module}; print(time.process_time() - t)"
        )
        command = [sys.executable, "-c", code]
        return float(subprocess.run(command, capture_output=True, text=True, check=True).stdout)

    # What else the machine does only ever adds: of eight, the least come close.
    ours, theirs = zip(*[(seconds("thinwire"), seconds("torch")) for _ in range(8)], strict=True)
    assert min(ours) / min(theirs) <= 1.2
