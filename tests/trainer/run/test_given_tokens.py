"""Tokens that others packed train as they lie: Megatron's files, and MDS shards of sequences."""

import json
import shutil
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from numpy.typing import NDArray

import dataio
from dataio.source.text.dataset import read_info
from tests.dataio.source.formats.record_cases import packed as offsets_first
from tests.tokenizers_made import make_tokenizer
from tests.trainer.packed_text import write_config
from tests.trainer.run.runs import lines, run
from tonari.cli import main
from tonari.trainer.errors import ConfigError

LENGTH = 16
VOCABULARY = "model.vocabulary=256"


def write_mds(directory: Path, tokens: NDArray[Any], *, encoding: str = "") -> str:
    """Write a shard of MDS with a row of tokens in each sample."""
    directory.mkdir()
    encoding = encoding or f"ndarray:{tokens.dtype}:{tokens.shape[1]}"
    columns = {
        "column_names": ["tokens"], "column_encodings": [encoding],
        "column_sizes": [tokens[0].nbytes], "version": 2,
    }  # fmt: skip
    data = offsets_first([row.tobytes() for row in tokens], json.dumps(columns).encode())
    (directory / "shard.00000.mds").write_bytes(data)
    return str(directory)


def write_fixed(root: Path, length: int) -> NDArray[np.uint8]:
    """Pack documents of that many letters each; returns their tokens."""
    rng = np.random.default_rng(1)
    tokens = rng.integers(97, 110, (60, length)).astype(np.uint8)
    texts = [bytes(row).decode() for row in tokens]
    (root / "fixed.jsonl").write_text("".join(json.dumps({"text": t}) + "\n" for t in texts))
    argv = ["pack", str(root / "fixed.jsonl"), str(root / "fixed"), "--tokenizer", "bytes"]
    assert main(argv) == 0
    return tokens


def losses(config: Path, name: str, *given: str) -> list[float]:
    """Train, and list the loss of each step."""
    cache = f"data.cache={config.parent / name}/cache"
    given = ("data.test=", "run.epochs=1", VOCABULARY, cache, *given)
    run(config, name, *given)
    return [line["loss"] for line in lines(config.parent / name) if line["kind"] == "step"]


@pytest.mark.parametrize("packing", ["best_fit", "concatenated"])
def test_megatron_files_train_as_the_same_tokens_that_were_packed(
    tmp_path: Path, packing: str
) -> None:
    config, packing = write_config(tmp_path), f"text.packing={packing}"
    (tmp_path / "megatron").mkdir()
    for name in read_info(tmp_path / "train").shards:
        for end in (".bin", ".idx"):
            shutil.copy((tmp_path / "train" / name).with_suffix(end), tmp_path / "megatron")
    expected = losses(config, "packed", packing)
    assert len(expected) > 5
    assert losses(config, "given", packing, f"data.train={tmp_path}/megatron") == expected
    first = sorted((tmp_path / "megatron").glob("*.bin"))[0]
    one = losses(config, "one", packing, f"data.train={first}", "data.batch_size=4")
    assert one
    assert one != expected


@pytest.mark.parametrize("dtype", ["uint16", "int64", "bytes"])
@pytest.mark.parametrize("length", [LENGTH, LENGTH + 1])
def test_stored_sequences_train_as_documents_of_that_length(
    tmp_path: Path, dtype: str, length: int
) -> None:
    config, tokens = write_config(tmp_path), write_fixed(tmp_path, length)
    encoding = "bytes" if dtype == "bytes" else ""
    stored = tokens.astype("int64" if dtype == "bytes" else dtype)
    mds = write_mds(tmp_path / "mds", stored, encoding=encoding)
    # All in one step, as an order that is balanced by documents' lengths is another
    whole = ("data.batch_size=60", "run.epochs=3")
    expected = losses(config, "packed", f"data.train={tmp_path}/fixed", *whole)
    assert len(expected) == 3
    found = losses(config, "given", f"data.train={mds}", "text.packing=stored", *whole)
    assert found == pytest.approx(expected, rel=1e-13)


def test_a_token_ends_documents_within_a_stored_sequence(tmp_path: Path) -> None:
    tokens = np.array([[5, 0, 7, 7, 0, 3], [1, 2, 3, 4, 5, 6]], np.int32)
    mds = write_mds(tmp_path / "mds", tokens)
    for end, expected in {0: [1, 1, 2, 2, 2, 3, 0], None: [1, 1, 1, 1, 1, 1, 0]}.items():
        sequences = dataio.Sequences(6, packing="stored", end=end)
        source = dataio.open_source(mds, sequences=sequences)
        (rows,) = source.read(np.arange(2), sequences.fields("int32"))
        assert rows.fixed[0].view("<i4")[0].tolist() == [*tokens[0].tolist(), 0]
        assert rows.fixed[1].view("<u2")[0].tolist() == expected
        assert rows.fixed[1].view("<u2")[1].tolist() == [1] * 6 + [0]
    with pytest.raises(ValueError, match=r'end is 3, but packing is "best_fit"'):
        dataio.Sequences(6, end=3)
    with pytest.raises(dataio.SourceError, match=r"\.mds, expected .bin and .idx.*packing=.stored"):
        dataio.open_source(mds, sequences=dataio.Sequences(6))


@pytest.mark.usefixtures("unstaged")
@pytest.mark.parametrize(
    ("given", "message"),
    [
        ("data.train={mds} text.packing=stored data.sequence_length=9",
         r"length is 9, but .*mds has no whole numbers as tokens, 9 or 10 .*found int32\[16\]"),
        ("data.train={floats} text.packing=stored", r"no whole numbers .*found float32\[16\]"),
        ("data.train={mds} text.packing=stored model.vocabulary=100",
         r"mds holds the token 109, expected tokens in \[0, 100\); give the tokenizer that"),
        ("data.train={mds} text.packing=stored text.end=3",
         r"text.end is 3, the token 3, which ends none of the first documents of .*mds"),
        ("data.train={mds}", r"mds holds .mds shards, expected .bin and .idx, .*packing=stored"),
        ("data.train={bin} text.end=3", r"the token 3, which ends none of the first documents of"),
        ("data.train={bin} text.end=foo", r"text.end is 'foo', the name of a token, but there is"),
        ("data.train={bin} text.end=foo text.tokenizer={tokenizer}", r"has no token 'foo'"),
        ("text.end=3", r"text.end is 3, but .*train was packed with the token None behind each"),
    ],
)  # fmt: skip
def test_tokens_that_do_not_fit_are_refused_before_staging(
    tmp_path: Path, given: str, message: str
) -> None:
    config, tokens = write_config(tmp_path), write_fixed(tmp_path, LENGTH)
    places = {
        "mds": write_mds(tmp_path / "mds", tokens.astype(np.int32)),
        "floats": write_mds(tmp_path / "floats", tokens.astype(np.float32)),
        "bin": str(sorted(tmp_path.glob("fixed/*.bin"))[0]),
        "tokenizer": str(make_tokenizer(tmp_path / "tokenizer.json")),
    }
    overrides = [VOCABULARY, "data.test=", *given.format(**places).split(" ")]
    with pytest.raises((ConfigError, dataio.SourceError), match=message):
        run(config, "run", *overrides)
    assert not (tmp_path / "run").exists()


def test_without_a_vocabulary_the_tokenizer_is_asked_for(tmp_path: Path) -> None:
    config = write_config(tmp_path)
    write_fixed(tmp_path, LENGTH)
    (tmp_path / "fixed/text.json").unlink()
    with pytest.raises(ConfigError, match=r"text.tokenizer is missing: .*fixed does not say how"):
        run(config, "run", "data.test=", f"data.train={tmp_path}/fixed")
    given = ("data.test=", f"data.train={tmp_path}/fixed", "text.tokenizer=bytes", "run.epochs=1")
    assert run(config, "run", *given, f"data.cache={tmp_path}/cache").finished
