"""A run's folder: config.json, metrics.jsonl, summary.json."""

import json
import os
from pathlib import Path
from typing import Any, final

from thinwire.agreement import check_same, flatten_description
from thinwire.errors import CheckpointError, ConfigurationError

__all__ = ["RunFolder", "write_json"]

# Where a run happens and what it writes may change when it is resumed; what it computes may not.
_MAY_CHANGE = (
    "machine.device",
    "machine.timeout_s",
    "periods.keep_checkpoints",
    "periods.checkpoint_steps",
)


def write_json(path: Path, data: Any) -> None:
    """Write `data` so that a reader sees the old file or the new one, never half of it."""
    temporary = path.with_name(path.name + ".partial")
    temporary.write_text(json.dumps(data, indent=2, sort_keys=True) + "\n")
    os.replace(temporary, path)


def _what_counts(config: dict[str, Any]) -> dict[str, str]:
    fields = flatten_description(config)
    return {field: value for field, value in fields.items() if field not in _MAY_CHANGE}


@final
class RunFolder:
    """The files of one run under `path`."""

    def __init__(self, path: Path) -> None:
        self.path = path

    @property
    def checkpoints(self) -> Path:
        """Where checkpoints go."""
        return self.path / "checkpoints"

    def summary(self) -> dict[str, Any] | None:
        """The summary of a finished run, or None."""
        file = self.path / "summary.json"
        return json.loads(file.read_text()) if file.exists() else None

    def open_new(self, config: dict[str, Any]) -> None:
        """Begin a run here.

        Raises:
            ConfigurationError: there is a run here already; nothing of it is touched.
        """
        if (self.path / "config.json").exists():
            raise ConfigurationError(
                f"start a run in {self.path}",
                because="it holds one already",
                do="add --resume to continue that one, or pass another --out",
            )
        self.path.mkdir(parents=True, exist_ok=True)
        write_json(self.path / "config.json", config)
        (self.path / "metrics.jsonl").write_text("")

    def check_same(self, config: dict[str, Any]) -> None:
        """Raise `MismatchError` if the run here was started with another configuration."""
        check_same(
            _what_counts(self._config()),
            _what_counts(json.loads(json.dumps(config))),
            cannot=f"resume {self.path}",
            whose="the run there",
            do="repeat the arguments it was started with, or pass another --out",
        )

    def has_run(self) -> bool:
        """Whether a run was begun here."""
        return (self.path / "config.json").exists()

    def _config(self) -> dict[str, Any]:
        file = self.path / "config.json"
        try:
            return json.loads(file.read_text())
        except (OSError, ValueError) as error:
            raise CheckpointError(
                f"read {file}",
                because=str(error),
                do="restore the file, or start anew with another --out",
            ) from error

    def cut_metrics(self, step: int) -> None:
        """Forget records after `step`, and a line that a killed process left unfinished."""
        file = self.path / "metrics.jsonl"
        lines = file.read_text().splitlines(keepends=True) if file.exists() else []
        kept = [line for line in lines if line.endswith("\n") and json.loads(line)["step"] <= step]
        temporary = file.with_name(file.name + ".partial")
        temporary.write_text("".join(kept))
        os.replace(temporary, file)

    def append(self, record: dict[str, Any]) -> None:
        """Add one line to metrics.jsonl."""
        with (self.path / "metrics.jsonl").open("a") as file:
            file.write(json.dumps(record) + "\n")

    def finish(self, summary: dict[str, Any]) -> None:
        """Write summary.json, which marks the run as finished."""
        write_json(self.path / "summary.json", summary)
