"""Tokenizers are opened from files alone, and known by what they do."""

import json
from pathlib import Path

import numpy as np
import pytest

from dataio.base.errors import SourceError
from dataio.source.text.tokenizer import open_tokenizer
from tests.tokenizers_made import make_tokenizer

TEXT = "to be, or nöt to be"


def test_bytes_are_the_text_in_utf_8() -> None:
    tokenizer = open_tokenizer("bytes")
    (tokens,) = tokenizer.encode([TEXT])
    assert bytes(tokens.astype(np.uint8)).decode() == TEXT
    assert (tokenizer.vocabulary, tokenizer.digest) == (256, "bytes")


def test_a_file_and_its_directory_are_one_tokenizer(tmp_path: Path) -> None:
    path = make_tokenizer(tmp_path / "tokenizer.json")
    by_file, by_directory = open_tokenizer(str(path)), open_tokenizer(str(tmp_path))
    assert by_file.digest == by_directory.digest
    tokens = by_file.encode([TEXT, ""])
    assert [each.tolist() for each in by_directory.encode([TEXT, ""])] == [
        each.tolist() for each in tokens
    ]
    assert max(tokens[0]) < by_file.vocabulary
    assert by_file.token("<|endoftext|>") == 0


def test_what_cuts_and_pads_is_ignored_and_does_not_make_another_tokenizer(tmp_path: Path) -> None:
    path = make_tokenizer(tmp_path / "tokenizer.json")
    before = open_tokenizer(str(path))
    settings = json.loads(path.read_text())
    settings["truncation"] = {
        "max_length": 2, "stride": 0, "strategy": "LongestFirst", "direction": "Right",
    }  # fmt: skip
    path.write_text(json.dumps(settings, indent=3))
    after = open_tokenizer(str(path))
    assert after.digest == before.digest
    assert after.encode([TEXT])[0].tolist() == before.encode([TEXT])[0].tolist()


def test_another_vocabulary_is_another_tokenizer(tmp_path: Path) -> None:
    one = make_tokenizer(tmp_path / "one.json")
    other = make_tokenizer(tmp_path / "other.json", words="quite other words")
    assert open_tokenizer(str(one)).digest != open_tokenizer(str(other)).digest


def test_a_name_of_the_hub_is_refused_with_the_command_that_gets_it() -> None:
    with pytest.raises(SourceError, match=r"no tokenizer here, expected .*save_pretrained"):
        open_tokenizer("gpt2")


def test_a_file_that_is_no_tokenizer_is_named(tmp_path: Path) -> None:
    (tmp_path / "tokenizer.json").write_text('{"model": 3}')
    with pytest.raises(
        SourceError, match=r"tokenizer.json: cannot be read as a tokenizer .* write"
    ):
        open_tokenizer(str(tmp_path))


def test_a_special_token_that_is_not_there_is_refused(tmp_path: Path) -> None:
    path = make_tokenizer(tmp_path / "tokenizer.json")
    with pytest.raises(SourceError, match=r"no token '</s>', expected .*'<\|endoftext\|>'; name"):
        open_tokenizer(str(path)).token("</s>")
    with pytest.raises(SourceError, match="'bytes' has no token"):
        open_tokenizer("bytes").token("</s>")
