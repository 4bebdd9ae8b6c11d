"""`FAULTS.md` names a test for every fault; each of them exists."""

import re
from pathlib import Path

TESTS = Path(__file__).parent


def test_the_test_of_every_fault_exists() -> None:
    covered = (TESTS / "FAULTS.md").read_text().partition("## Not covered")[0]
    rows = re.findall(r"^\| (?!found|-)(.*?) \| (.*?) \| (.*) \|$", covered, re.MULTILINE)
    assert len(rows) > 100
    for _, fault, tests in rows:
        named = re.findall(r"`([\w/.]+)::(\w+)`", tests)
        assert named, fault
        for file, name in named:
            assert f"def {name}(" in (TESTS / file).read_text(), (fault, file, name)
