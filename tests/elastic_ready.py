"""A run in a store that was not written by workers."""

import asyncio
import time
from collections.abc import Sequence

from thinwire.elastic.roll import View, WorkerReport
from thinwire.elastic.run_objects import RunObjects
from thinwire.security.token import Token
from thinwire.transport.object_store import ObjectStore


def write_run(
    url: str,
    *rolls: View,
    calls: Sequence[tuple[WorkerReport, int]] = (),
    token: Token | None = None,
    about: dict[str, str] | None = None,
) -> None:
    """Write rolls of the run `r`, `calls` for rolls by number, and its description."""
    objects = RunObjects(ObjectStore(url), "r", token)

    async def put() -> None:
        until_s = time.monotonic() + 10
        if about is not None:
            await objects.check_description(about, "a:1", until_s)
        for roll in rolls:
            assert await objects.put_roll(roll, until_s)
        for call, number in calls:
            await objects.put_call(number, call, until_s)

    asyncio.run(put())
