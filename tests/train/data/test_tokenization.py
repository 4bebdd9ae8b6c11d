"""Tokenizers: bytes, a trained BPE and its cache, folders of transformers."""

from pathlib import Path

import numpy as np
import pytest

from thinwire.errors import ConfigurationError, CorpusError
from thinwire.train.data import tokenization as bpe
from thinwire.train.data.corpora import fingerprint
from thinwire.train.data.tokenization import PretrainedTokenizer, Tokenizer, load_tokenizer

PROSE = "the quick brown fox jumps over the lazy dog\nnaïve café ☕ 数字\n" * 40
TEXT = np.frombuffer(PROSE.encode() + b"\0", dtype=np.uint8)


@pytest.fixture(autouse=True)
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("THINWIRE_CACHE", str(tmp_path / "cache"))
    return tmp_path / "cache"


def load(name: str, text=TEXT) -> Tokenizer:
    return load_tokenizer(name, text)


def test_bpe_gives_the_text_back_in_fewer_tokens_and_keeps_documents_apart():
    tokenizer = load("bpe:300")
    ids = tokenizer.encode(PROSE.encode())
    assert tokenizer.vocab_size == 300
    assert ids.dtype == np.uint16
    assert ids.max() < 300
    assert ids.size < len(PROSE.encode()) * 0.7
    assert bpe.cached_bpe(TEXT, 300).decode(ids.tolist()) == PROSE
    assert tokenizer.encode(b"").size == 0
    parts = [tokenizer.encode(b"the fox"), [0], tokenizer.encode(b"the dog"), [0]]
    assert tokenizer.encode(b"the fox\0the dog\0").tolist() == np.concatenate(parts).tolist()
    # Bytes that are not UTF-8.
    mended = tokenizer.encode("the \ufffd fox".encode())
    assert tokenizer.encode(b"the \xff fox").tolist() == mended.tolist()
    assert bpe.train_bpe(TEXT, 320).to_str() == bpe.train_bpe(TEXT.copy(), 320).to_str()
    assert load("bpe:4096", TEXT[:20]).vocab_size < 300


def test_bpe_is_cached_by_content_and_size_and_not_trained_again(cache: Path, monkeypatch):
    first = load("bpe:300").encode(PROSE.encode())
    load("bpe:301")
    load("bpe:300", TEXT[:-9])
    mine, other = fingerprint([TEXT]), fingerprint([TEXT[:-9]])
    names = {f"bpe-300-{mine}.json", f"bpe-301-{mine}.json", f"bpe-300-{other}.json"}
    assert {path.name for path in cache.iterdir()} == names
    monkeypatch.setattr(bpe, "train_bpe", None)
    assert load("bpe:300").encode(PROSE.encode()).tolist() == first.tolist()


def test_a_cache_that_cannot_be_read_or_written_is_named(cache: Path):
    cache.mkdir()
    file = cache / f"bpe-300-{fingerprint([TEXT])}.json"
    file.write_text("{")
    with pytest.raises(CorpusError, match=rf"{file.name}.*delete the file"):
        load("bpe:300")
    file.unlink()
    cache.rmdir()
    cache.write_text("a file where the folder should be")
    with pytest.raises(CorpusError, match="THINWIRE_CACHE"):
        load("bpe:300")


def test_pieces_are_the_text_cut_at_lines(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(bpe, "_PIECE_BYTES", 50)
    pieces = list(bpe.pieces(PROSE.encode()))
    assert len(pieces) > 10
    assert "".join(pieces) == PROSE
    assert all(piece.endswith("\n") for piece in pieces)


def test_the_sample_is_bounded(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(bpe, "_PIECE_BYTES", 50)
    lines = "".join(f"{word}{word}{word}\n" for word in "abcdefghijklmnopqrstuvwxyz" * 8)
    text = np.frombuffer(lines.encode(), dtype=np.uint8)
    assert "zz" in bpe.train_bpe(text, 4096).get_vocab()
    monkeypatch.setattr(bpe, "_SAMPLE_BYTES", 60)
    assert "zz" not in bpe.train_bpe(text, 4096).get_vocab()


def test_a_folder_of_transformers_reads_what_was_saved(tmp_path: Path):
    text = PROSE.encode() + b"\0" + PROSE.encode() + b"\0"
    trained = tokenizer = load("bpe:300")
    for name in ("saved", "twice"):
        tokenizer.save(tmp_path / name)
        tokenizer = load(str(tmp_path / name), None)
        assert isinstance(tokenizer, PretrainedTokenizer)
        assert tokenizer.vocab_size == 300
        assert tokenizer.encode(text).tolist() == trained.encode(text).tolist()
    with pytest.raises(CorpusError, match=r"bpe:4096"):
        load(str(tmp_path / "nowhere"))


FOR_TEXT = ["bpe", "bpe:", "bpe:many", "bpe:256", "bpe:-1", "bpe:²", "ids:300"]
FOR_TOKENS = ["bpe:300", "ids", "ids:0", "ids:", "ids:x"]


@pytest.mark.parametrize(
    ("name", "text"), [*((n, TEXT) for n in FOR_TEXT), *((n, None) for n in FOR_TOKENS)]
)
def test_names_that_make_no_sense(name, text):
    with pytest.raises(ConfigurationError, match=name):
        load(name, text)


@pytest.mark.parametrize(
    ("name", "text", "size"), [("bytes", TEXT, 256), ("bytes", None, 50304), ("ids:65", None, 65)]
)
def test_bytes_and_ids_have_a_vocabulary_and_nothing_to_save(name, text, size, tmp_path: Path):
    tokenizer = load_tokenizer(name, text)
    assert tokenizer.vocab_size == size
    assert tokenizer.encode(bytes(range(256))).tobytes() == bytes(range(256))
    assert tokenizer.encode(b"").size == 0
    tokenizer.save(tmp_path / "nothing")
    assert not list(tmp_path.iterdir())  # also no cache
