"""The commands of three tutorials run as their pages have them, and print what the pages quote.

What differs: a free port, 127.0.0.1 as the host, and fewer steps.
"""

import json
import os
import re
import shlex
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from processes import free_port

pytestmark = pytest.mark.slow

ROOT = Path(__file__).parents[2]
PAGES = ROOT / "docs" / "tutorials"
TOKEN = "a token for tests, long enough"


def page(name: str) -> str:
    return (PAGES / name).read_text(encoding="utf-8")


def commands(text: str, beginning: str) -> list[str]:
    """The lines of the page's blocks that begin so, without `thinwire`."""
    blocks = re.findall(r"^```(\w*)\n(.*?)^```", text, re.M | re.S)
    lines = [line for kind, block in blocks if not kind for line in block.splitlines()]
    return [line.removeprefix("thinwire ") for line in lines if line.startswith(beginning)]


class Terminals:
    """Processes that run commands in one folder, each with its output in a file."""

    def __init__(self, folder: Path, **environment: str) -> None:
        self.folder, self._started = folder, []
        inherited = {k: v for k, v in os.environ.items() if not k.startswith("THINWIRE_")}
        self._environment = inherited | {
            "OMP_NUM_THREADS": "1",
            "HF_HUB_OFFLINE": "1",
            "COLUMNS": "200",
            **environment,
        }

    def start(self, line: str) -> "Terminal":
        output = self.folder / f"terminal-{len(self._started)}.txt"
        command = [sys.executable, "-m", "thinwire", *shlex.split(line)]
        with output.open("w") as file:
            process = subprocess.Popen(
                command,
                stdout=file,
                stderr=subprocess.STDOUT,
                cwd=self.folder,
                env=self._environment,
            )
        self._started.append(Terminal(process, output))
        return self._started[-1]

    def run(self, line: str, *, timeout_s: float = 200) -> str:
        return self.start(line).end(timeout_s=timeout_s)

    def close(self) -> None:
        for terminal in self._started:
            terminal.process.kill()
            terminal.process.wait()


class Terminal:
    def __init__(self, process: subprocess.Popen, output: Path) -> None:
        self.process, self._output = process, output

    @property
    def said(self) -> str:
        return self._output.read_text()

    def until(self, is_so: Callable[[str], object], *, timeout_s: float = 90) -> str:
        end_s = time.monotonic() + timeout_s
        while not is_so(self.said):
            assert self.process.poll() is None, self.said
            assert time.monotonic() < end_s, self.said
            time.sleep(0.05)
        return self.said

    def end(self, *, timeout_s: float = 200, code: int = 0) -> str:
        assert self.process.wait(timeout_s) == code, self.said
        return self.said


@pytest.fixture
def terminals(tmp_path: Path, request) -> Iterator[Terminals]:
    opened = Terminals(tmp_path, **getattr(request, "param", {}))
    yield opened
    opened.close()


def inner_step(out: Path) -> int:
    """Of the last whole record in the folder of a run."""
    file = out / "metrics.jsonl"
    lines = file.read_text().split("\n")[:-1] if file.exists() else []
    return json.loads(lines[-1])["step"] if lines else 0


def digest(said: str) -> str:
    return re.findall(r"outer_digest ([0-9a-f]{12});", said)[0]


@pytest.mark.parametrize("terminals", [{"THINWIRE_TOKEN": TOKEN}], indirect=True)
@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGINT])
def test_a_worker_that_is_killed_and_started_again_heals(
    number: signal.Signals, terminals: Terminals
) -> None:
    pytest.importorskip("torchft")
    text, port = page("elastic-run.md"), str(free_port())

    def here(line: str) -> str:
        return line.replace("29400", port).replace("--steps 2000", "--steps 200")

    (lighthouse,) = commands(text, "thinwire lighthouse")
    first, second, again = (here(line) for line in commands(text, "thinwire join"))
    served = terminals.start(here(lighthouse))
    served.until(lambda said: "ready; workers: thinwire join 127.0.0.1:" in said)
    one, two = terminals.start(first), terminals.start(second)
    folder = terminals.folder / "runs" / "one"
    one.until(lambda _: inner_step(folder) >= 20)
    (status,) = re.findall(r"`thinwire (status \S+) --watch`", text)
    assert "2 workers; the run is under way" in terminals.run(here(status))
    one.process.send_signal(number)
    if number == signal.SIGKILL:
        one.end(code=-number)
        served.until(lambda said: re.search("one is gone .*: no heartbeat for", said))
    else:
        one.end(code=128 + number)
        assert "stopped; to go on:" in one.said
        served.until(lambda said: re.search("^one left", said, re.MULTILINE))
        assert "one is gone" not in served.said
    came_back = terminals.start(again)
    assert digest(came_back.end()) == digest(two.end())
    (quoted,) = re.findall(r"`(round \d+: healed by [^`]*)`", text)
    said = re.escape(quoted).replace("15", r"\d+").replace("5", r"\d+")
    assert re.search(said, came_back.said)
    events = [json.loads(line) for line in (folder / "events.jsonl").read_text().splitlines()]
    assert {"joined", "healed"} <= {event["kind"] for event in events}


def watching() -> str:
    return (PAGES.parent / "watching.md").read_text(encoding="utf-8")


def without_numbers(text: str) -> list[str]:
    text = re.sub(r"up for .*?;", "up for", text)  # seconds or minutes
    return [word for word in text.split() if not any(letter.isdigit() for letter in word)]


def test_two_machines_meet_by_the_ticket_that_the_lighthouse_prints(terminals: Terminals) -> None:
    pytest.importorskip("torchft")
    text, port = page("two-machines.md"), free_port()
    (lighthouse,) = commands(text, "thinwire lighthouse")
    on_this = lighthouse.replace("HOST", "127.0.0.1")
    served = terminals.start(f"{on_this} --bind 127.0.0.1:{port}")
    said = served.until(lambda said: "ready" in said)
    (quoted,) = re.findall(r"^(ready; .*)$", text, re.MULTILINE)
    form = re.escape(quoted).replace(re.escape("..."), "[^']*")
    assert re.search(f"^{form}$", said, re.MULTILINE)
    (ticket,) = re.findall(r"'thinwire://[^']*'", said)

    def here(line: str) -> str:
        return line.replace("'thinwire://...'", ticket)

    (doctor,) = commands(text, "thinwire doctor")
    assert "no workers yet" in terminals.run(here(doctor))
    (join,) = commands(text, "thinwire join")
    first = terminals.start(here(join) + " --steps 200")
    first.until(lambda _: inner_step(terminals.folder / "runs" / "here") >= 10)
    second = terminals.start(here(join).replace("runs/here", "runs/there") + " --steps 200")
    second.until(lambda said: "healed by" in said)
    (status,) = re.findall(r"`thinwire (status \S+) --watch`", text)
    said = terminals.run(here(status))
    assert "2 workers; the run is under way" in said
    (shown,) = re.findall(r"^lighthouse up for .*\n\n .*$", watching(), re.MULTILINE)
    assert without_numbers(shown) == without_numbers(said)[: len(without_numbers(shown))]
    assert digest(first.end()) == digest(second.end())


def test_a_first_comparison_has_the_bytes_that_the_page_tells(terminals: Terminals) -> None:
    text = page("first-comparison.md")
    (compare,) = commands(text, "thinwire compare")
    (report,) = commands(text, "thinwire report")
    assert "--steps 400" in compare
    terminals.run(compare.replace("--steps 400", "--steps 40"))  # bytes of whole rounds
    assert "3 methods, 3 runs" in terminals.run(report)
    runs = terminals.folder / "runs" / "first"
    assert (runs / "report.html").is_file()
    sent = {
        summary["method"]: summary["sent_bytes_per_worker"]
        for summary in (json.loads(file.read_text()) for file in runs.glob("*/summary.json"))
    }
    (told,) = re.findall(r"`muloco:bits=2` sends about (\d+) times less than `ddp`", text)
    assert sent["ddp"] / sent["muloco:bits=2"] == pytest.approx(int(told), rel=0.03)
    assert "`diloco` sends ten times less" in text
    assert sent["ddp"] / sent["diloco"] == pytest.approx(10, rel=0.01)
