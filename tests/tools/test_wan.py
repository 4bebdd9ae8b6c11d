"""The emulated link: its arithmetic under a virtual clock, and real namespaces where they work."""

import json
import os
import subprocess
import sys
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
    """Time and receiver of each packet under way."""
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
        ({"queue_s": 2.0}, [(0, 1)] * 5, [(1.0, 1), (2.0, 1), (3.0, 1)]),
        # The first starts to arrive with its first bit; those behind it wait 0, 1 and 2 s.
        (
            {"nodes": 5, "queue_s": 1.5},
            [(source, 4) for source in range(4)],
            [(1.0, 4), (2.0, 4), (3.0, 4)],
        ),
        ({"loss": 1}, [(0, 1)] * 5, []),
        ({}, [(0, 2), (0, -1)], []),
    ],
    ids=["delay", "duplex", "a receiver", "sender queues", "receiver queues", "loss", "nobody"],
)
def test_packets_leave_at_the_rate_and_arrive_after_the_delay(line, sends, expected) -> None:
    under_test = switch(**line)
    for source, target in sends:
        under_test.send(source, packet(target), 0.0)
    assert list(under_test.due(0.99)) == []
    assert arrivals(under_test) == expected


ECHO = """
import socket
server = socket.socket(type=socket.SOCK_DGRAM)
server.bind(("0.0.0.0", 5000))
print("up", flush=True)
while True:
    server.sendto(*server.recvfrom(2048))
"""

# Prints the round-trip times of those of ten datagrams that are answered.
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


def namespaces() -> str:
    return subprocess.run(["ip", "netns", "list"], capture_output=True, text=True).stdout


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
    server.stdout.close()
    assert not any(name in namespaces() for name in names)


def test_every_node_gets_its_rank_and_one_that_fails_ends_all(real, monkeypatch) -> None:
    names = ["RANK", "WORLD_SIZE", "MASTER_ADDR", "GLOO_SOCKET_IFNAME", "OMP_NUM_THREADS"]
    program = f"import os; print(*(os.environ[name] for name in {names}))"
    command = [sys.executable, wan.__file__, "--rate-mbit", "10", "--delay-ms", "1", "--"]
    done = subprocess.run(
        [*command, sys.executable, "-c", program],
        env=os.environ | {"OMP_NUM_THREADS": "3"},
        capture_output=True,
        text=True,
        timeout=120,
    )
    expected = [f"[{node}] {node} 2 10.99.0.1 wan0 3" for node in range(2)]
    assert (sorted(done.stdout.splitlines()), done.stderr, done.returncode) == (expected, "", 0)
    monkeypatch.setattr(real, "AFTER_FAILURE_S", 0.2)
    program = "import os, time; time.sleep(600) if os.environ['RANK'] == '0' else exit(7)"
    with real.Link(nodes=2, rate_bps=1e6, delay_s=0) as link:
        assert real.run_everywhere(link, [sys.executable, "-c", program]) == 7
