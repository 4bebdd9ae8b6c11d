"""Tokenizers: bytes, a trained BPE and its cache, folders of transformers."""

import warnings
from pathlib import Path

import numpy as np
import pytest

from thinwire.errors import ConfigurationError, CorpusError
from thinwire.train.data import tokenization as bpe
from thinwire.train.data.tokenization import (
    ByteTokenizer,
    PretrainedTokenizer,
    Tokenizer,
    load_tokenizer,
)

PROSE = "the quick brown fox jumps over the lazy dog\nnaïve café ☕ 数字\n" * 40
TEXT = np.frombuffer(PROSE.encode() + b"\0", dtype=np.uint8)


@pytest.fixture(autouse=True)
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("THINWIRE_CACHE", str(tmp_path / "cache"))
    return tmp_path / "cache"


def load(name: str, text=TEXT, key: str = "k") -> Tokenizer:
    return load_tokenizer(name, text=text, key=key)


def load_vocabulary(name: str) -> Tokenizer:
    return load_tokenizer(name, text=None)


def reload(tokenizer: Tokenizer, folder: Path) -> Tokenizer:
    tokenizer.save(folder)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        return load(str(folder))


def test_bytes_are_themselves(tmp_path: Path):
    tokenizer = load("bytes")
    everything = bytes(range(256))
    assert (tokenizer.name, tokenizer.vocab_size) == ("bytes", 256)
    assert tokenizer.encode(everything).tobytes() == everything
    assert tokenizer.encode("é").tolist() == [195, 169]
    assert tokenizer.encode(b"").size == 0
    tokenizer.save(tmp_path / "nothing")
    assert not (tmp_path / "nothing").exists()


def test_bpe_gives_the_text_back_in_fewer_tokens():
    tokenizer = load("bpe:300")
    ids = tokenizer.encode(PROSE)
    assert tokenizer.vocab_size == 300
    assert ids.dtype == np.uint16
    assert ids.max() < 300
    assert ids.size < len(PROSE.encode()) * 0.7
    assert bpe.cached_bpe(TEXT, 300, "k").decode(ids.tolist()) == PROSE
    assert tokenizer.encode("").size == 0


def test_bpe_keeps_documents_apart():
    tokenizer = load("bpe:300")
    parts = [tokenizer.encode("the fox"), [0], tokenizer.encode("the dog"), [0]]
    assert tokenizer.encode(b"the fox\0the dog\0").tolist() == np.concatenate(parts).tolist()


def test_bpe_survives_bytes_that_are_not_utf8():
    assert (
        load("bpe:300").encode(b"the \xff fox").tolist()
        == load("bpe:300").encode("the \ufffd fox").tolist()
    )


def test_bpe_is_the_same_every_time():
    assert bpe.train_bpe(TEXT, 320).to_str() == bpe.train_bpe(TEXT.copy(), 320).to_str()


def test_bpe_of_little_text_is_smaller_than_asked():
    assert load("bpe:4096", TEXT[:20]).vocab_size < 300


def test_bpe_is_cached_by_content_and_size(cache: Path):
    load("bpe:300")
    load("bpe:301")
    load("bpe:300", key="other")
    files = sorted(path.name for path in cache.iterdir())
    assert files == ["bpe-300-k.json", "bpe-300-other.json", "bpe-301-k.json"]


def test_a_cached_bpe_is_not_trained_again(monkeypatch: pytest.MonkeyPatch):
    first = load("bpe:300").encode(PROSE)
    monkeypatch.setattr(bpe, "train_bpe", None)
    assert load("bpe:300", TEXT[:0]).encode(PROSE).tolist() == first.tolist()


def test_a_broken_cache_is_named(cache: Path):
    cache.mkdir()
    (cache / "bpe-300-k.json").write_text("{")
    with pytest.raises(CorpusError, match=r"bpe-300-k\.json.*delete the file"):
        load("bpe:300")


def test_a_cache_that_cannot_be_written(cache: Path):
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
    trained = load("bpe:300")
    again = reload(trained, tmp_path / "saved")
    assert isinstance(again, PretrainedTokenizer)
    assert again.vocab_size == 300
    text = PROSE.encode() + b"\0" + PROSE.encode() + b"\0"
    assert again.encode(text).tolist() == trained.encode(text).tolist()
    third = reload(again, tmp_path / "twice")
    assert third.encode(text).tolist() == trained.encode(text).tolist()


def test_an_unknown_tokenizer_says_what_there_is(tmp_path: Path):
    with pytest.raises(CorpusError, match=r"bpe:4096"):
        load(str(tmp_path / "nowhere"))


@pytest.mark.parametrize("name", ["bpe:", "bpe:many", "bpe:256", "bpe:-1", "bpe:²", "ids:300"])
def test_names_that_make_no_sense_for_text(name):
    with pytest.raises(ConfigurationError, match=name):
        load(name)


@pytest.mark.parametrize(("name", "size"), [("bytes", 50304), ("ids:65", 65)])
def test_vocabulary_of_tokens(name, size, tmp_path: Path):
    tokenizer = load_vocabulary(name)
    assert (tokenizer.vocab_size, tokenizer.name) == (size, f"ids:{size}")
    tokenizer.save(tmp_path)
    with pytest.raises(CorpusError, match="without its tokenizer"):
        tokenizer.encode("text")


def test_vocabulary_of_tokens_by_a_folder(tmp_path: Path):
    load("bpe:300").save(tmp_path / "saved")
    assert load_vocabulary(str(tmp_path / "saved")).vocab_size == 300


@pytest.mark.parametrize("name", ["bpe:300", "ids:0", "ids:", "ids:x"])
def test_names_that_make_no_sense_for_tokens(name):
    with pytest.raises(ConfigurationError, match=name):
        load_vocabulary(name)


def test_byte_tokenizer_needs_no_cache(cache: Path):
    ByteTokenizer().encode("text")
    load("bytes")
    assert not cache.exists()
