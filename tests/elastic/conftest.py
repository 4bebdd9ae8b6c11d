import logging
from collections.abc import Iterator
from typing import Any

import pytest

from bucket_workers import memory
from thinwire.elastic import session, transport


@pytest.fixture
def quick(monkeypatch) -> None:
    """Workers of one process need no seconds to find each other."""
    monkeypatch.setattr(session, "_SETTLE_S", 0.05)
    monkeypatch.setattr(session, "_LEAST_TURN_S", 0.1)
    monkeypatch.setattr(transport, "_UNMEASURED_ROUND_S", 1.0)


@pytest.fixture
def store() -> Any:
    return memory()


@pytest.fixture
def quiet() -> Iterator[None]:
    logging.disable()
    yield
    logging.disable(logging.NOTSET)
