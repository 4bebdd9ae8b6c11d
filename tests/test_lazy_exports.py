import sys
import types

import pytest

from thinwire.lazy_exports import lazy_exports


@pytest.fixture
def package(monkeypatch):
    package, home = types.ModuleType("made_up"), types.ModuleType("made_up.home")
    home.Thing = object()
    package.own = 1
    monkeypatch.setitem(sys.modules, "made_up", package)
    monkeypatch.setitem(sys.modules, "made_up.home", home)
    package.__getattr__, package.__dir__ = lazy_exports(
        "made_up", {"made_up.home": ["Thing", "missing"]}, modules=["home"]
    )
    return package


def test_a_name_is_imported_once_and_found_as_any_other(package) -> None:
    assert "Thing" not in vars(package)
    assert package.Thing is sys.modules["made_up.home"].Thing
    assert vars(package)["Thing"] is package.Thing
    assert package.home is sys.modules["made_up.home"]


def test_all_names_are_listed_before_they_are_imported(package) -> None:
    assert {"Thing", "home", "own"} <= set(dir(package))


def test_an_unknown_name_is_an_attribute_error(package) -> None:
    with pytest.raises(AttributeError, match="module 'made_up' has no attribute 'Thin'"):
        _ = package.Thin
    with pytest.raises(AttributeError, match="missing"):
        _ = package.missing
