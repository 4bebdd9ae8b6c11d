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

from emulated_links import TOOLS, load


@pytest.fixture(scope="module")
def hub() -> ModuleType:
    return load("wan_hub")


# -- the arithmetic, by a made-up clock ------------------------------------------------------------


def packet(target: int, size: int = 1000) -> bytes:
    return bytes([0x45, *range(1, 16), 10, 99, 0, target + 1]).ljust(size, b"x")


def switch(hub: ModuleType, nodes: int = 2, **line: float) -> Any:
    """By default a byte takes 1 ms, and a packet of 1,000 bytes a second."""
    default = {"rate_bps": 8000.0, "delay_s": 0.0, "loss": 0.0, "queue_s": 1e9}
    return hub.Switch(hub.Line(**(default | line)), nodes)


def arrivals(switch: Any) -> list[tuple[float, int]]:
    """When the packets under way arrive, and where."""
    seen = []
    while (now_s := switch.next_s()) is not None:
        seen += [(now_s, node) for node, _ in switch.due(now_s)]
    return seen


def test_packets_leave_at_the_rate_and_arrive_after_the_delay(hub: ModuleType) -> None:
    line = switch(hub, delay_s=0.25)
    for _ in range(3):
        line.send(0, packet(1), 10.0)
    line.send(0, packet(1, size=500), 20.0)
    assert arrivals(line) == [(11.25, 1), (12.25, 1), (13.25, 1), (20.75, 1)]


def test_directions_do_not_share_the_rate(hub: ModuleType) -> None:
    line = switch(hub)
    line.send(0, packet(1), 0.0)
    line.send(1, packet(0), 0.0)
    assert arrivals(line) == [(1.0, 0), (1.0, 1)]


def test_two_senders_share_the_line_of_one_receiver(hub: ModuleType) -> None:
    line = switch(hub, nodes=3)
    line.send(0, packet(2), 0.0)
    line.send(1, packet(2), 0.0)
    assert arrivals(line) == [(1.0, 2), (2.0, 2)]


def test_nothing_arrives_early(hub: ModuleType) -> None:
    line = switch(hub, delay_s=0.25)
    line.send(0, packet(1), 0.0)
    assert list(line.due(1.24)) == []
    assert [node for node, _ in line.due(1.25)] == [1]


@pytest.mark.parametrize(("queue_s", "kept"), [(0.0, 1), (1.9, 2), (2.0, 3), (100.0, 5)])
def test_a_sender_s_full_queue_drops(hub: ModuleType, queue_s: float, kept: int) -> None:
    line = switch(hub, queue_s=queue_s)
    for _ in range(5):
        line.send(0, packet(1), 0.0)
    assert len(arrivals(line)) == kept


def test_a_receiver_s_full_queue_drops(hub: ModuleType) -> None:
    line = switch(hub, nodes=5, queue_s=1.5)
    for source in range(4):
        line.send(source, packet(4), 0.0)
    # The first starts to arrive with its first bit; those behind it wait 0, 1 and 2 s.
    assert arrivals(line) == [(1.0, 4), (2.0, 4), (3.0, 4)]


def test_a_partition_swallows_what_is_sent_and_what_is_under_way(hub: ModuleType) -> None:
    line = switch(hub, nodes=3, delay_s=5.0)
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


@pytest.mark.parametrize(("loss", "least", "most"), [(0.0, 1000, 1000), (0.3, 600, 800), (1, 0, 0)])
def test_loss(hub: ModuleType, loss: float, least: int, most: int) -> None:
    line = switch(hub, loss=loss)
    for _ in range(1000):
        line.send(0, packet(1), 0.0)
    assert least <= len(arrivals(line)) <= most


@pytest.mark.parametrize(
    "stranger",
    [packet(2), packet(-1), packet(1)[:12] + bytes(8), b"\x60" + packet(1)[1:], b"\x45", b"\x60"],
    ids=["no such node", "network", "other subnet", "IPv6", "short", "short IPv6"],
)
def test_packets_for_nobody_vanish(hub: ModuleType, stranger: bytes) -> None:
    line = switch(hub)
    line.send(0, stranger, 0.0)
    assert arrivals(line) == []


# -- real sockets ----------------------------------------------------------------------------------

ECHO = """
import socket
server = socket.socket(type=socket.SOCK_DGRAM)
server.bind(("0.0.0.0", 5000))
print("up", flush=True)
while True:
    server.sendto(*server.recvfrom(2048))
"""

# Waits for an answer to each of N datagrams, a while at most; prints those that came, in seconds.
PING = """
import json, socket, sys, time
to, count, wait_s = sys.argv[1], int(sys.argv[2]), float(sys.argv[3])
client = socket.socket(type=socket.SOCK_DGRAM)
times = []
for number in map(str, range(count)):
    client.settimeout(wait_s)
    started_s = time.monotonic()
    client.sendto(number.encode(), (to, 5000))
    try:
        while client.recv(2048) != number.encode():
            pass
        times.append(time.monotonic() - started_s)
    except TimeoutError:
        pass
print(json.dumps(times))
"""

RECEIVE = """
import socket, time
server = socket.create_server(("0.0.0.0", 5000))
print("up", flush=True)
for _ in range(3):
    peer, _ = server.accept()
    started_s, count = time.monotonic(), 0
    while data := peer.recv(1 << 20):
        count += len(data)
    print(count, time.monotonic() - started_s, flush=True)
"""

SEND = """
import socket, sys
socket.create_connection((sys.argv[1], 5000)).sendall(bytes(int(sys.argv[2])))
"""

# A process that nobody will wait for, in a session of its own, where signals do not follow.
ABANDON = """
import subprocess, sys, time
child = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(600)"],
                         start_new_session=True, stdout=subprocess.DEVNULL)
print(child.pid, flush=True)
time.sleep(600)
"""


def start(link: Any, node: int, program: str, *arguments: object) -> subprocess.Popen[str]:
    argv = [sys.executable, "-c", program, *map(str, arguments)]
    return link.popen(node, argv, stdout=subprocess.PIPE, text=True)


def serve(link: Any, node: int, program: str) -> subprocess.Popen[str]:
    server = start(link, node, program)
    assert server.stdout is not None
    assert server.stdout.readline() == "up\n"
    return server


def ping(link: Any, source: int, target: int, *, count: int, wait_s: float = 5.0) -> list[float]:
    done = start(link, source, PING, link.addresses[target], count, wait_s)
    return json.loads(done.communicate(timeout=60)[0])


def namespaces() -> str:
    return subprocess.run(["ip", "netns", "list"], capture_output=True, text=True).stdout


def is_running(process: int) -> bool:
    try:
        state = Path(f"/proc/{process}/stat").read_text().rpartition(")")[2].split()[0]
    except FileNotFoundError:
        return False
    return state != "Z"


def eventually(check: Any, *, within_s: float = 20.0) -> bool:
    until_s = time.monotonic() + within_s
    while not check() and time.monotonic() < until_s:
        time.sleep(0.02)
    return check()


def close_output(*processes: subprocess.Popen[str]) -> None:
    for process in processes:
        assert process.stdout is not None
        process.stdout.close()


def test_a_round_trip_takes_two_delays(real: ModuleType) -> None:
    with real.Link(nodes=2, rate_bps=50e6, delay_s=0.04) as link:
        server = serve(link, 0, ECHO)
        times_s = ping(link, 1, 0, count=10)
    close_output(server)
    assert len(times_s) == 10
    assert 0.08 <= min(times_s) < 0.11  # a busy machine delays some of them, not all ten


@pytest.mark.parametrize("rate_bps", [8e6, 40e6])
def test_a_stream_gets_its_rate_and_no_more(real: ModuleType, rate_bps: float) -> None:
    count, goodputs_bps = int(rate_bps / 8 * 0.6), []
    with real.Link(nodes=2, rate_bps=rate_bps, delay_s=0.002) as link:
        server = serve(link, 0, RECEIVE)
        for _ in range(3):  # a busy machine only makes it slower, so the best attempt counts
            sender = start(link, 1, SEND, link.addresses[0], count)
            sender.communicate(timeout=60)
            received, took_s = server.stdout.readline().split()
            assert int(received) == count
            goodputs_bps.append(8 * count / float(took_s))
            if goodputs_bps[-1] >= 0.85 * rate_bps:
                break
    close_output(server)
    assert 0.85 * rate_bps <= max(goodputs_bps) <= rate_bps


def test_lost_packets_get_no_answer(real: ModuleType) -> None:
    with real.Link(nodes=2, rate_bps=50e6, delay_s=0, loss=0.5) as link:
        server = serve(link, 0, ECHO)
        times_s = ping(link, 1, 0, count=30, wait_s=0.05)
    close_output(server)
    # A quarter of the answers come, or fewer where a busy machine makes them late.
    assert 0 < len(times_s) < 20


def test_a_partition_is_silent_for_one_node_and_can_be_healed(real: ModuleType) -> None:
    with real.Link(nodes=3, rate_bps=50e6, delay_s=0.001) as link:
        servers = [serve(link, node, ECHO) for node in (0, 2)]
        assert len(ping(link, 1, 2, count=2)) == 2
        link.partition(2)
        assert ping(link, 1, 2, count=2, wait_s=0.2) == []
        assert len(ping(link, 1, 0, count=2)) == 2
        link.heal(2)
        assert len(ping(link, 1, 2, count=2)) == 2
    close_output(*servers)


def test_leaving_the_block_leaves_nothing(real: ModuleType) -> None:
    link = real.Link(nodes=2, rate_bps=1e6, delay_s=0)
    with contextlib.suppress(ZeroDivisionError), link:
        worker = start(link, 1, ABANDON)
        abandoned = int(worker.stdout.readline())
        mover = link._hub.pid
        assert all(name in namespaces() for name in link.namespaces)
        raise ZeroDivisionError
    close_output(worker)
    assert worker.returncode == -signal.SIGTERM
    assert not any(name in namespaces() for name in link.namespaces)
    assert not is_running(mover)
    assert eventually(lambda: not is_running(abandoned))


def test_a_closed_link_and_a_strange_node_are_errors(real: ModuleType) -> None:
    with real.Link(nodes=1, rate_bps=1e6, delay_s=0) as link, pytest.raises(ValueError, match="0"):
        link.partition(1)
    with pytest.raises(real.LinkError, match="inside the with block"):
        link.partition(0)


def test_leftovers_of_killed_hubs_are_removed_and_others_stay(real: ModuleType) -> None:
    dead = subprocess.Popen([sys.executable, "-c", ""])
    dead.wait()
    leftover = f"thinwire-{dead.pid}-0"
    subprocess.run(["ip", "netns", "add", leftover], check=True)
    with real.Link(nodes=1, rate_bps=1e6, delay_s=0) as link:
        assert leftover not in namespaces()
        with real.Link(nodes=1, rate_bps=1e6, delay_s=0):
            assert link.namespaces[0] in namespaces()


# -- the command line ------------------------------------------------------------------------------


def command(*arguments: str, **options: Any) -> subprocess.Popen[str]:
    line = ["--rate-mbit", "10", "--delay-ms", "1", "--", sys.executable, "-c", *arguments]
    argv = [sys.executable, str(TOOLS / "wan.py"), *line]
    pipes = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE}
    return subprocess.Popen(argv, text=True, **pipes, **options)


@contextlib.contextmanager
def killing(process: subprocess.Popen[str]) -> Iterator[None]:
    """Kill `process` at the end, so that a failing test does not wait for it."""
    try:
        yield
    finally:
        process.kill()


def test_every_node_gets_its_rank(real: ModuleType) -> None:
    names = ["RANK", "LOCAL_RANK", "WORLD_SIZE", "LOCAL_WORLD_SIZE", "MASTER_ADDR"]
    names += ["GLOO_SOCKET_IFNAME", "OMP_NUM_THREADS"]
    program = f"import os; print(*(os.environ[name] for name in {names}))"
    done = command(program, env=os.environ | {"OMP_NUM_THREADS": "3"})
    out, err = done.communicate(timeout=60)
    expected = [f"[{node}] {node} 0 2 1 10.99.0.1 wan0 3" for node in range(2)]
    assert (sorted(out.splitlines()), err, done.returncode) == (expected, "", 0)


def test_a_failing_node_ends_the_others_and_gives_the_exit_code(
    real: ModuleType, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(real, "AFTER_FAILURE_S", 0.2)
    program = "import os, time; time.sleep(600) if os.environ['RANK'] == '0' else exit(7)"
    with real.Link(nodes=2, rate_bps=1e6, delay_s=0) as link:
        assert real.run_everywhere(link, [sys.executable, "-c", program]) == 7


@pytest.fixture
def interruptible() -> Iterator[None]:
    """Children of a shell's background job ignore SIGINT, unless it means something here."""
    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    yield
    signal.signal(signal.SIGINT, before)


@pytest.mark.usefixtures("interruptible")
@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT, signal.SIGKILL])
def test_a_signal_takes_everything_down(real: ModuleType, number: signal.Signals) -> None:
    with command(ABANDON) as running, killing(running):
        assert running.stdout is not None
        abandoned = [int(running.stdout.readline().split()[1]) for _ in range(2)]
        names = subprocess.run(
            ["ip", "netns", "identify", str(abandoned[0])], capture_output=True, text=True
        ).stdout.split()
        assert names[0].startswith("thinwire-")
        running.send_signal(number)
        running.wait(timeout=30)
        expected = -9 if number == signal.SIGKILL else 128 + number
        assert running.returncode == expected
        assert eventually(lambda: names[0] not in namespaces())
        assert eventually(lambda: not any(map(is_running, abandoned)))


@pytest.mark.usefixtures("interruptible")
def test_ctrl_c_reaches_the_workers_and_not_their_network(real: ModuleType) -> None:
    with command(ABANDON, start_new_session=True) as running, killing(running):
        assert running.stdout is not None
        assert running.stderr is not None
        for _ in range(2):
            running.stdout.readline()
        os.killpg(running.pid, signal.SIGINT)
        assert running.wait(timeout=30) == 130
        assert running.stderr.read() == ""


def test_a_command_that_a_signal_killed_fails_as_in_a_shell(real: ModuleType) -> None:
    done = command("import os, signal; os.kill(os.getpid(), signal.SIGKILL)")
    done.communicate(timeout=60)
    assert done.returncode == 137


# -- without privileges ----------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("owner", "name", "value", "reason"),
    [
        ("sys", "platform", "darwin", "Linux only"),
        ("os", "geteuid", lambda: 1000, "needs root"),
        ("shutil", "which", lambda _: None, "iproute2"),
    ],
)
def test_supported_names_the_reason(
    wan: ModuleType, monkeypatch: pytest.MonkeyPatch, owner: str, name: str, value: Any, reason: str
) -> None:
    with monkeypatch.context() as patch:
        patch.setattr(os, "geteuid", lambda: 0)
        patch.setattr(Path, "exists", lambda _: True)
        patch.setattr(getattr(wan, owner), name, value)
        assert reason in wan.Link.supported()


@pytest.fixture
def refusing_ip(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    program = tmp_path / "ip"
    program.write_text("#!/bin/sh\necho 'Operation not permitted' >&2\nexit 1\n")
    program.chmod(0o755)
    monkeypatch.setenv("PATH", f"{tmp_path}:{os.environ['PATH']}")


@pytest.mark.usefixtures("refusing_ip")
def test_a_kernel_that_refuses_is_named(wan: ModuleType) -> None:
    with (
        pytest.raises(wan.LinkError, match="netns list: Operation not permitted; do: run as root"),
        wan.Link(nodes=1, rate_bps=1e6, delay_s=0),
    ):
        pass


@pytest.mark.parametrize(
    "wrong",
    [
        {"nodes": 0},
        {"nodes": 255},
        {"rate_bps": 0},
        {"rate_bps": float("nan")},
        {"delay_s": -1e-3},
        {"loss": 1.1},
        {"queue_s": float("inf")},
        {"mtu": 67},
    ],
    ids=str,
)
def test_numbers_that_no_line_has_are_refused(wan: ModuleType, wrong: dict[str, float]) -> None:
    with pytest.raises(ValueError, match=r"cannot emulate .*; because .*; do: pass"):
        wan.Link(**({"nodes": 2, "rate_bps": 1e6, "delay_s": 0.0} | wrong))


@pytest.mark.parametrize("arguments", [[], ["--rate-mbit", "1", "--delay-ms", "1"], ["--", "true"]])
def test_a_line_without_rate_or_command_is_refused(
    wan: ModuleType, arguments: list[str], capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit, match="2"):
        wan.main(arguments)
    assert "usage" in capsys.readouterr().err
