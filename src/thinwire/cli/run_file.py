"""The file in a run's folder that repeats the run."""

from collections.abc import Mapping
from contextlib import suppress
from pathlib import Path
from typing import Any

from thinwire.cli.flags import write_settings
from thinwire.train.observers import Observer


class RunFile(Observer):
    """Writes run.toml with the first record: a run that cannot start leaves no folder.

    Args:
        folder: of the run.
        settings: by the names of their flags.
    """

    def __init__(self, folder: Path, settings: Mapping[str, Any]) -> None:
        self._folder, self._settings = folder, settings

    def record(self, record: dict[str, Any]) -> None:
        """Write the file, once."""
        del record
        if self._settings:
            with suppress(OSError):  # a full disk ends no training, and config.json has it all
                write_settings(self._folder, self._settings)
            self._settings = {}
