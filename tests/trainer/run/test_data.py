"""Text as samples."""

from pathlib import Path

import numpy as np
import pytest
from numpy.typing import NDArray

from dataio import Source
from trainer.errors import ConfigError
from trainer.run.data import text_sources, token_field


def rows(source: Source, length: int) -> NDArray[np.uint8]:
    """Read all samples of a source: uint8[num_samples, length + 1]."""
    fields = {"tokens": token_field(length)}
    read = [part.fixed[0] for part in source.read(np.arange(source.num_samples), fields)]
    return np.concatenate(read).reshape(-1, length + 1)


def test_every_byte_but_the_first_is_a_target_once(tmp_path: Path) -> None:
    text = bytes(range(1, 12))
    (tmp_path / "a.txt").write_bytes(text)
    train, test = text_sources([str(tmp_path / "a.txt")], [], sequence_length=5)
    found = rows(train, 5)
    assert bytes(found[:, 1:].ravel()) == text[1:]
    assert bytes(found[:, :-1].ravel()) == text[:-1]
    assert test is None


def test_no_sample_lies_in_two_files(tmp_path: Path) -> None:
    for name in "ab":
        (tmp_path / name).write_text(7 * name)
    train, _ = text_sources([str(tmp_path / name) for name in "ab"], [], sequence_length=3)
    assert [bytes(row) for row in rows(train, 3)] == [b"aaaa", b"aaaa", b"bbbb", b"bbbb"]


def test_the_last_samples_are_held_out_and_none_is_in_both(tmp_path: Path) -> None:
    path = tmp_path / "a.txt"
    path.write_bytes(bytes(range(101)))
    train, test = text_sources([str(path)], [], sequence_length=10, test_fraction=0.3)
    assert test is not None
    assert (train.num_samples, test.num_samples) == (7, 3)
    whole = rows(text_sources([str(path)], [], sequence_length=10)[0], 10)
    assert np.array_equal(np.concatenate([rows(train, 10), rows(test, 10)]), whole)
    assert train.name != test.name
    assert train.fingerprint != test.fingerprint


def test_changed_text_and_another_length_are_other_datasets(tmp_path: Path) -> None:
    path = tmp_path / "a.txt"
    path.write_text("abcdefghi")
    before, _ = text_sources([str(path)], [], sequence_length=2)
    longer, _ = text_sources([str(path)], [], sequence_length=3)
    assert before.name != longer.name
    told = before.fingerprint
    path.write_text("abcdefghX")
    changed, _ = text_sources([str(path)], [], sequence_length=2)
    assert changed.fingerprint != told


def test_text_that_is_absent_or_too_short_is_named(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"data.train: .*absent cannot be read .*; give the path"):
        text_sources([str(tmp_path / "absent")], [], sequence_length=2)
    (tmp_path / "a").write_text("abc")
    with pytest.raises(ConfigError, match=r"data.train: .*a has 3 bytes, expected more than .* 3;"):
        text_sources([str(tmp_path / "a")], [], sequence_length=3)
