import gc
import signal
from types import ModuleType
from typing import Any

import hypothesis
import pytest
import torch
import wan

import forked

# No deadline for examples, because other load on the machine decides how long they take.
hypothesis.settings.register_profile("busy machine", deadline=None)
hypothesis.settings.load_profile("busy machine")

# Shells ignore Ctrl-C in background processes, and their children inherit that.
if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
    signal.signal(signal.SIGINT, signal.default_int_handler)


@pytest.hookimpl(optionalhook=True)
def pytest_configure_node(node: Any) -> None:
    """Let all pytest-xdist processes fork from one server, which loads while they collect."""
    node.workerinput["server"] = forked.offered()


def pytest_configure(config: pytest.Config) -> None:
    if hasattr(config, "workerinput"):
        forked.use(config.workerinput["server"])


@pytest.hookimpl(tryfirst=True)
def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Give the `slow` mark to the cases that `slow_cases("beginning of the id", ...)` names."""
    for item in items:
        case = item.name.partition("[")[2]
        for mark in item.iter_markers("slow_cases"):
            cases, but = mark.args or ("",), mark.kwargs.get("but", ())
            if case.startswith(tuple(cases)) and not case.startswith(tuple(but) or "\0"):
                item.add_marker("slow")


def pytest_collection_finish() -> None:
    """Keep modules and tests out of garbage collection, which would take a tenth of the time."""
    gc.collect()
    gc.freeze()


@pytest.fixture(autouse=True)
def one_thread():
    """Small tensors gain nothing from threads, and two test processes share two cores."""
    torch.set_num_threads(1)


@pytest.fixture(scope="module")
def real() -> ModuleType:
    """The emulated wide-area links of tools/wan.py, on machines that support them."""
    if (reason := wan.Link.supported()) is not None:
        pytest.skip(reason)
    return wan
