"""Processes forked from a server that has already loaded torch and thinwire.

A start takes milliseconds instead of three seconds of one of two cores. They are ordinary
processes, which can be killed, stopped and put into another network. They do not show how an
interpreter begins and ends; tests of that start one (`processes.started`).
"""

import multiprocessing
import multiprocessing.forkserver
import os
import runpy
import shutil
import signal
import sys
import tempfile
import traceback
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

# Libraries read some of these when they are loaded.
ENVIRONMENT = {
    "RUST_LOG": "error",
    "OMP_NUM_THREADS": "1",
    "OMP_WAIT_POLICY": "passive",  # as the command line sets it
    "HF_HUB_OFFLINE": "1",
}


SERVER: Any = multiprocessing.forkserver._forkserver


def offered() -> dict[str, Any]:
    """Start the server; returns the argument of `use` in another process."""
    context()
    names = ("_forkserver_address", "_forkserver_authkey")  # the second since Python 3.14
    return {name: getattr(SERVER, name) for name in names if hasattr(SERVER, name)}


def use(where: Mapping[str, Any]) -> None:
    """Fork from the server of another process, because loading one takes ten seconds or more."""
    vars(SERVER).update(where)
    SERVER._forkserver_alive_fd = os.pipe()[1]  # each process gets one, and needs none
    SERVER.ensure_running = lambda: None


def context() -> Any:
    """The server; it starts with the first process."""
    server = multiprocessing.get_context("forkserver")
    server.set_forkserver_preload(["preloaded"])
    before = dict(os.environ)
    os.environ.update(ENVIRONMENT)
    os.environ["PYTHONPATH"] = os.pathsep.join(sys.path)  # Python 3.11 forgets to pass it on
    try:
        SERVER.ensure_running()
    finally:
        os.environ.clear()
        os.environ.update(before)
    return server


def _run(command: Sequence[str], environment: Mapping[str, str], files: Sequence[str]) -> None:
    """Run `python COMMAND...` in the forked process, with the same exit status."""
    for number, file in enumerate(files, start=1):
        os.dup2(os.open(file, os.O_WRONLY | os.O_APPEND), number)
    sys.stdout = open(1, "w", closefd=False)  # noqa: SIM115
    sys.stderr = open(2, "w", closefd=False)  # noqa: SIM115
    os.environ.clear()
    os.environ.update(environment)
    sys.exit(_status_of(command))


def _status_of(command: Sequence[str]) -> int:
    sys.argv = list(command)
    try:
        if command[0] == "-m":
            del sys.argv[0]
            runpy.run_module(command[1], run_name="__main__", alter_sys=True)
        else:
            sys.path.insert(0, str(Path(command[0]).parent))
            runpy.run_path(command[0], run_name="__main__")
    except SystemExit as end:
        if isinstance(end.code, str):
            sys.stderr.write(end.code + "\n")
        return 0 if end.code is None else end.code if isinstance(end.code, int) else 1
    except BaseException:
        traceback.print_exc()
        return 1
    return 0


class Forked:
    """`python COMMAND...`, used like a subprocess.Popen that reads both outputs as text.

    COMMAND is a script or `-m MODULE`, and its arguments.
    """

    def __init__(self, command: Sequence[str], env: Mapping[str, str]) -> None:
        self._folder = Path(tempfile.mkdtemp())
        self.files = [self._folder / name for name in ("stdout", "stderr")]
        for file in self.files:
            file.touch()
        self.stdout = self.stderr = ""
        self.returncode: int | None = None
        given = list(command), dict(env), [str(file) for file in self.files]
        self.process = context().Process(target=_run, args=given)
        self.process.start()

    def poll(self) -> int | None:
        if self.returncode is None and self.process.exitcode is not None:
            self.returncode = self.process.exitcode
            self.stdout, self.stderr = (file.read_text() for file in self.files)
            shutil.rmtree(self._folder)
        return self.returncode

    def send_signal(self, number: int) -> None:
        if self.poll() is None:
            os.kill(self.process.pid, number)

    def kill(self) -> None:
        self.send_signal(signal.SIGKILL)
        self.wait()

    def wait(self, timeout: float | None = None) -> int:
        self.process.join(timeout)
        if (status := self.poll()) is None:
            told = "".join(file.read_text() for file in self.files)
            raise TimeoutError(f"still running after {timeout} s: {told}")
        return status

    def communicate(self, timeout: float | None = None) -> tuple[str, str]:
        self.wait(timeout)
        return self.stdout, self.stderr
