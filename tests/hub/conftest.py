"""One hub for all tests that leave it as it is."""

from collections.abc import Iterator

import pytest

from hub_process import Hub, hub
from thinwire.transport.address import HubAddress
from training import corpus, tiny

__all__ = ["corpus", "running_fixture", "tiny"]


@pytest.fixture(scope="session", name="running")
def running_fixture(tmp_path_factory) -> Iterator[Hub]:
    folder = tmp_path_factory.mktemp("hub")
    with hub(folder, "--bind=0.0.0.0:0", "--advertise=127.0.0.1") as started:
        started.port = HubAddress.read(started.address).port
        yield started
