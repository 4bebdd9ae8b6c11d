"""Keys that a store accepted before and refuses now."""

import asyncio
import time
from contextlib import closing

import pytest

from s3_server import Proxy, options_of, s3_fixture  # noqa: F401 - the fixture
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
        assert time.monotonic() - begin_s < 5
        refused[0] = False
        asyncio.run(get(store, 30))
        asyncio.run(renewed())
        assert sum("still trying" in each.message for each in caplog.records) == 1
        refused[0] = True
        with pytest.raises(ExchangeTimeout, match=rf"{status} .*this clock is right"):
            asyncio.run(get(store, 1))
