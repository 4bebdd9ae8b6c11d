"""Keys that a store accepted before and refuses now, or with another time."""

import asyncio
import os
import shutil
import subprocess
import sys
import time
from contextlib import closing

import pytest

from s3_server import Proxy, in_aws, options_of, s3_fixture  # noqa: F401 - the fixture
from thinwire.errors import ExchangeError, ExchangeTimeout
from thinwire.transport.object_store import ObjectStore


async def get(store: ObjectStore, within_s: float) -> None:
    assert await store.get("nothing", time.monotonic() + within_s, nbytes=1) is None


@pytest.mark.parametrize("status", ["401", "403"])
def test_keys_are_refused_at_once_only_before_they_were_accepted(s3, caplog, status) -> None:
    refused = [True]
    with closing(Proxy(s3, lambda number, line: status if refused[0] else "")) as proxy:
        store = ObjectStore("s3://run", options_of(proxy.endpoint))

        async def renewed() -> None:
            refused[0] = True
            waiting = asyncio.ensure_future(get(store, 30))
            await asyncio.sleep(1)
            assert not waiting.done()
            refused[0] = False
            await waiting

        begin_s = time.monotonic()
        with pytest.raises(ExchangeError, match="pass keys that may put") as caught:
            asyncio.run(get(store, 30))
        assert not isinstance(caught.value, ExchangeTimeout)
        assert time.monotonic() - begin_s < 25
        refused[0] = False
        asyncio.run(get(store, 30))
        asyncio.run(renewed())
        assert sum("still trying" in each.message for each in caplog.records) == 1
        refused[0] = True
        with pytest.raises(ExchangeTimeout, match=rf"{status} .*this clock is right"):
            asyncio.run(get(store, 1))


# What a process sees whose machine's clock is an hour ahead.
AHEAD = r"""
#define _GNU_SOURCE
#include <dlfcn.h>
#include <time.h>
int clock_gettime(clockid_t clock, struct timespec *now) {
    int (*real)(clockid_t, struct timespec *) = dlsym(RTLD_NEXT, "clock_gettime");
    int status = real(clock, now);
    now->tv_sec += clock == CLOCK_REALTIME ? 3600 : 0;
    return status;
}
"""


@pytest.mark.skipif(not sys.platform.startswith("linux") or not shutil.which("cc"), reason="no cc")
def test_a_clock_an_hour_off_is_named(s3, tmp_path) -> None:
    (tmp_path / "ahead.c").write_text(AHEAD)
    library = tmp_path / "ahead.so"
    subprocess.run(
        ["cc", "-shared", "-fPIC", "-o", library, tmp_path / "ahead.c", "-ldl"], check=True
    )
    lines = (
        "import time, thinwire as tw",
        f"assert time.time() > {time.time() + 3000}",
        "elastic = tw.transport.Elastic('s3://run', run='r', identity='a')",
        "net = __import__('torch').nn.Linear(2, 1)",
        "tw.OuterLoop(net, [], tw.presets.diloco(sync_every=2), transport=elastic).join()",
    )
    done = subprocess.run(
        [sys.executable, "-c", "\n".join(lines)],
        env=os.environ | in_aws(s3) | {"LD_PRELOAD": str(library)},
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
    )
    assert done.returncode == 1
    assert "RequestTimeTooSkewed" in done.stderr
    assert "see that this clock is right" in done.stderr
