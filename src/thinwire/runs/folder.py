"""The files of a run, written while it trains: config.json, metrics.jsonl, summary.json, ..."""

import json
from collections.abc import Generator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from thinwire.errors import CheckpointError, ConfigurationError
from thinwire.files import replace_text
from thinwire.handshake import check_same
from thinwire.runs.schema import identities, read_config, read_summary, step_of

# Fields that change with the number of workers, since these share the cores.
_WITH_WORKERS = ("workers", "machine.threads")


def write_json(path: Path, data: Any) -> None:
    """Write `data` atomically: a reader sees the old file or the new one."""
    replace_text(path, json.dumps(data, indent=2, sort_keys=True, allow_nan=False) + "\n")


class RunFolder:
    """The files of one run under `path`."""

    def __init__(self, path: Path) -> None:
        self.path, self.checkpoints = path, path / "checkpoints"

    def summary(self) -> dict[str, Any] | None:
        """The summary of a finished run, or None."""
        if not (self.path / "summary.json").exists():
            return None
        return dict(read_summary(self.path).described)

    def check_free(self) -> None:
        """Raise `ConfigurationError` if the folder has a run; leave that run alone."""
        if self.has_run():
            what = f"start a run in {self.path}"
            do = "add --resume to continue that one, or pass another --out"
            raise ConfigurationError(what, because="it holds a run already", do=do)

    def open(self, config: dict[str, Any]) -> None:
        """Begin a run in this folder, or continue the one that it has.

        Raises:
            OSError: the folder cannot be written.
        """
        if self.has_run():
            if read_config(self.path).workers != config["workers"]:
                write_json(self.path / "config.json", config)
            return
        self.path.mkdir(parents=True, exist_ok=True)
        (self.path / "metrics.jsonl").write_text("")
        write_json(self.path / "config.json", config)

    def note_data(self, fingerprint: str) -> None:
        """Record the fingerprint of the tokens: corpora of one name may differ between machines.

        Raises:
            CheckpointError: it cannot be written.
        """
        with _writing(self.path / "data.json"):
            write_json(self.path / "data.json", {"fingerprint": fingerprint})

    def check_same(
        self,
        config: dict[str, Any],
        *,
        saved: dict[str, Any] | None = None,
        other_workers: bool = False,
    ) -> None:
        """Raise `MismatchError` if the run of this folder was started with another configuration.

        Args:
            config: configuration of the run to continue.
            saved: a checkpoint's record of the configuration; default config.json.
            other_workers: whether the number of workers has changed.
        """
        may_differ = _WITH_WORKERS if other_workers else ()
        theirs, mine = identities(self.config() if saved is None else saved, config, may_differ)
        check_same(
            theirs,
            mine,
            cannot=f"resume {self.path}",
            whose="the run there",
            do="repeat the arguments it was started with and restore its text and checkpoints, or "
            "pass another --out",
        )

    def config(self) -> dict[str, Any]:
        """The configuration of the run, from config.json, with current names of slots.

        Raises:
            CheckpointError: the file is missing or damaged.
        """
        return dict(read_config(self.path).described)

    def is_elastic(self) -> bool:
        """True if an elastic worker wrote the run: only these write events."""
        return (self.path / "events.jsonl").exists()

    def has_run(self) -> bool:
        """True if a run was begun in this folder."""
        # Otherwise the next run would take leftover checkpoints for its own.
        return (self.path / "config.json").exists() or self.checkpoints.exists()

    def cut_metrics(self, step: int) -> None:
        """Drop records after `step`, and a line that a killed process left unfinished.

        Raises:
            CheckpointError: the file cannot be written.
        """
        file = self.path / "metrics.jsonl"
        lines = file.read_bytes().splitlines(keepends=True) if file.exists() else []
        kept = [
            line
            for line in lines
            if line.endswith(b"\n") and (its := step_of(line)) is not None and its <= step
        ]
        with _writing(file):
            replace_text(file, b"".join(kept).decode())

    def append(self, record: dict[str, Any], name: str = "metrics.jsonl") -> None:
        """Add one line to metrics.jsonl, or to events.jsonl.

        Raises:
            CheckpointError: it cannot be written.
        """
        with _writing(self.path / name), (self.path / name).open("a") as file:
            file.write(json.dumps(record) + "\n")

    def finish(self, summary: dict[str, Any]) -> None:
        """Write summary.json, which marks the run as finished.

        Raises:
            CheckpointError: it cannot be written.
        """
        with _writing(self.path / "summary.json"):
            write_json(self.path / "summary.json", summary)


@contextmanager
def _writing(file: Path) -> Generator[None]:
    try:
        yield
    except OSError as error:
        do = "free space or fix permissions, then add --resume"
        raise CheckpointError(f"write to {file}", because=str(error), do=do) from error
