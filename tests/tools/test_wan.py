"""The emulated link: its arithmetic by a made-up clock, and the real thing where it can run."""

import contextlib
import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import wan
import wan_hub


def packet(target: int, size: int = 1000) -> bytes:
    return bytes([0x45, *range(1, 16), 10, 99, 0, target + 1]).ljust(size, b"x")


def switch(nodes: int = 2, **line: float) -> Any:
    """By default a byte takes 1 ms, and a packet of 1,000 bytes a second."""
    default = {"rate_bps": 8000.0, "delay_s": 0.0, "loss": 0.0, "queue_s": 1e9}
    return wan_hub.Switch(wan_hub.Line(**(default | line)), nodes)


def arrivals(switch: Any) -> list[tuple[float, int]]:
    """When the packets under way arrive, and where."""
    seen = []
    while (now_s := switch.next_s()) is not None:
        seen += [(now_s, node) for node, _ in switch.due(now_s)]
    return seen


@pytest.mark.parametrize(
    ("line", "sends", "expected"),
    [
        ({"delay_s": 0.25}, [(0, 1)] * 3, [(1.25, 1), (2.25, 1), (3.25, 1)]),
        ({}, [(0, 1), (1, 0)], [(1.0, 0), (1.0, 1)]),
        ({"nodes": 3}, [(0, 2), (1, 2)], [(1.0, 2), (2.0, 2)]),
        ({"queue_s": 0.0}, [(0, 1)] * 5, [(1.0, 1)]),
        ({"queue_s": 2.0}, [(0, 1)] * 5, [(1.0, 1), (2.0, 1), (3.0, 1)]),
        # The first starts to arrive with its first bit; those behind it wait 0, 1 and 2 s.
        (
            {"nodes": 5, "queue_s": 1.5},
            [(source, 4) for source in range(4)],
            [(1.0, 4), (2.0, 4), (3.0, 4)],
        ),
        ({"loss": 1}, [(0, 1)] * 5, []),
    ],
    ids=["delay", "directions", "a receiver", "no queue", "a sender's", "a receiver's", "loss"],
)
def test_packets_leave_at_the_rate_and_arrive_after_the_delay(line, sends, expected) -> None:
    under_test = switch(**line)
    for source, target in sends:
        under_test.send(source, packet(target), 0.0)
    assert list(under_test.due(0.99)) == []
    assert arrivals(under_test) == expected


def test_some_packets_are_lost_and_those_for_nobody_vanish() -> None:
    line = switch(loss=0.3)
    for _ in range(1000):
        line.send(0, packet(1), 0.0)
    assert 600 <= len(arrivals(line)) <= 800
    strange = [packet(2), packet(-1), packet(1)[:12] + bytes(8), b"\x60" + packet(1)[1:], b"\x45"]
    for each in strange:
        (line := switch()).send(0, each, 0.0)
        assert arrivals(line) == []


def test_a_partition_swallows_what_is_sent_and_what_is_under_way() -> None:
    line = switch(nodes=3, delay_s=5.0)
    for source, target in ((0, 2), (2, 0), (0, 1)):
        line.send(source, packet(target), 0.0)
    line.cut.add(2)
    for source, target in ((0, 2), (2, 0), (1, 0)):
        line.send(source, packet(target), 1.0)
    assert arrivals(line) == [(7.0, 0), (7.0, 1)]
    line.send(2, packet(0), 8.0)
    line.cut.discard(2)
    assert arrivals(line) == []
    line.send(2, packet(0), 10.0)
    assert arrivals(line) == [(16.0, 0)]


ECHO = """
import socket
server = socket.socket(type=socket.SOCK_DGRAM)
server.bind(("0.0.0.0", 5000))
print("up", flush=True)
while True:
    server.sendto(*server.recvfrom(2048))
"""

# Waits a while for an answer to each of some datagrams; prints how long those took that came.
PING = """
import json, socket, sys, time
client, times = socket.socket(type=socket.SOCK_DGRAM), []
client.settimeout(float(sys.argv[2]))
for number in map(str, range(10)):
    started_s = time.monotonic()
    client.sendto(number.encode(), (sys.argv[1], 5000))
    try:
        while client.recv(2048) != number.encode():
            pass
        times.append(time.monotonic() - started_s)
    except TimeoutError:
        pass
print(json.dumps(times))
"""

# A process that nobody will wait for, in a session of its own, where signals do not follow.
ABANDON = """
import subprocess, sys, time
child = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(600)"],
                         start_new_session=True, stdout=subprocess.DEVNULL)
print(child.pid, flush=True)
time.sleep(600)
"""


def eventually(check: Any) -> bool:
    until_s = time.monotonic() + 20
    while not check() and time.monotonic() < until_s:
        time.sleep(0.02)
    return check()


def is_running(process: int) -> bool:
    try:
        stat = Path(f"/proc/{process}/stat").read_text()
    except FileNotFoundError:
        return False
    return stat.rpartition(")")[2].split()[0] != "Z"


def namespaces() -> str:
    return subprocess.run(["ip", "netns", "list"], capture_output=True, text=True).stdout


@contextlib.contextmanager
def command(program: str, **options: Any) -> Iterator[subprocess.Popen[str]]:
    line = ["--rate-mbit", "10", "--delay-ms", "1", "--", sys.executable, "-c", program]
    pipes = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE, "text": True}
    with subprocess.Popen([sys.executable, wan.__file__, *line], **pipes, **options) as process:
        try:
            yield process
        finally:
            process.kill()


def test_packets_take_two_delays_and_a_partition_is_silent(real: ModuleType) -> None:
    with real.Link(nodes=2, rate_bps=50e6, delay_s=0.04) as link:

        def start(node: int, *argv: str) -> subprocess.Popen[str]:
            return link.popen(
                node, [sys.executable, "-c", *argv], stdout=subprocess.PIPE, text=True
            )

        def ping(wait_s: float) -> list[float]:
            pinged = start(1, PING, link.addresses[0], str(wait_s))
            return json.loads(pinged.communicate(timeout=60)[0])

        server = start(0, ECHO)
        assert server.stdout.readline() == "up\n"
        times_s = ping(5.0)
        assert len(times_s) == 10
        assert 0.08 <= min(times_s) < 0.11  # a busy machine delays some of them, not all ten
        link.partition(0)
        assert ping(0.15) == []
        link.heal(0)
        assert len(ping(5.0)) == 10
        names = link.namespaces
        with pytest.raises(ValueError, match="2"):
            link.partition(2)
    server.stdout.close()
    assert not any(name in namespaces() for name in names)
    with pytest.raises(real.LinkError, match="inside the with block"):
        link.partition(0)


def test_every_node_gets_its_rank_and_one_that_fails_ends_all(real, monkeypatch, capsys) -> None:
    names = ["RANK", "WORLD_SIZE", "MASTER_ADDR", "GLOO_SOCKET_IFNAME", "OMP_NUM_THREADS"]
    program = f"import os; print(*(os.environ[name] for name in {names}))"
    with command(program, env=os.environ | {"OMP_NUM_THREADS": "3"}) as done:
        out, err = done.communicate(timeout=60)
    expected = [f"[{node}] {node} 2 10.99.0.1 wan0 3" for node in range(2)]
    assert (sorted(out.splitlines()), err, done.returncode) == (expected, "", 0)
    monkeypatch.setattr(real, "AFTER_FAILURE_S", 0.2)
    program = "import os, time; time.sleep(600) if os.environ['RANK'] == '0' else exit(7)"
    with real.Link(nodes=2, rate_bps=1e6, delay_s=0) as link:
        assert real.run_everywhere(link, [sys.executable, "-c", program]) == 7


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGKILL])
def test_a_signal_takes_everything_down(real: ModuleType, number: signal.Signals) -> None:
    with command(ABANDON) as running:
        abandoned = [int(running.stdout.readline().split()[1]) for _ in range(2)]
        identify = ["ip", "netns", "identify", str(abandoned[0])]
        (name,) = subprocess.run(identify, capture_output=True, text=True).stdout.split()
        running.send_signal(number)
        assert running.wait(timeout=30) == (-9 if number == signal.SIGKILL else 128 + number)
        assert eventually(lambda: name not in namespaces())
        assert eventually(lambda: not any(map(is_running, abandoned)))


@pytest.mark.parametrize(
    ("wrong", "kind", "word"),
    [
        *(({"nodes": n}, ValueError, "cannot emulate") for n in (0, 255)),
        *(({"rate_bps": r}, ValueError, "cannot emulate") for r in (0, float("nan"))),
        ({"delay_s": -1e-3}, ValueError, "cannot emulate"),
        ({"loss": 1.1}, ValueError, "cannot emulate"),
        ({"mtu": 67}, ValueError, "cannot emulate"),
    ],
    ids=str,
)
def test_numbers_that_no_line_has_are_refused(wrong: dict[str, float], kind, word: str) -> None:
    with pytest.raises(kind, match=word):
        wan.Link(**({"nodes": 2, "rate_bps": 1e6, "delay_s": 0.0} | wrong))
