"""The rate at which a newcomer reads a snapshot, beside one plain get of as many bytes.

    python benchmarks/healing.py OUT      Linux, root; six minutes on two cores

SeaweedFS over S3 is on one node of tools/wan.py, and the reader on another. Both reads run in
turns, three times. Writes healing.json into OUT.
"""

import asyncio
import importlib
import json
import os
import statistics
import subprocess
import sys
import time
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import obstore

from setting import setting
from thinwire.elastic.roll import NewestState
from thinwire.elastic.run_objects import RunObjects
from thinwire.runs.folder import write_json
from thinwire.security.token import Token
from thinwire.transport.object_store import ObjectStore

ROOT = Path(__file__).parents[1]
TOKEN = "a token of a benchmark, long enough"
DELAY_S, TIMES, PATIENCE_S = 0.025, 3, 300.0
LINES = {100: 150_000_000, 1000: 600_000_000}
"""Bytes of a snapshot, by Mbit/s of the line."""
WHERE, PLAIN = "s3://run/healing", "plain"
STATE = NewestState(version=1, roll=1, writer="writer")


def main(out: Path) -> None:
    """Measure both lines."""
    sys.path += [str(ROOT / "tools"), str(ROOT / "tests")]
    rows = [
        {"mbit": mbit, "nbytes": nbytes, "sealed": token is not None}
        | measure(mbit, nbytes, token or "")
        for mbit, nbytes in LINES.items()
        for token in (None, TOKEN)
    ]
    what = "seconds to read a snapshot, and one object of as many bytes; round trips of 50 ms"
    command = "python benchmarks/healing.py OUT"
    write_json(out / "healing.json", {"what": what, "command": command, **setting(), "rows": rows})


def measure(mbit: int, nbytes: int, token: str) -> dict[str, Any]:
    """Medians of what the reader measured, once the writer has ended."""
    wan, s3_server = importlib.import_module("wan"), importlib.import_module("s3_server")
    # With smaller packets the emulator is the limit of the fast line.
    mtu = 9000 if mbit >= 1000 else 1500
    with (
        wan.Link(nodes=2, rate_bps=mbit * 1e6, delay_s=DELAY_S, mtu=mtu) as link,
        TemporaryDirectory() as folder,
        s3_server.s3_server(
            Path(folder),
            host=link.addresses[0],
            within=("ip", "netns", "exec", link.namespaces[0]),
        ) as endpoint,
    ):
        environment = {
            **os.environ,
            **s3_server.in_aws(endpoint),
            "PYTHONPATH": str(ROOT / "src"),
        }
        found = ""
        for node, what in enumerate(("write", "read")):
            command = [sys.executable, __file__, what, str(nbytes), token]
            process = link.popen(node, command, env=environment, stdout=subprocess.PIPE, text=True)
            found, _ = process.communicate()
            assert process.returncode == 0, what
        return json.loads(found)


def node(what: str, nbytes: int, token: str) -> None:
    """One of the two processes."""
    sealed = Token(token) if token else None
    store = ObjectStore(WHERE)
    objects = RunObjects(store, "run", sealed, patience_s=PATIENCE_S)
    print(json.dumps(asyncio.run((write if what == "write" else read)(store, objects, nbytes))))


async def write(store: ObjectStore, objects: RunObjects, nbytes: int) -> None:
    """Write a snapshot, and an object of the same size."""
    raw = memoryview(os.urandom(nbytes))
    await objects.put_state([raw], STATE, set())
    await obstore.put_async(store._store, PLAIN, raw)


async def read(store: ObjectStore, objects: RunObjects, nbytes: int) -> dict[str, float]:
    """Read both, in turns."""
    taken: dict[str, list[float]] = {"plain_s": [], "snapshot_s": []}
    for _ in range(TIMES):
        began_s = time.perf_counter()
        plain = await (await obstore.get_async(store._store, PLAIN)).bytes_async()
        taken["plain_s"].append(time.perf_counter() - began_s)
        began_s = time.perf_counter()
        file = await objects.state(STATE, largest=2 * nbytes)
        taken["snapshot_s"].append(time.perf_counter() - began_s)
        assert file is not None
        assert len(file) == len(plain) == nbytes
    medians = {name: round(statistics.median(each), 2) for name, each in taken.items()}
    return medians | {"ratio": round(medians["plain_s"] / medians["snapshot_s"], 3)}


if __name__ == "__main__":
    if len(sys.argv) == 4:
        node(sys.argv[1], int(sys.argv[2]), sys.argv[3])
    else:
        main(Path(sys.argv[1]))
