"""A thread with an event loop: answers, errors, and its end."""

import asyncio
import concurrent.futures
import gc
import signal
import subprocess
import sys
import threading
import time

from thinwire.elastic import loop_thread
from thinwire.elastic.loop_thread import LoopThread


def store_threads() -> set[threading.Thread]:
    """Those alive now; an earlier test's may end at any time, so count only what was added."""
    return {thread for thread in threading.enumerate() if thread.name == "thinwire-store"}


def program(*lines: str) -> list[str]:
    imports = ("import asyncio", "from thinwire.elastic import loop_thread")
    code = "\n".join((*imports, "LoopThread = loop_thread.LoopThread", *lines))
    return [sys.executable, "-W", "ignore", "-c", code]


def ends_well(*lines: str) -> None:
    """Run a program, which ends with status 0 and without a word of an error."""
    done = subprocess.run(program(*lines), capture_output=True, timeout=60, check=False)
    assert (done.returncode, done.stderr) == (0, b"")


def test_closing_cancels_what_is_under_way_and_the_last_reference_closes() -> None:
    ended = threading.Event()

    async def long() -> None:
        try:
            await asyncio.sleep(1000)
        finally:
            ended.set()

    thread = LoopThread()
    under_way = thread.start(long())
    thread.run(asyncio.sleep(0))
    thread.close()
    assert ended.is_set()
    assert under_way.cancelled()
    before = store_threads()
    thread = LoopThread()
    assert len(store_threads() - before) == 1
    del thread  # no reference to it is left
    gc.collect()
    assert store_threads() <= before


def test_loops_of_a_process_have_one_clock_though_one_is_blocked(monkeypatch) -> None:
    now_s = [100.0]
    monkeypatch.setattr(asyncio.BaseEventLoop, "time", lambda _: now_s[0])
    for name in ("_seen_s", "_stopped_s"):
        monkeypatch.setattr(loop_thread._Loop, name, 0.0)
    loops = [loop_thread._Loop() for _ in range(3)]
    readings = [[loop.time()] for loop in loops[:2]]
    for _ in range(10):  # seconds, in which the first one does not look
        now_s[0] += 1
        loops[1].time()
    for reading, loop in zip(readings, loops, strict=False):
        reading.append(loop.time())
    now_s[0] += 20  # in which the process is stopped
    for reading, loop in zip(readings, loops, strict=False):
        reading.append(loop.time())
    later_s = loops[2].time()
    for loop in loops:
        loop.close()
    monkeypatch.undo()
    assert (readings, later_s) == ([[100.0, 110.0, 110.0]] * 2, 110.0)


def test_the_last_reference_may_be_that_of_what_it_runs() -> None:
    before, let_go = store_threads(), threading.Event()
    holder = [LoopThread()]

    async def drop() -> None:
        await asyncio.to_thread(let_go.wait)
        holder.clear()
        gc.collect()

    under_way = holder[0].start(drop())
    (thread,) = store_threads() - before
    let_go.set()
    concurrent.futures.wait([under_way], timeout=5)
    thread.join(5)
    assert not thread.is_alive()


def test_the_clock_of_its_waits_stands_while_the_process_is_stopped() -> None:
    command = program(
        "loop_thread._TICK_S, loop_thread._STOPPED_S = 0.1, 0.5",
        "async def wait():",
        "    began_s = asyncio.get_running_loop().time()",
        "    print('waits', flush=True)",
        "    await asyncio.sleep(0.4)",
        "    return asyncio.get_running_loop().time() - began_s",
        "print(LoopThread().run(wait()))",
    )
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout.readline() == "waits\n"
        process.send_signal(signal.SIGSTOP)
        time.sleep(1.2)
        process.send_signal(signal.SIGCONT)
        assert 0.4 <= float(process.stdout.readline()) < 1.2


def test_a_forked_child_that_exits_leaves_it_alone() -> None:
    ends_well(
        "import os, sys",
        "thread = LoopThread()",
        "work = thread.start(asyncio.sleep(0.3, 'done'))",
        "child = os.fork()",
        "if not child: sys.exit()",
        "assert os.waitpid(child, 0)[1] == 0",
        "assert work.result() == 'done'",
        "assert thread.run(asyncio.sleep(0, 'more')) == 'more'",
    )


def test_it_ends_with_the_interpreter_and_with_an_exchange_under_way(tmp_path) -> None:
    ends_well(
        "import thinwire as tw",
        "from thinwire.testing.transports import gathered, payload_of",
        f"elastic = tw.transport.Elastic('file://{tmp_path}', worker=0, workers=2, run='r')",
        "elastic.run(gathered(payload_of(0, 9), 0, 2), tw.transport.RoundTag(what='x', round=1))",
    )
