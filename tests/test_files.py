import os
import stat
from pathlib import Path

import pytest

from thinwire.files import replace_file, replace_folder, replace_text


def names(folder: Path) -> list[str]:
    return sorted(path.name for path in folder.iterdir())


def half(temporary: Path) -> None:
    """Write a part of a file or folder."""
    (temporary / "three" if temporary.is_dir() else temporary).write_text("ne")
    raise OSError("disk full")


def test_a_write_that_fails_leaves_the_old_file_and_nothing_else(tmp_path) -> None:
    path = tmp_path / "a"
    (tmp_path / "a.partial").write_text("longer than what comes, from a process that was killed")
    replace_text(path, "old")
    with pytest.raises(OSError, match="disk full"):
        replace_file(path, half)
    assert path.read_text() == "old"
    assert names(tmp_path) == ["a"]


def test_file_and_name_are_on_the_disk_before_it_returns(tmp_path, monkeypatch) -> None:
    """The file before it gets its name, the folder after."""
    steps = []
    sync, replace = os.fsync, os.replace

    def note_sync(descriptor: int) -> None:
        steps.append("folder" if stat.S_ISDIR(os.fstat(descriptor).st_mode) else "file")
        sync(descriptor)

    def note_replace(source: Path, target: Path) -> None:
        steps.append("name")
        replace(source, target)

    monkeypatch.setattr(os, "fsync", note_sync)
    monkeypatch.setattr(os, "replace", note_replace)
    replace_text(tmp_path / "a", "new")
    assert steps == ["file", "name", "folder"]


def test_two_writers_of_one_file_do_not_meet(tmp_path) -> None:
    path = tmp_path / "a"

    def write(temporary: Path) -> None:
        temporary.write_text("first")
        replace_file(path, lambda other: other.write_text("second"), suffix=".2")

    replace_file(path, write, suffix=".1")
    assert path.read_text() == "first"
    assert names(tmp_path) == ["a"]


def test_a_folder_is_replaced_with_all_that_was_in_it_or_left(tmp_path) -> None:
    path = tmp_path / "model"
    for name in ("one", "two"):
        replace_folder(path, lambda folder, name=name: (folder / name).write_text(name))
        assert names(path) == [name]
    assert names(tmp_path) == ["model"]

    with pytest.raises(OSError, match="disk full"):
        replace_folder(path, half)
    assert names(path) == ["two"]
