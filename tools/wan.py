"""Real sockets over an emulated wide-area link, on one Linux machine.

    python tools/wan.py --nodes 2 --rate-mbit 50 --delay-ms 20 -- COMMAND ...

runs COMMAND once in each of N network namespaces, with the environment that torchrun would give to
one process per host. Lines with the given rate, delay, loss and queue join the namespaces.
Needs root, /dev/net/tun and `ip` (iproute2). In Python:

    with Link(nodes=2, rate_bps=50e6, delay_s=0.02) as link:
        workers = [link.popen(node, ["python", "worker.py"]) for node in range(2)]

The kernel's netem would do this too, but many kernels of containers and virtual machines lack it.
Packets have 1500 bytes, as on the open internet: larger ones would be cheaper to move, but TCP
would start its streams several times as fast.
"""

import argparse
import json
import os
import shutil
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from types import TracebackType
from typing import Any, NoReturn, Self, final

__all__ = ["Link", "LinkError"]

HUB = Path(__file__).with_name("wan_hub.py")
# Each node has its own ports.
MASTER_PORT = "29500"
MAX_NODES = 254
# How long others may go on after a node fails, and how long a process may take to end.
AFTER_FAILURE_S, TO_END_S = 10.0, 5.0


class LinkError(RuntimeError):
    """A link cannot be set up, or its hub is gone."""

    def __init__(self, cannot: str, *, because: str, do: str) -> None:
        super().__init__(f"cannot {cannot}; because {because}; do: {do}")


@final
class Link:
    """Network namespaces joined by emulated lines, while the `with` block lasts.

    Leaving the block ends the processes that `popen` started, kills whatever else runs in the
    namespaces, and removes them; so does the death of this process. A separate process moves the
    packets, at about 4 % of a core for every 10 Mbit/s.

    Args:
        nodes: number of namespaces, 1 to 254.
        rate_bps: bits a second that a node can send, and that it can receive, headers included.
        delay_s: one-way delay.
        loss: probability of losing a packet.
        queue_s: seconds of traffic that a node queues before it drops packets.
        mtu: bytes of the largest packet, IP header included.
        behind_routers: nodes with a private address, the same for all, behind a router that
            masquerades them: others see the router's, in `addresses`, and cannot connect to it.
        capture: file to which every packet that a node sends is written.

    Raises:
        ValueError: numbers that no line can have.
        LinkError: on entering, if this machine cannot emulate a link.
    """

    def __init__(
        self,
        *,
        nodes: int,
        rate_bps: float,
        delay_s: float,
        loss: float = 0.0,
        queue_s: float = 0.2,
        mtu: int = 1500,
        behind_routers: Sequence[int] = (),
        capture: Path | None = None,
    ) -> None:
        _check(1 <= nodes <= MAX_NODES, f"{nodes} nodes", f"1 to {MAX_NODES}")
        _check(0 < rate_bps < float("inf"), f"rate_bps={rate_bps}", "a rate above 0")
        _check(0 <= delay_s < float("inf"), f"delay_s={delay_s}", "a delay of 0 or more")
        _check(0 <= loss <= 1, f"loss={loss}", "a probability")
        _check(0 <= queue_s < float("inf"), f"queue_s={queue_s}", "a queue of 0 or more")
        _check(68 <= mtu <= 65535, f"mtu={mtu}", "68 to 65535 bytes, as IPv4 has them")
        self.nodes = nodes
        line = {"rate_bps": rate_bps, "delay_s": delay_s, "loss": loss, "queue_s": queue_s}
        more = {"behind_routers": list(behind_routers), "capture": str(capture or "")}
        self._wanted = json.dumps({"nodes": nodes, "mtu": mtu, "line": line} | more)
        self._processes: list[subprocess.Popen[Any]] = []
        self._hub: subprocess.Popen[str] | None = None
        self.namespaces: list[str] = []
        self.addresses: list[str] = []

    @staticmethod
    def supported() -> str | None:
        """None if this machine can emulate a link, otherwise the reason why not."""
        if sys.platform != "linux":
            return "network namespaces exist on Linux only"
        if os.geteuid() != 0:
            return "making network namespaces needs root"
        if not Path("/dev/net/tun").exists():
            return "there is no /dev/net/tun"
        if shutil.which("ip") is None:
            return "there is no `ip` (iproute2)"
        try:
            with Link(nodes=1, rate_bps=1e6, delay_s=0):
                return None
        except LinkError as error:
            return str(error)

    def __enter__(self) -> Self:
        # A session of its own, so that Ctrl-C reaches the workers before their network.
        self._hub = subprocess.Popen(
            [sys.executable, str(HUB), self._wanted],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
            start_new_session=True,
        )
        try:
            made = self._answer()
        except BaseException:
            self.close()
            raise
        self.namespaces, self.addresses = made["namespaces"], made["addresses"]
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.close()

    def close(self) -> None:
        """End the processes on the link, and the link itself."""
        try:
            end(self._processes)
        finally:
            self._end_hub()

    def environment(self, node: int) -> dict[str, str]:
        """Environment of a node's process, as torchrun sets it for one rank per host."""
        return {
            "RANK": str(node),
            "WORLD_SIZE": str(self.nodes),
            "LOCAL_RANK": "0",
            "LOCAL_WORLD_SIZE": "1",
            "MASTER_ADDR": self.addresses[0],
            "MASTER_PORT": MASTER_PORT,
            "GLOO_SOCKET_IFNAME": "wan0",
        }

    def popen(
        self,
        node: int,
        argv: Sequence[str],
        *,
        env: Mapping[str, str] | None = None,
        **options: Any,
    ) -> "subprocess.Popen[Any]":
        """Start a process on a node.

        Args:
            node: 0 to nodes - 1.
            argv: the command.
            env: variables on top of this process's environment and `environment(node)`.
            options: options of `subprocess.Popen`.
        """
        # `ip netns exec` becomes the command, so the process id and the exit code are its own.
        command = ["ip", "netns", "exec", self.namespaces[node], *argv]
        environment = {**os.environ, **self.environment(node), **(env or {})}
        process = subprocess.Popen(command, env=environment, **options)
        self._processes.append(process)
        return process

    def partition(self, node: int) -> None:
        """Drop everything to and from a node from now on, with no notice to either side."""
        self._order("partition", node)

    def heal(self, node: int) -> None:
        """Carry a partitioned node's packets again."""
        self._order("heal", node)

    def _order(self, word: str, node: int) -> None:
        _check(0 <= node < self.nodes, f"node {node}", f"0 to {self.nodes - 1}")
        hub = self._running_hub()
        try:
            hub.stdin.write(f"{word} {node}\n")
            hub.stdin.flush()
        except OSError as error:
            raise _hub_is_gone(str(error)) from error
        self._answer()

    def _answer(self) -> dict[str, Any]:
        answer = json.loads(self._running_hub().stdout.readline() or "null")
        if answer is None:
            raise _hub_is_gone("its process has ended")
        if "error" in answer:
            raise LinkError(
                "emulate a link",
                because=answer["error"],
                do="run as root, where /dev/net/tun exists and namespaces may be made",
            )
        return answer

    def _running_hub(self) -> Any:
        if self._hub is None:
            raise _hub_is_gone("it runs inside the with block only")
        return self._hub

    def _end_hub(self) -> None:
        if self._hub is None:
            return
        hub, self._hub = self._hub, None
        with hub:  # ends the hub by closing its standard input, and waits
            pass


def _check(fits: object, what: str, wanted: str) -> None:
    if not fits:
        raise ValueError(f"cannot emulate {what}; because no link has it; do: pass {wanted}")


def _hub_is_gone(because: str) -> LinkError:
    return LinkError("reach the hub", because=because, do="enter the link again")


def end(processes: Sequence["subprocess.Popen[Any]"]) -> None:
    """Ask processes to end, and kill those that do not."""
    for process in processes:
        process.terminate()
    until_s = time.monotonic() + TO_END_S
    for process in processes:
        try:
            process.wait(max(until_s - time.monotonic(), 0))
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait()


# -- the command line ------------------------------------------------------------------------------


def main(arguments: Sequence[str]) -> int:
    """Run a command on every node; returns the first failing exit code, or 0."""
    options, command = parse(list(arguments))
    signal.signal(signal.SIGTERM, leave)
    try:
        with Link(
            nodes=options.nodes,
            rate_bps=options.rate_mbit * 1e6,
            delay_s=options.delay_ms / 1e3,
            loss=options.loss,
            queue_s=options.queue_ms / 1e3,
            mtu=options.mtu,
        ) as link:
            return run_everywhere(link, command)
    except (LinkError, ValueError) as error:
        sys.stderr.write(f"error: {error}\n")
        return 2
    except KeyboardInterrupt:
        return exit_status(-signal.SIGINT)


def parse(arguments: list[str]) -> tuple[argparse.Namespace, list[str]]:
    """The options before the first `--`, and the command after it."""
    cut = arguments.index("--") if "--" in arguments else len(arguments)
    parser = argparse.ArgumentParser(
        prog="wan.py",
        usage="%(prog)s [OPTIONS] -- COMMAND ...",
        description="Run COMMAND on every node of an emulated wide-area link.",
    )
    number = {"type": float, "metavar": "X"}
    parser.add_argument("--nodes", type=int, default=2, metavar="N")
    parser.add_argument("--rate-mbit", **number, required=True, help="each way, for every node")
    parser.add_argument("--delay-ms", **number, required=True, help="one way")
    parser.add_argument("--loss", **number, default=0.0, help="probability, for a packet")
    parser.add_argument("--queue-ms", **number, default=200.0, help="traffic that waits at a node")
    parser.add_argument("--mtu", type=int, default=1500, metavar="BYTES")
    options, command = parser.parse_args(arguments[:cut]), arguments[cut + 1 :]
    if not command:
        parser.error("there is no command: write it after --")
    return options, command


def run_everywhere(link: Link, command: Sequence[str]) -> int:
    """Run `command` on all nodes and wait for them; returns the first failing exit code, or 0."""
    processes = [
        link.popen(node, command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT)
        for node in range(link.nodes)
    ]
    readers = [
        threading.Thread(target=forward, args=(node, process), daemon=True)
        for node, process in enumerate(processes)
    ]
    for reader in readers:
        reader.start()
    failed = wait_for_all(processes)
    # Leftovers of the command die with the link, and with them the last writer.
    link.close()
    for reader in readers:
        reader.join(TO_END_S)
    return failed


def forward(node: int, process: "subprocess.Popen[bytes]") -> None:
    """Print a node's lines, prefixed with its number."""
    assert process.stdout is not None
    with process.stdout as lines:
        for line in lines:
            text = line.decode(errors="replace").removesuffix("\n")
            sys.stdout.write(f"[{node}] {text}\n")
            sys.stdout.flush()


def wait_for_all(processes: Sequence["subprocess.Popen[Any]"]) -> int:
    """Wait; if one fails, the others have a while to notice. Returns the first failure, or 0."""
    failed, until_s = 0, float("inf")
    while None in [p.poll() for p in processes] and time.monotonic() < until_s:
        failed = failed or first_failure(processes)
        if failed and until_s == float("inf"):
            until_s = time.monotonic() + AFTER_FAILURE_S
        time.sleep(0.02)
    return failed or first_failure(processes)


def first_failure(processes: Sequence["subprocess.Popen[Any]"]) -> int:
    """The exit status of the first process that has failed so far, or 0."""
    return next((exit_status(p.returncode) for p in processes if p.returncode), 0)


def exit_status(returncode: int) -> int:
    """A return code in the style of shells: 128 plus the signal if a signal killed the process."""
    return returncode if returncode >= 0 else 128 - returncode


def leave(*_: object) -> NoReturn:
    """End this process through its clean-up."""
    raise SystemExit(exit_status(-signal.SIGTERM))


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
