import hypothesis
import pytest
import torch

import tiers
from emulated_links import real, wan

__all__ = ["one_thread", "real", "wan"]

# An example may take as long as it likes: what else a machine does decides on that.
hypothesis.settings.register_profile("busy machine", deadline=None)
hypothesis.settings.load_profile("busy machine")


@pytest.hookimpl(tryfirst=True)
def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    for item in items:
        tier = tiers.of(item.nodeid)
        if tier != "fast":
            item.add_marker(tier)


@pytest.fixture(autouse=True)
def one_thread():
    """Small tensors gain nothing from threads, and two test processes share two cores."""
    torch.set_num_threads(1)
