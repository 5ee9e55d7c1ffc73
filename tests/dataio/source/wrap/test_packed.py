"""Samples are the sequences that the documents make, however they are read."""

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from numpy.typing import NDArray

import dataio
from dataio.base.errors import SourceError
from dataio.source.base import costs_of
from dataio.source.text.dataset import read_info
from dataio.source.text.tokenizer import ByteTokenizer
from dataio.source.wrap.packing import Packing, pack
from tonari.pack.documents import Documents
from tonari.pack.text import pack_text

LENGTH = 9
SEED = 5
WAYS: tuple[Packing, ...] = ("concatenated", "best_fit")


def write_text(directory: Path, texts: Sequence[str], **options: Any) -> Path:
    """Pack texts of bytes."""
    path = directory.with_suffix(".jsonl")
    path.write_text("".join(f'{{"text": "{text}"}}\n' for text in texts))
    pack_text(Documents((path,), "text", "file"), directory, ByteTokenizer(), **options)
    return directory


def some_texts(count: int = 60) -> list[str]:
    rng = np.random.default_rng(SEED)
    letters = "abcdefghijklmnopqrstuvwxyz"
    sizes = rng.integers(1, 25, count).tolist()
    return ["".join(rng.choice(list(letters), size)) for size in sizes]


def open_sequences(directory: Path, packing: Packing, length: int = LENGTH) -> dataio.Source:
    paths = [str(directory / name) for name in read_info(directory).shards]
    return dataio.open_source(paths, sequences=dataio.Sequences(length, packing=packing))


def read(source: dataio.Source, ids: Any = None) -> tuple[NDArray[Any], NDArray[Any]]:
    """Read tokens and document numbers: integer[n, length + 1] each."""
    fields = dataio.Sequences(LENGTH).fields("uint8")
    ids = np.arange(source.num_samples) if ids is None else np.array(ids)
    blocks = list(source.read(ids, fields))
    tokens = np.concatenate([rows.fixed[0] for rows in blocks])
    document = np.concatenate([rows.fixed[1] for rows in blocks]).view("<u2")
    return tokens, document


@pytest.mark.parametrize("packing", WAYS)
def test_each_sequence_holds_the_pieces_of_its_documents(tmp_path: Path, packing: Packing) -> None:
    texts = some_texts()
    source = open_sequences(write_text(tmp_path / "a", texts), packing)
    tokens, document = read(source)
    packed = pack(np.array(list(map(len, texts))), length=LENGTH, packing=packing)
    assert source.num_samples == packed.num_sequences == len(tokens)
    for row in range(len(tokens)):
        expected, numbers = b"", []
        mine = slice(*packed.starts[row : row + 2])
        each = zip(*(column[mine].tolist() for column in packed[1:]), strict=True)
        for number, (doc, first, count) in enumerate(each, 1):
            expected += texts[doc][first : first + count].encode()
            numbers += [number] * count
        assert bytes(tokens[row]).rstrip(b"\0") == expected
        assert document[row].tolist() == numbers + [0] * (LENGTH + 1 - len(numbers))


@pytest.mark.parametrize("packing", WAYS)
def test_a_part_is_what_the_whole_has(
    tmp_path: Path, packing: Packing, monkeypatch: pytest.MonkeyPatch
) -> None:
    directory = write_text(tmp_path / "a", some_texts(), shard_bytes=200)
    assert len(read_info(directory).shards) > 2
    source = open_sequences(directory, packing)
    tokens, document = read(source)
    monkeypatch.setattr("dataio.source.wrap.packed.GROUP_BYTES", 30)
    monkeypatch.setattr("dataio.source.storage.window.GAP_BYTES", 4)
    ids = list(range(1, source.num_samples, 3))
    part = read(open_sequences(directory, packing), ids)
    assert np.array_equal(part[0], tokens[ids])
    assert np.array_equal(part[1], document[ids])


def test_each_length_and_way_is_a_dataset_of_its_own(tmp_path: Path) -> None:
    directory = write_text(tmp_path / "a", some_texts())
    found = [open_sequences(directory, way, length) for way in WAYS for length in (9, 10)]
    assert len({source.name for source in found}) == len({s.fingerprint for s in found}) == 4


def test_counts_that_are_kept_are_those_of_the_same_sequences(tmp_path: Path) -> None:
    directory = write_text(tmp_path / "a", some_texts())
    (tmp_path / "kept").mkdir()
    for _ in range(2):
        for length in (9, 4):
            source = dataio.open_source(
                str(directory), sequences=dataio.Sequences(length), index_cache=tmp_path / "kept"
            )
            anew = open_sequences(directory, "best_fit", length)
            assert source.num_samples == anew.num_samples
            kept, found = costs_of(source), costs_of(anew)
            assert kept is not None
            assert found is not None
            assert kept.tolist() == found.tolist()


@pytest.mark.parametrize("packing", WAYS)
def test_a_sequence_costs_what_its_documents_attend_to(tmp_path: Path, packing: Packing) -> None:
    directory = write_text(tmp_path / "a", some_texts(), shard_bytes=200)
    source = open_sequences(directory, packing)
    costs = costs_of(source)
    assert costs is not None
    assert costs.dtype == np.uint8
    _, document = read(source)
    # float64[num_sequences]: places of the same document, over all that one document would see.
    seen = (document[:, :, None] == document[:, None, :]) & (document > 0)[:, None]
    expected = seen.sum(axis=(1, 2)) / (LENGTH + 1) ** 2 * 255
    assert np.abs(costs - expected).max() <= 0.5
    assert len(set(costs.tolist())) > 5


def test_what_holds_no_documents_is_refused(tmp_path: Path) -> None:
    (tmp_path / "a.jsonl").write_text('{"text": "a"}\n')
    with pytest.raises(SourceError, match=r"end in .jsonl, expected .bin and .idx, .*tonari pack"):
        dataio.open_source(str(tmp_path / "a.jsonl"), sequences=dataio.Sequences(4))
    with pytest.raises(ValueError, match=r"length is 0, expected a whole number in"):
        dataio.Sequences(0)
    write_text(tmp_path / "short", ["a", "b"])
    with pytest.raises(SourceError, match="holds no samples"):
        dataio.open_source(str(tmp_path / "short"), sequences=dataio.Sequences(4))


def test_an_index_that_changed_and_a_truncated_file_are_noticed(tmp_path: Path) -> None:
    directory = write_text(tmp_path / "a", some_texts())
    source = open_sequences(directory, "best_fit")
    path = next(directory.glob("*.bin"))
    path.write_bytes(path.read_bytes()[:-5])
    with pytest.raises(SourceError):
        read(source)
    with pytest.raises(
        SourceError, match=r"\.idx: sequence \d+ of 60: .* of \d+ bytes; one of the"
    ):
        read(open_sequences(directory, "best_fit"))
