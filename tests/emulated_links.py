"""The emulated wide-area links of tools/wan.py, for every test that asks for `real` ones."""

import importlib.util
import sys
from pathlib import Path
from types import ModuleType

import pytest

TOOLS = Path(__file__).parents[1] / "tools"


def load(name: str) -> ModuleType:
    spec = importlib.util.spec_from_file_location(name, TOOLS / f"{name}.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[name] = module  # dataclasses look their module up
    spec.loader.exec_module(module)
    return module


@pytest.fixture(scope="module")
def wan() -> ModuleType:
    return load("wan")


@pytest.fixture(scope="module")
def real(wan: ModuleType) -> ModuleType:
    """The module, where it can do its work."""
    reason = wan.Link.supported()
    if reason is not None:
        pytest.skip(reason)
    return wan
