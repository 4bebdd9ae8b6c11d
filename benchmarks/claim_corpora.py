"""Corpora of the claims: one that does not depend on Python's version, and one for searches alone.

Both are folders of token shards with a token for each byte.
"""

import hashlib
import importlib.metadata
import os
from collections.abc import Iterable
from pathlib import Path

import numpy as np

from thinwire.errors import CorpusError
from thinwire.files import replace_file
from thinwire.train.data.corpora import ONE_IN, SEPARATOR, Corpus, resolve

SYMPY = "48d000c2186e37e9a4bcdfeff7cd52eca2987e31f0efb3b0a9e479844a151d6c"
"""SHA-256 of the corpus of sympy 1.14.0, which torch needs and constraints.txt names."""


def sympy(folder: Path) -> Path:
    """Write the sources of the installed sympy, 26 MB in 1,500 files, as a corpus.

    Raises:
        CorpusError: another version is installed, or it differs from the published one.
    """
    found = importlib.metadata.distribution("sympy")
    names = sorted(str(file) for file in found.files or () if str(file).endswith(".py"))
    documents = [Path(str(found.locate_file(name))).read_bytes() for name in names]
    digest = hashlib.sha256(SEPARATOR.join(documents)).hexdigest()
    if digest != SYMPY:
        raise CorpusError(
            "read the sources of sympy as a corpus",
            because=f"those of version {found.version} have SHA-256 {digest}, not {SYMPY}",
            do="install what constraints.txt names: make .venv/.ready",
        )
    return split(documents, folder, side=b"reported")


def held_out(corpus: str, folder: Path) -> Path:
    """Write the training side of `corpus`, and hold out some of its documents for validation.

    Leaves out the validation side of `corpus`, on which results are reported.
    """
    found = resolve(corpus)
    assert isinstance(found, Corpus), "settings have corpora of files"
    text = found.train[0].astype(np.uint8).tobytes()
    return split(text.split(SEPARATOR)[:-1], folder, side=b"")


def split(documents: Iterable[bytes], folder: Path, side: bytes) -> Path:
    """Write documents as shards, one in twenty for validation; `side` decides which."""
    sides: dict[str, list[bytes]] = {"train": [], "val": []}
    for document in documents:
        digest = hashlib.sha256(side + document).digest()
        is_held_out = int.from_bytes(digest, "little") % ONE_IN == 0
        sides["val" if is_held_out else "train"].append(document + SEPARATOR)
    folder.mkdir(parents=True, exist_ok=True)
    for name, texts in sides.items():
        tokens = np.frombuffer(b"".join(texts), dtype=np.uint8).astype("<u2")
        # Another run may have the file mapped into its memory, or write it at the same time.
        own = f".{os.getpid()}.partial"
        replace_file(folder / f"{name}.bin", tokens.tofile, suffix=own)
    return folder
