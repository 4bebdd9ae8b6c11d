"""Where tests lie: that of `thinwire/x/y.py` is `tests/x/test_y.py`."""

from collections import Counter
from pathlib import Path

ROOT = Path(__file__).parents[2]
PACKAGE = ROOT / "src" / "thinwire"
BESIDE = ("benchmarks", "docs", "tools")  # folders beside the package, which have tests, too


def files() -> list[Path]:
    return sorted((ROOT / "tests").rglob("test_*.py"))


def test_every_folder_of_tests_is_one_of_the_package() -> None:
    def room(test: Path) -> Path:
        folder = test.parent.relative_to(ROOT / "tests")
        return (ROOT if folder.parts[:1] and folder.parts[0] in BESIDE else PACKAGE) / folder

    strays = [str(test.relative_to(ROOT)) for test in files() if not room(test).is_dir()]
    assert strays == []


def test_no_two_test_files_have_one_name() -> None:
    names = Counter(test.name for test in files())
    assert [name for name, count in names.items() if count > 1] == []


def test_modules_are_counted_that_no_test_is_named_after(capsys) -> None:
    """A count to look at with `-s` (pytest prints it), not a rule: contracts test many modules."""
    named = {test.name.removeprefix("test_") for test in files()}
    modules = [m for m in PACKAGE.rglob("*.py") if not m.name.startswith("__")]
    without = sorted(str(m.relative_to(PACKAGE)) for m in modules if m.name not in named)
    with capsys.disabled():
        print(f"\n{len(without)} of {len(modules)} modules have no test file of their name")
    assert len(without) < len(modules)
