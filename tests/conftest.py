import gc
import signal
from types import ModuleType
from typing import Any

import hypothesis
import pytest
import torch
import wan

import forked

# An example may take as long as it likes: what else a machine does decides on that.
hypothesis.settings.register_profile("busy machine", deadline=None)
hypothesis.settings.load_profile("busy machine")

# Shells ignore Ctrl-C in what they start in the background, and so does all that it starts.
if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
    signal.signal(signal.SIGINT, signal.default_int_handler)


@pytest.hookimpl(optionalhook=True)
def pytest_configure_node(node: Any) -> None:
    """All processes of pytest-xdist fork from one server, which loads while they collect."""
    node.workerinput["server"] = forked.offered()


def pytest_configure(config: pytest.Config) -> None:
    if hasattr(config, "workerinput"):
        forked.use(config.workerinput["server"])


@pytest.hookimpl(tryfirst=True)
def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Give the `slow` mark to the cases that `slow_cases("beginning of the id", ...)` names.

    What uses a server that lasts for the session runs in one process, so that only one is started.
    """
    for item in items:
        for server in {"running", "s3"} & {*getattr(item, "fixturenames", ())}:
            item.add_marker(pytest.mark.xdist_group(server))
        case = item.name.partition("[")[2]
        for mark in item.iter_markers("slow_cases"):
            cases, but = mark.args or ("",), mark.kwargs.get("but", ())
            if case.startswith(tuple(cases)) and not case.startswith(tuple(but) or "\0"):
                item.add_marker("slow")


def pytest_collection_finish() -> None:
    """Keep modules and tests out of garbage collections, a tenth of the time otherwise."""
    gc.collect()
    gc.freeze()


@pytest.fixture(autouse=True)
def one_thread():
    """Small tensors gain nothing from threads, and two test processes share two cores."""
    torch.set_num_threads(1)


@pytest.fixture(scope="module")
def real() -> ModuleType:
    """The emulated wide-area links of tools/wan.py, where they can do their work."""
    if (reason := wan.Link.supported()) is not None:
        pytest.skip(reason)
    return wan
