"""The rate of an elastic run's streams over that of plain TCP, on emulated lines.

    python benchmarks/stream_rate.py OUT

Needs root and Linux (tools/wan.py). On each line a message goes from one machine to another over
plain TCP, over a stream of the run (TLS 1.3), and over one by way of the relay on a third machine,
in turns. OUT gets stream-rate.json: seconds of each, and CPU seconds per GB on loopback.
"""

import argparse
import importlib.util
import platform
import socket
import ssl
import statistics
import sys
import threading
import time
from pathlib import Path
from typing import Any

from thinwire.elastic.dialer import Dialer, open_stream
from thinwire.elastic.https import RunServer
from thinwire.elastic.relay import Relay, RelayedServer
from thinwire.runs.folder import write_json
from thinwire.security.token import Token
from thinwire.version import __version__

TOKEN = Token("a token of a benchmark, long enough")
LINES = [(mbit, delay_ms) for mbit in (10, 50, 100) for delay_ms in (1, 20, 100)]
LINES += [(1000, delay_ms) for delay_ms in (1, 20)]
LARGE_MTU, FAST_MBIT = 9000, 1000  # with 1500 bytes the emulator would be the limit
SECONDS, TURNS, GB = 4.0, 3, 1e9
PLAIN, RELAY, WORKER = 4001, 4002, 4003
PIECE = bytes(1 << 20)


def take(stream: socket.socket) -> None:
    """Take so many bytes, then say that they are here."""
    size = int(stream.recv(16))
    stream.sendall(b"go")
    left, scratch = size, bytearray(1 << 18)
    while left > 0:
        left -= stream.recv_into(scratch)
    stream.sendall(b"ok")


def give(stream: socket.socket, nbytes: int) -> float:
    """Seconds until the other side has taken all."""
    stream.sendall(str(nbytes).encode().ljust(16))
    assert stream.recv(2) == b"go"
    began_s = time.perf_counter()
    left = nbytes
    while left > 0:
        stream.sendall(PIECE[: min(left, len(PIECE))])
        left -= len(PIECE)
    assert stream.recv(2) == b"ok"
    return time.perf_counter() - began_s


def serve(host: str, relay: str) -> None:
    """A machine that takes messages, by all ways."""
    tunnels = {"take": lambda _: take}
    server = RunServer(TOKEN, {}, host=host, port=WORKER, tunnels=tunnels)
    if relay:
        RelayedServer(Dialer(TOKEN, relay), relay, f"{host}:{WORKER}", server.serve)
    with socket.create_server((host, PLAIN)) as listener:
        print("ready", flush=True)
        while True:
            client, _ = listener.accept()
            threading.Thread(target=take, args=(client,), daemon=True).start()


def ask(host: str, relay: str, nbytes: int) -> None:
    """Print the seconds of every way, in turns."""
    target = f"{host}:{WORKER}"
    for _ in range(TURNS):
        with socket.create_connection((host, PLAIN)) as plain:
            plain_s = give(plain, nbytes)
        with open_stream(Dialer(TOKEN), target, "take", timeout_s=30) as stream:
            stream_s = _timed(stream, nbytes)
        dialer = Dialer(TOKEN, relay)
        dialer._relayed_until_s[target] = time.monotonic() + 600
        with open_stream(dialer, target, "take", timeout_s=30) as stream:
            relayed_s = _timed(stream, nbytes)
        print(plain_s, stream_s, relayed_s, flush=True)


def _timed(stream: ssl.SSLSocket, nbytes: int) -> float:
    stream.settimeout(None)
    return give(stream, nbytes)


def hub(host: str) -> None:
    """The relay."""
    RunServer(TOKEN, {}, host=host, port=RELAY, tunnels=Relay().tunnels)
    print("ready", flush=True)
    threading.Event().wait()


def loopback_cpu_s_per_gb() -> dict[str, float]:
    """CPU seconds of sender and receiver together for a GB, in one process."""
    found = {}
    server = RunServer(TOKEN, {}, host="127.0.0.1", tunnels={"take": lambda _: take})
    here, there = socket.socketpair()
    threading.Thread(target=take, args=(there,), daemon=True).start()
    streams = {
        "plain": here,
        "stream": open_stream(Dialer(TOKEN), f"127.0.0.1:{server.port}", "take", timeout_s=30),
    }
    for name, stream in streams.items():
        stream.settimeout(None)
        began_s = time.process_time()
        give(stream, int(GB))
        found[name] = round(time.process_time() - began_s, 3)
    server.close()
    return found


def main() -> None:
    """Measure, or be one of the machines."""
    if sys.argv[1] in ("serve", "ask", "hub"):
        role, *arguments = sys.argv[1:]
        known: dict[str, Any] = {"serve": serve, "ask": ask, "hub": hub}
        known[role](*(int(a) if a.isdigit() else a for a in arguments))
        return
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("out", type=Path)
    out = parser.parse_args().out
    spec = importlib.util.spec_from_file_location("wan", Path(__file__).parents[1] / "tools/wan.py")
    assert spec is not None
    assert spec.loader is not None
    wan = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(wan)
    me, rows = [sys.executable, str(Path(__file__).resolve())], []
    for mbit, delay_ms in LINES:
        nbytes = int(mbit * 1e6 / 8 * SECONDS)
        line = {"rate_bps": mbit * 1e6, "delay_s": delay_ms / 1000, "queue_s": 0.3}
        mtu = LARGE_MTU if mbit >= FAST_MBIT else 1500
        with wan.Link(nodes=3, mtu=mtu, **line) as link:
            relay = f"{link.addresses[0]}:{RELAY}"
            for node, role in (
                (0, ["hub", link.addresses[0]]),
                (1, ["serve", link.addresses[1], relay]),
            ):
                process = link.popen(node, [*me, *role], stdout=-1, text=True)
                assert process.stdout.readline() == "ready\n"
            time.sleep(1 + delay_ms / 50)
            asking = link.popen(
                2, [*me, "ask", link.addresses[1], relay, str(nbytes)], stdout=-1, text=True
            )
            said, _ = asking.communicate(timeout=120)
        taken = [tuple(map(float, each.split())) for each in said.splitlines()]
        plain_s, stream_s, relayed_s = (
            statistics.median(ways) for ways in zip(*taken, strict=True)
        )
        rows.append(
            {
                "mbit": mbit,
                "delay_ms": delay_ms,
                "mtu": mtu,
                "nbytes": nbytes,
                "seconds": {"plain": plain_s, "stream": stream_s, "relayed": relayed_s},
                "rate_over_plain": {
                    "stream": round(plain_s / stream_s, 3),
                    "relayed": round(plain_s / relayed_s, 3),
                },
            }
        )
        print(rows[-1], flush=True)
    versions = {"python": platform.python_version(), "openssl": ssl.OPENSSL_VERSION}
    write_json(
        out / "stream-rate.json",
        {
            "command": "python benchmarks/stream_rate.py OUT",
            "thinwire": __version__,
            "machine": platform.machine(),
            **versions,
            "turns": TURNS,
            "cpu_s_per_gb": loopback_cpu_s_per_gb(),
            "rows": rows,
        },
    )


if __name__ == "__main__":
    main()
