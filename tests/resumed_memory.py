"""Resumes a pickled configuration in a folder; prints memory, in bytes per parameter, as JSON.

`kept` is the increase in memory from before to after the restore, `extra` the peak above that in
between, and `mapped` whether a checkpoint is still mapped. Only the process's own memory counts:
pages of a mapped file are the system's, which takes them back when it needs them.
"""

import json
import pickle
import sys
import time
from pathlib import Path
from threading import Event, Thread

from thinwire.train import trainer


def _own_nbytes() -> int:
    lines = Path("/proc/self/status").read_text().splitlines()
    return 1024 * next(int(line.split()[1]) for line in lines if line.startswith("RssAnon:"))


def _watched(self: trainer._Trainer) -> None:
    workers = self._group.workers
    before, most, ended = _own_nbytes(), [0], Event()

    def watch() -> None:
        while not ended.is_set():
            most[0] = max(most[0], _own_nbytes())
            time.sleep(0.0005)

    watching = Thread(target=watch)
    watching.start()
    _restore(self)
    ended.set()
    watching.join()
    after, count = _own_nbytes(), sum(p.numel() for p in workers[0].model.parameters())
    found = {"step": self._group.step, "kept": (after - before) / count}
    found["extra"] = (most[0] - max(before, after)) / count
    found["mapped"] = "step-" in Path("/proc/self/maps").read_text()
    print(json.dumps(found))
    sys.exit()


_restore = trainer._Trainer._restore

if __name__ == "__main__":
    # Only as a script: doctests import this file.
    trainer._Trainer._restore = _watched
    trainer.resume(pickle.loads(Path(sys.argv[1]).read_bytes()), Path(sys.argv[2]))
