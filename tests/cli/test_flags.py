import dataclasses
from typing import Any

import pytest

from thinwire.cli.flags import RunFlags, apply_flags, changes_of
from thinwire.handshake import flatten_description
from thinwire.train.recipes import laptop


def test_every_flag_sets_a_field_that_there_is() -> None:
    names = [f.name for f in dataclasses.fields(RunFlags) if f.name != "recipe"]
    given: dict[str, Any] = dict.fromkeys(names, 1)
    changes = changes_of(RunFlags(**given))
    assert len(changes) == len(names)
    assert set(changes) <= set(flatten_description(laptop("ddp").describe()))


@pytest.mark.parametrize(("flag", "compiles"), [("yes", True), ("no", False), (None, False)])
def test_compile_is_a_bool_that_is_written_as_the_flag_has_it(flag, compiles: bool) -> None:
    """Folders of runs from before it was one are resumed, and compared field by field."""
    config = apply_flags(RunFlags(compile=flag), "ddp", 0)
    assert config.machine.compile is compiles
    assert config.describe()["machine"]["compile"] == ("yes" if compiles else "no")
