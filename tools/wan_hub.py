"""Moves the packets of tools/wan.py, which starts it in a process of its own.

It makes a network namespace with a TUN device for every node, reads the packets each node sends,
keeps them for as long as the emulated line would, and delivers them to their receivers. Orders come
on standard input, whose end ends the link: the hub then kills whatever still runs in its namespaces
and removes them, so that nothing outlives even a killed user of it.
"""

import fcntl
import json
import os
import random
import re
import select
import signal
import struct
import subprocess
import sys
import time
from collections import deque
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import BinaryIO, NoReturn, final

DEVICE, SUBNET = "wan0", bytes((10, 99, 0))
# As every home router assigns it, so that two homes have the same address.
PRIVATE = bytes((192, 168, 1, 10))
TCP, UDP = 6, 17
MAX_PACKET_BYTES, BATCH_PACKETS = 65536, 64
# From linux/if_tun.h: an ioctl on a fresh descriptor, and packets without an extra header.
TUNSETIFF, IFF_TUN, IFF_NO_PI = 0x400454CA, 0x0001, 0x1000
# The device's own queue, long enough that only the emulated queue drops packets.
DEVICE_QUEUE_PACKETS = 10_000
NAME = re.compile(r"thinwire-(\d+)-\d+")


@final
@dataclass(frozen=True, kw_only=True, slots=True)
class Line:
    """The line between a node and all others; its two directions are alike.

    Args:
        rate_bps: bits a second in either direction, IP headers included.
        delay_s: time from the last bit out of one node to the last into another, without queues.
        loss: probability of losing a packet.
        queue_s: seconds of traffic that a direction queues; it drops anything beyond.
    """

    rate_bps: float
    delay_s: float
    loss: float
    queue_s: float


@final
class Direction:
    """The queue of packets in one direction of a node's line."""

    def __init__(self) -> None:
        self.free_s = 0.0
        self.packets: deque[tuple[float, int, bytes]] = deque()


@final
class Router:
    """Masquerades a node: others see the public address, and reach it only in flows it began.

    Args:
        public: address of the router.
    """

    def __init__(self, public: bytes) -> None:
        self._public = public
        self._flows: set[bytes] = set()

    def out(self, packet: bytes) -> bytes:
        """A packet from the node, as the others see it."""
        here, there = ports(packet)
        self._flows.add(packet[9:10] + packet[16:20] + there + here)
        return readdressed(packet, 12, self._public)

    def into(self, packet: bytes) -> bytes | None:
        """A packet from another node, as this one sees it; None if it did not begin that flow."""
        there, here = ports(packet)
        if packet[9:10] + packet[12:16] + there + here not in self._flows:
            return None
        return readdressed(packet, 16, PRIVATE)


def ports(packet: bytes) -> tuple[bytes, bytes]:
    """The ports of sender and receiver of a TCP or UDP packet; empty for others."""
    at = 4 * (packet[0] & 15)
    return (packet[at : at + 2], packet[at + 2 : at + 4]) if packet[9] in (TCP, UDP) else (b"", b"")


def readdressed(packet: bytes, at: int, address: bytes) -> bytes:
    """A packet with another IPv4 address at byte `at`, and matching checksums."""
    changed = bytearray(packet)
    header = 4 * (packet[0] & 15)
    places = {TCP: header + 16, UDP: header + 6}
    sums = [10, *([places[packet[9]]] if packet[9] in places else [])]
    for place in sums:
        (old,) = struct.unpack_from("!H", packet, place)
        if packet[9] == UDP and place != 10 and not old:
            continue  # UDP may omit it
        # RFC 1624: add the complement of the old words, then the new words.
        total = (~old & 0xFFFF) + sum(
            (~before & 0xFFFF) + after
            for before, after in zip(
                struct.unpack_from("!HH", packet, at), struct.unpack("!HH", address), strict=True
            )
        )
        while total > 0xFFFF:
            total = (total & 0xFFFF) + (total >> 16)
        struct.pack_into("!H", changed, place, ~total & 0xFFFF)
    changed[at : at + 4] = address
    return bytes(changed)


@final
class Switch:
    """Tracks where each packet is, by a clock that the caller reads.

    A packet leaves its sender at the rate of the line, is in flight for the delay, and enters its
    receiver at the rate of the line again, so that several senders share one receiver's line.

    Args:
        line: line of every node.
        nodes: number of nodes.
        seed: decides which packets are lost.
        behind_routers: nodes behind routers.
    """

    def __init__(
        self, line: Line, nodes: int, seed: int = 0, behind_routers: Sequence[int] = ()
    ) -> None:
        self.cut: set[int] = set()
        self._routers = {node: Router(SUBNET + bytes((node + 1,))) for node in behind_routers}
        self._queue_s, self._delay_s, self._loss = line.queue_s, line.delay_s, line.loss
        self._s_per_byte = 8 / line.rate_bps
        self._out = [Direction() for _ in range(nodes)]
        self._in = [Direction() for _ in range(nodes)]
        self._random = random.Random(seed)

    def send(self, source: int, packet: bytes, now_s: float) -> None:
        """Take a packet that node `source` sends at `now_s`."""
        target = self._target(packet)
        if target is not None and source in self._routers:
            packet = self._routers[source].out(packet)
        line = self._out[source]
        waits_s = max(line.free_s - now_s, 0.0)
        if target is None or source in self.cut or waits_s > self._queue_s:
            return
        line.free_s = now_s + waits_s + len(packet) * self._s_per_byte
        if self._loss and self._random.random() < self._loss:
            return
        line.packets.append((line.free_s + self._delay_s, target, packet))

    def due(self, now_s: float) -> Iterator[tuple[int, bytes]]:
        """The packets that have arrived by `now_s`, each with its node."""
        for source, line in enumerate(self._out):
            while line.packets and line.packets[0][0] <= now_s:
                arrival_s, target, packet = line.packets.popleft()
                if source not in self.cut:
                    self._enter(target, packet, arrival_s)
        for node, line in enumerate(self._in):
            while line.packets and line.packets[0][0] <= now_s:
                packet = line.packets.popleft()[2]
                if node in self._routers:
                    packet = self._routers[node].into(packet)
                if packet is not None:
                    yield node, packet

    def next_s(self) -> float | None:
        """Time of the next arrival; None if nothing is in flight."""
        lines = (*self._out, *self._in)
        return min((line.packets[0][0] for line in lines if line.packets), default=None)

    def _enter(self, node: int, packet: bytes, arrival_s: float) -> None:
        line, takes_s = self._in[node], len(packet) * self._s_per_byte
        # The first bit arrived that much earlier: an idle line adds no delay to the sender's.
        start_s = max(line.free_s, arrival_s - takes_s)
        if node in self.cut or start_s - arrival_s > self._queue_s:
            return
        line.free_s = start_s + takes_s
        line.packets.append((line.free_s, node, packet))

    def _target(self, packet: bytes) -> int | None:
        """The receiver of a packet; None for IPv6, broadcasts and anything else."""
        if packet[0] >> 4 != 4 or packet[16:19] != SUBNET:
            return None
        node = packet[19] - 1
        return node if 0 <= node < len(self._in) else None


# -- what the kernel does --------------------------------------------------------------------------


def ip(*arguments: str) -> str:
    """The output of `ip ARGUMENTS`; raises OSError with its error message."""
    done = subprocess.run(["ip", *arguments], capture_output=True, text=True)
    if done.returncode:
        raise OSError(f"ip {' '.join(arguments)}: {done.stderr.strip()}")
    return done.stdout


def address(node: int) -> str:
    """The IPv4 address of a node."""
    return ".".join(map(str, (*SUBNET, node + 1)))


def make_node(node: int, namespace: str, mtu: int, *, behind_router: bool = False) -> int:
    """Put a TUN device into the new `namespace`; returns the descriptor of its packets."""
    # Made outside and moved, so that the descriptor stays with this process.
    name = f"tw{os.getpid()}n{node}"
    tap = os.open("/dev/net/tun", os.O_RDWR | os.O_NONBLOCK)
    request = struct.pack("16sH22x", name.encode(), IFF_TUN | IFF_NO_PI)
    fcntl.ioctl(tap, TUNSETIFF, request)
    ip("link", "set", name, "netns", namespace, "name", DEVICE)
    inside = ("-n", namespace)
    own = ".".join(map(str, PRIVATE)) if behind_router else address(node)
    ip(*inside, "addr", "add", f"{own}/24", "dev", DEVICE)
    queue = ("txqueuelen", str(DEVICE_QUEUE_PACKETS))
    ip(*inside, "link", "set", DEVICE, "mtu", str(mtu), *queue, "up")
    ip(*inside, "link", "set", "lo", "up")
    if behind_router:
        ip(*inside, "route", "add", "default", "dev", DEVICE)
    return tap


def remove(namespace: str) -> None:
    """Kill what runs in a namespace and remove it; it may be half-made or half-removed."""
    for step in (kill_all, lambda name: ip("netns", "del", name)):
        try:
            step(namespace)
        except OSError as error:
            sys.stderr.write(f"wan: {error}\n")


def kill_all(namespace: str) -> None:
    """Kill every process in a namespace, including those that they start meanwhile."""
    until_s = time.monotonic() + 5
    while (running := ip("netns", "pids", namespace).split()) and time.monotonic() < until_s:
        for process in map(int, running):
            try:
                os.kill(process, signal.SIGKILL)
            except ProcessLookupError:
                continue
        time.sleep(0.01)


def remove_leftovers() -> None:
    """Remove the namespaces of hubs that were killed."""
    listed = (line.split()[0] for line in ip("netns", "list").splitlines() if line)
    for match in filter(None, map(NAME.fullmatch, listed)):
        if not is_hub(int(match[1])):
            remove(match[0])


def is_hub(process: int) -> bool:
    """True if a process runs this file, because process ids are reused."""
    try:
        return Path(__file__).name.encode() in Path(f"/proc/{process}/cmdline").read_bytes()
    except OSError:
        return False


# -- the process -----------------------------------------------------------------------------------


def carry(switch: Switch, taps: Sequence[int], capture: BinaryIO | None) -> None:
    """Move packets and follow orders until standard input ends."""
    nodes, orders = {tap: node for node, tap in enumerate(taps)}, sys.stdin.fileno()
    while True:
        readable = select.select([*taps, orders], [], [], pause_s(switch))[0]
        if orders in readable and not obey(switch, os.read(orders, 4096).decode()):
            return
        now_s = time.monotonic()
        for tap in readable:
            if tap != orders:
                for packet in read_batch(tap):
                    switch.send(nodes[tap], packet, now_s)
                    if capture is not None:
                        capture.write(packet)
        for node, packet in switch.due(time.monotonic()):
            write(taps[node], packet)


def pause_s(switch: Switch) -> float | None:
    """Seconds until the next packet is due; None until something arrives."""
    next_s = switch.next_s()
    return None if next_s is None else max(next_s - time.monotonic(), 0.0)


def obey(switch: Switch, orders: str) -> str:
    """Follow `partition NODE` and `heal NODE`, one a line, and confirm each."""
    for order in orders.splitlines():
        word, node = order.split()
        (switch.cut.add if word == "partition" else switch.cut.discard)(int(node))
        reply({"done": order})
    return orders


def read_batch(tap: int) -> Iterator[bytes]:
    """Some of the packets that wait at a device, few enough not to starve the others."""
    for _ in range(BATCH_PACKETS):
        try:
            yield os.read(tap, MAX_PACKET_BYTES)
        except BlockingIOError:
            return


def write(tap: int, packet: bytes) -> None:
    """Hand a packet to a node; a packet that it does not take is lost, as on any line."""
    try:
        os.write(tap, packet)
    except OSError:
        return


def reply(answer: dict[str, object]) -> None:
    """Send a line to the process that started this hub."""
    sys.stdout.write(json.dumps(answer) + "\n")
    sys.stdout.flush()


def leave(*_: object) -> NoReturn:
    """End this process through its clean-up."""
    raise SystemExit(1)


def main(
    nodes: int, mtu: int, line: Line, *, behind_routers: Sequence[int] = (), capture: str = ""
) -> None:
    """Be the hub of a link."""
    signal.signal(signal.SIGTERM, leave)
    namespaces: list[str] = []
    tapped = Path(capture).open("wb") if capture else None  # noqa: SIM115 (until the hub ends)
    try:
        remove_leftovers()
        taps: list[int] = []
        for node in range(nodes):
            namespaces.append(f"thinwire-{os.getpid()}-{node}")
            ip("netns", "add", namespaces[-1])
            router = node in behind_routers
            taps.append(make_node(node, namespaces[-1], mtu, behind_router=router))
        # A hub that waits for the processor makes the line slower than requested.
        os.setpriority(os.PRIO_PROCESS, 0, -10)
        reply({"namespaces": namespaces, "addresses": [address(node) for node in range(nodes)]})
        carry(Switch(line, nodes, behind_routers=behind_routers), taps, tapped)
    except OSError as error:
        reply({"error": str(error)})
    finally:
        if tapped is not None:
            tapped.close()
        for namespace in namespaces:
            remove(namespace)


if __name__ == "__main__":
    wanted = json.loads(sys.argv[1])
    main(**{**wanted, "line": Line(**wanted["line"])})
