"""Corpora: found, split without a leak, and refused in words when they cannot be read."""

import hashlib
import io
import json
from pathlib import Path

import numpy as np
import pytest
import torch

from thinwire.errors import ConfigurationError, CorpusError
from thinwire.train.data import Data, LoadedData
from thinwire.train.data.corpora import (
    Corpus,
    StreamCorpus,
    fingerprint,
    is_validation,
    resolve,
    split_documents,
)

MAGIC = 20240520


def documents(side: list[np.ndarray]) -> list[str]:
    return side[0].tobytes().decode(errors="replace").split("\0")[:-1]


def read(path: Path | str, *, is_text: bool = True) -> Corpus:
    corpus = resolve(str(path))
    assert isinstance(corpus, Corpus)
    assert corpus.is_text == is_text
    return corpus


def whole(corpus: Corpus) -> bytes:
    return corpus.train[0].tobytes() + corpus.validation[0].tobytes()


def shards(side) -> list[list[int]]:
    return [shard.tolist() for shard in side]


def write_jsonl(file: Path, texts: list[str]) -> Path:
    file.write_text("".join(json.dumps({"text": text, "n": 1}) + "\n" for text in texts))
    return file


def rows(count: int, tag: str = "row") -> list[str]:
    return [f"{tag} {i} {'x' * (i % 7)}" for i in range(count)]


def test_golden_split():
    # Another hash would move documents that a checkpoint was trained on into validation.
    assert [i for i in range(100) if is_validation(f"a{i}.py")] == [21, 42, 52, 94]
    numbers = [3, 7, 53, 59, 61, 69, 74, 80, 119, 126, 128, 150, 178, 186]
    assert [i for i in range(200) if is_validation(f"a.jsonl:{i}")] == numbers


@pytest.mark.parametrize("size", [1, 2, 19, 20, 1009])
def test_one_document_is_cut(size):
    text = bytes(97 + i % 26 for i in range(size))
    corpus = split_documents("one", [("key", text)])
    assert whole(corpus) == text + b"\0"
    assert corpus.validation[0].size == max(1, (size + 1) // 20)


def test_the_cut_splits_no_character_and_bytes_where_they_are():
    for length in range(20, 60):
        text = ("a" * (length % 4) + "☕" * length).encode()
        for side in (corpus := split_documents("one", [("key", text)])).train, corpus.validation:
            side[0].tobytes().decode()
    corpus = split_documents("one", [("key", b"\x80" * 1000)])
    assert 45 <= corpus.validation[0].size <= 51


def test_source_files_and_what_is_left_out(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr("sysconfig.get_path", lambda which: str(tmp_path))
    kept = {f"a{i}.py": f"text of {i} é" for i in range(60)} | {"test/deep/t.py": "a test"}
    left = {"data.txt": "no source", "large.py": "#" * 400_001}
    left |= {"encodings/x.py": "table", "pydoc_data/x.py": "table"}
    installed = {"site-packages/x.py": "installed"}
    for name, text in (kept | left | installed).items():
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_bytes(text.encode("latin-1"))  # no UTF-8, and read all the same
    (tmp_path / "dangling.py").symlink_to(tmp_path / "nowhere.py")
    for corpus, files in (("python-stdlib", kept), ("site-packages", kept | installed)):
        found, names = read(corpus), sorted(files)
        sides = [[n for n in names if is_validation(n) == held_out] for held_out in (False, True)]
        for side, its in zip((found.train, found.validation), sides, strict=True):
            assert documents(side) == [files[name].replace("é", "\ufffd") for name in its] != []

    def refuse(path: Path) -> bytes:
        raise PermissionError(13, "Permission denied", str(path))

    monkeypatch.setattr(Path, "read_bytes", refuse)
    with pytest.raises(CorpusError, match=r"a0\.py cannot be read.*Permission denied"):
        resolve("site-packages")


@pytest.mark.parametrize("suffix", [".jsonl", ".parquet"])
def test_rows_are_split_by_file_and_row(tmp_path: Path, suffix):
    texts = rows(2_500)  # more than are read at once
    file = tmp_path / f"a{suffix}"
    if suffix == ".jsonl":
        write_jsonl(file, texts)
    else:
        from pyarrow import parquet, table

        parquet.write_table(table({"text": texts, "n": [0] * 2_500}), file)
    corpus = read(file)
    held_out = [is_validation(f"a{suffix}:{row}") for row in range(2_500)]
    assert documents(corpus.validation) == [t for t, v in zip(texts, held_out, strict=True) if v]
    assert documents(corpus.train) == [t for t, v in zip(texts, held_out, strict=True) if not v]


def test_a_folder_of_everything(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    from pyarrow import parquet, table

    monkeypatch.setattr("datasets.config.HF_DATASETS_CACHE", tmp_path / "cache")
    parquet.write_table(table({"text": ["x"]}).slice(0, 0), tmp_path / "empty.parquet")
    (tmp_path / "sub [x]").mkdir()
    (tmp_path / "sub [x]" / "*.txt").write_text("one document\n\nof three lines é")
    (tmp_path / "empty.txt").write_text("")
    (tmp_path / "empty.jsonl").write_text("")
    (tmp_path / "README.md").write_text("not a corpus")
    write_jsonl(tmp_path / "b.jsonl", ["", *rows(80)])
    corpus = read(tmp_path)
    everything = documents(corpus.train) + documents(corpus.validation)
    assert sorted(everything) == sorted(["one document\n\nof three lines é", *rows(80)])
    assert documents(corpus.validation)
    assert not (tmp_path / "cache").exists()


def header(count: int, magic: int = MAGIC, version: int = 1) -> bytes:
    numbers = np.zeros(256, dtype="<i4")
    numbers[:3] = magic, version, count
    return numbers.tobytes()


def write_shard(file: Path, tokens: range) -> Path:
    file.write_bytes(header(len(tokens)) + np.array(tokens, dtype="<u2").tobytes())
    return file


SHARD = np.arange(100, dtype="<u2").tobytes()
REFUSED = [
    ({}, "it holds no file"),
    ({"a.jsonl": b"", "b.jsonl": b"\n\n", "a.txt": b""}, "because it is empty"),
    ({"gone.txt": None}, r"gone\.txt cannot be read"),  # a link that leads nowhere
    ({"a.csv": b"a,b"}, r"only files ending in \.csv.*\.jsonl"),
    ({"fine.txt": b"text", "latin.txt": b"caf\xe9"}, r"latin\.txt cannot be read: .*utf-8"),
    ({"a.jsonl": b'{"text": "caf\xe9"}\n'}, r"a\.jsonl cannot be read: .*(UTF|utf)"),
    ({"a.jsonl": b'{"body": "x"}\n'}, r"cannot be read: .*no column \"text\", only \['body'\]"),
    ({"a.jsonl": b'{"text": 3}\n'}, "holds 3, which is no string"),
    ({"a.jsonl": b'{"text": null}\n'}, "holds None"),
    ({"a.jsonl": b'{"text": "a"}\n{{\n'}, r"a\.jsonl cannot be read: .*JSON"),
    ({"junk.parquet": b"junk"}, r"junk\.parquet cannot be read: .*Parquet"),
    ({"train.bin": b""}, r"train\.bin.*it has 0 bytes"),
    ({"train.bin": b"odd"}, r"train\.bin.*it has 3 bytes"),
    ({"val.bin": SHARD}, 'every shard is named "val"'),
    ({"train.bin": header(100, magic=20240801) + SHARD}, "begins with 20240801, 1 and not"),
    ({"train.bin": header(100, version=2) + SHARD}, r"train\.bin.*begins with 20240520, 2 and not"),
    ({"train.bin": header(101) + SHARD}, "promises 101 tokens and it has 100"),
]


@pytest.mark.parametrize(("files", "words"), REFUSED, ids=[words for _, words in REFUSED])
def test_folders_that_cannot_be_read_say_why(tmp_path: Path, files: dict, words: str):
    for name, contents in files.items():
        if contents is None:
            (tmp_path / name).symlink_to(tmp_path / "nowhere")
        else:
            (tmp_path / name).write_bytes(contents)
    with pytest.raises(CorpusError, match=f"(?s){words}"):
        resolve(str(tmp_path))


@pytest.mark.parametrize(
    ("name", "words"),
    [
        ("python-stdlb", r"did you mean 'python-stdlib'.*site-packages.*hub name"),
        ("", r"pass one of python-stdlib, site-packages; or a path"),
        ("data/corpus.jsonl", "no file has that name"),
        *((name, "no file has that name") for name in ("/org/name", "./name", "a/b/c", "a/b:")),
    ],
)
def test_unknown_names_say_what_there_is(name: str, words: str):
    with pytest.raises(CorpusError, match=words):
        resolve(name)


def test_shards_as_nanogpt_writes_them(tmp_path: Path):
    np.arange(2_000, dtype="<u2").tofile(tmp_path / "train.bin")
    np.arange(3, dtype="<u2").tofile(tmp_path / "val.bin")  # smaller than a header
    (tmp_path / "input.txt").write_text("what they were made from")
    corpus = read(tmp_path, is_text=False)
    assert shards(corpus.train) == [list(range(2_000))]
    assert shards(corpus.validation) == [[0, 1, 2]]


def test_shards_as_modded_nanogpt_writes_them(tmp_path: Path):
    write_shard(tmp_path / "fineweb_val_000000.bin", range(50))
    write_shard(tmp_path / "fineweb_train_000002.bin", range(200, 307))
    write_shard(tmp_path / "fineweb_train_000001.bin", range(100, 200))
    write_shard(tmp_path / "fineweb_test_000001.bin", range(9))
    corpus = read(tmp_path, is_text=False)
    assert np.concatenate(corpus.train).tolist() == list(range(100, 307))
    assert shards(corpus.validation) == [list(range(50))]


@pytest.mark.parametrize("name", ["data.bin", "train.bin"])
def test_one_shard_is_cut(tmp_path: Path, name):
    corpus = read(write_shard(tmp_path / name, range(1_009)), is_text=False)
    assert shards(corpus.train) == [list(range(959))]
    assert shards(corpus.validation) == [list(range(959, 1_009))]


def test_the_hub_is_asked_for_name_and_configuration(monkeypatch: pytest.MonkeyPatch):
    def answer(*args, **options):
        if args != ("org/name.v1", "10BT") or options != {"streaming": True}:
            raise ConnectionError("no route to host")
        return {"train": "t", "test": "v"}

    monkeypatch.setattr("datasets.load_dataset", answer)
    corpus = resolve("org/name.v1:10BT")
    assert isinstance(corpus, StreamCorpus)
    assert (corpus.train, corpus.validation) == ("t", "v")
    with pytest.raises(CorpusError, match=r"'org/name'; because .*no route to host"):
        resolve("org/name")


@pytest.fixture
def stream(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    """Loads a stream of some files of rows, and other splits."""
    from datasets import load_dataset

    def load(files: int, count: int, length: int = 7, windows: int = 4, **others) -> LoadedData:
        parts = [rows(count, f"f{file}") for file in range(files)]
        texts = {"train": parts, **{name: [its] for name, its in others.items()}}
        splits = {
            split: [str(write_jsonl(tmp_path / f"{split}{n}.jsonl", p)) for n, p in enumerate(its)]
            for split, its in texts.items()
        }
        loaded = load_dataset("json", data_files=splits, streaming=True)
        monkeypatch.setattr("datasets.load_dataset", lambda *args, **options: loaded)
        sizes = {"sequence_length": length, "validation_sequences": windows}
        return Data(corpus="org/stream", **sizes).load()

    return load


def as_text(batches: list[torch.Tensor]) -> str:
    return bytes(torch.cat([batch.flatten() for batch in batches]).tolist()).decode()


def take(batches, steps: int) -> list[torch.Tensor]:
    return [next(batches) for _ in range(steps)]


@pytest.mark.parametrize("files", [1, 2, 3])
def test_a_stream_is_split_without_overlap_or_leak(stream, files):
    loaded = stream(files, 40)
    taken = [take(loaded.training.batches(k, 2, 4, seed=0), 12) for k in range(2)]
    held_out, *read = (
        set(as_text(batches).split("\0")[:-1]) for batches in ([loaded.validation], *taken)
    )
    assert all(batch.shape == (2, 8) and batch.dtype == torch.int64 for batch in taken[0])
    assert held_out
    assert min(len(texts) for texts in read) > 10
    assert not read[0] & read[1]
    assert not (read[0] | read[1]) & held_out


def test_a_stream_starts_over_with_the_same_documents(stream):
    loaded = stream(1, 30, length=2)  # so that a document fills several windows
    texts = as_text(take(loaded.training.batches(0, 1, 4, seed=0), 160)).split("\0")[:-1]
    epoch = texts[: texts.index(texts[0], 1)]
    assert len(epoch) == len(set(epoch)) > 20
    assert texts == (epoch * 10)[: len(texts)]


@pytest.mark.parametrize("stop", [0, 1, 7, 8, 11, 25])
@pytest.mark.parametrize("workers", [1, 2])
@pytest.mark.parametrize(("files", "count"), [(1, 30), (9, 9)])
def test_a_stream_resumes_bit_for_bit(stream, stop, workers, files, count):
    """Also where the place in a file and the file itself both move on, and another reads on."""
    loaded = stream(files, count)
    whole = take(loaded.training.batches(0, workers, 4, seed=0), stop + 40)
    before, other, after = (
        loaded.training.batches(k, workers, 4, seed=0) for k in (0, workers - 1, 0)
    )
    take(before, min(stop, 1))
    take(other, 3)
    take(before, stop - min(stop, 1))
    file = io.BytesIO()
    torch.save(before.state_dict(), file)
    file.seek(0)
    after.load_state_dict(torch.load(file, weights_only=True))
    assert torch.equal(torch.cat(whole[stop:]), torch.cat(take(after, 40)))


@pytest.mark.parametrize("name", ["validation", "test"])
def test_a_held_out_split_validates(stream, name):
    loaded = stream(1, 5, **{name: ["held out"] * 9})
    assert as_text([loaded.validation]).startswith("held out")
    assert as_text(take(loaded.training.batches(0, 1, 1, seed=0), 1)) == "f0 0 \0f0"


@pytest.mark.parametrize(
    ("row", "split", "tokenizer", "words"),
    [
        ("text", "dev", "bytes", r"no split \"train\", only \['dev'\]"),
        ("body", "train", "bytes", r"columns are \['body'\]"),
        ("text", "train", "bpe:300", "piece by piece"),
    ],
)
def test_streams_that_nothing_can_be_trained_on(
    monkeypatch: pytest.MonkeyPatch, row, split, tokenizer, words
):
    from datasets import Dataset

    loaded = {split: Dataset.from_dict({row: ["x"]}).to_iterable_dataset()}
    monkeypatch.setattr("datasets.load_dataset", lambda *args, **options: loaded)
    with pytest.raises((CorpusError, ConfigurationError), match=words):
        Data(corpus="org/stream", tokenizer=tokenizer).load()


def test_a_stream_that_is_all_validation(stream):
    loaded = stream(1, 6, windows=1_000)
    with pytest.raises(CorpusError, match="no document outside of validation"):
        next(loaded.training.batches(0, 1, 1, seed=0))


def write_words(path: Path, count: int = 4_000) -> Path:
    path.write_text(" ".join(hashlib.sha256(bytes([i % 256])).hexdigest() for i in range(count)))
    return path


def test_data_of_a_text_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setenv("THINWIRE_CACHE", str(tmp_path / "cache"))
    file = str(write_words(tmp_path / "a.txt"))
    plain = Data(corpus=file, sequence_length=16, validation_sequences=20).load()
    merged = Data(corpus=file, sequence_length=16, tokenizer="bpe:300").load()
    sizes = [loaded.tokenizer.vocab_size for loaded in (plain, merged)]
    assert sizes == [256, 300]
    assert plain.validation.shape == (20, 17)
    assert next(plain.training.batches(1, 4, 8, seed=0)).shape == (2, 17)
    assert int(next(merged.training.batches(0, 1, 64, seed=0)).max()) > 255
    assert plain.fingerprint != merged.fingerprint
    assert plain.fingerprint == Data(corpus=file, sequence_length=9).load().fingerprint


def test_fingerprints_of_large_arrays_are_sampled(monkeypatch: pytest.MonkeyPatch):
    whole = np.zeros(200_000, dtype=np.uint16)
    monkeypatch.setattr("thinwire.train.data.corpora._WHOLE_BYTES", 100)
    marks = {fingerprint([whole])}
    for place in (0, 199_999):
        changed = whole.copy()
        changed[place] = 1
        marks.add(fingerprint([changed]))
    assert len(marks | {fingerprint([whole[:-1]]), fingerprint([whole[:5], whole[5:]])}) == 5


def test_data_of_token_shards(tmp_path: Path):
    write_shard(tmp_path / "train.bin", range(1_000))
    write_shard(tmp_path / "val.bin", range(100))
    loaded = Data(corpus=str(tmp_path), sequence_length=9).load()
    assert loaded.tokenizer.vocab_size == 50304
    assert loaded.validation.flatten().tolist() == list(range(100))
    small = Data(corpus=str(tmp_path), sequence_length=9, tokenizer="ids:99")
    with pytest.raises(CorpusError, match=r"it holds token 99; do: pass tokenizer 'ids:100'"):
        small.load()


def test_a_corpus_that_is_too_short_says_how_much_is_missing(tmp_path: Path):
    (tmp_path / "a.txt").write_text("x" * 99)
    with pytest.raises(CorpusError, match="it has 95 tokens and needs 516"):
        Data(corpus=str(tmp_path)).load()
    with pytest.raises(CorpusError, match=r"validation side .* it has 5 tokens and needs 8"):
        Data(corpus=str(tmp_path), sequence_length=7).load()
    assert len(Data(corpus=str(tmp_path), sequence_length=4).load().validation) == 1


def test_numbers_below_one():
    for field in ("sequence_length", "validation_sequences"):
        with pytest.raises(ConfigurationError, match=f"{field} to 0"):
            Data(**{field: 0})
