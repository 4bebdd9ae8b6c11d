"""What a run trains on, described: nothing is read before it is loaded."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from thinwire.errors import ConfigurationError

if TYPE_CHECKING:
    from thinwire.train.data.loading import LoadedData


@dataclass(frozen=True, kw_only=True)
class Data:
    """What to train on.

    Args:
        corpus: python-stdlib, site-packages, a path (.txt, .jsonl, .parquet, .bin, or a folder of
            them), or a hub name `org/name[:configuration]`.
        tokenizer: "bytes"; "bpe:4096", trained on the corpus; "ids:50304", the vocabulary of token
            shards, for which "bytes" stands when the corpus is `.bin`; or a folder or hub name.
        sequence_length: T, tokens; windows have one more.
        validation_sequences: windows to validate on, at most.

    Raises:
        ConfigurationError: a number is below 1.
    """

    corpus: str = "python-stdlib"
    tokenizer: str = "bytes"
    sequence_length: int = 128
    validation_sequences: int = 512

    def __post_init__(self) -> None:
        for name in ("sequence_length", "validation_sequences"):
            if getattr(self, name) < 1:
                raise ConfigurationError(
                    "describe the data",
                    because=f"{name} is {getattr(self, name)}",
                    do=f"pass {name} >= 1",
                )

    def load(self) -> LoadedData:
        """Find the corpus, read and tokenise it.

        Raises:
            CorpusError: it is unknown, empty, unreadable or too short.
            ConfigurationError: the tokenizer does not fit the corpus.
        """
        from thinwire.train.data.loading import load  # brings numpy and torch

        return load(self)
