"""Tokens that others have packed, trained as they lie: Megatron's files, and MDS shards."""

from collections.abc import Sequence
from functools import cache
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

import dataio
from dataio.source.base import ShardedSource
from dataio.source.formats.megatron import MegatronFormat, open_index, read_head, read_part
from dataio.source.storage.files import Storage
from dataio.source.text.dataset import INFO, TextInfo
from dataio.source.text.tokenizer import open_tokenizer
from tonari.trainer.config.config import Config
from tonari.trainer.errors import ConfigError

LOOKED_AT = 64
"""Sequences, or documents, at the beginning, whose tokens are looked at before staging."""

SHARDS = (".bin", ".mds")
"""What tokens are in that need no ``text.json``."""

DTYPES = ("uint8", "uint16", "int32", "int64")
"""The first that holds a file's own is taken."""


def are_packed(config: Config, names: Sequence[str]) -> bool:
    """Say whether `tonari pack` wrote what is named, or is said to have."""
    if config.text.packing == "stored":
        return False
    lies = [Path(name) for name in names if not (Path(name) / INFO).is_file()]
    inside = [each for path in lies if path.is_dir() for each in path.iterdir()]
    return not any(path.suffix in SHARDS for path in [*lies, *inside])


def read_given(config: Config, names: Sequence[str]) -> TextInfo:
    """Say what tokens are that nobody wrote a ``text.json`` for.

    Raises:
        ConfigError: If they are not of the settings' length, dtype, vocabulary or end token.
    """
    text, given = config.text, config.model.settings.get("vocabulary")
    tokenizer = open_tokenizer(text.tokenizer) if text.tokenizer else None
    vocabulary = given if tokenizer is None else tokenizer.vocabulary
    if not isinstance(vocabulary, int):
        raise ConfigError(
            f"text.tokenizer is missing: {names[0]} does not say how many tokens there are; give "
            "the tokenizer that made them, or model.vocabulary"
        )
    parts = _look(tuple(names), config.data.sequence_length, is_stored=text.packing == "stored")
    end = end_of(config)
    for name, part in zip(names, parts, strict=True):
        most, least = max(map(np.max, part)), min(map(np.min, part))
        if most >= vocabulary or least < 0:
            raise ConfigError(
                f"text.tokenizer: {name} holds the token {most if most >= vocabulary else least}, "
                f"expected tokens in [0, {vocabulary}); give the tokenizer that made them"
            )
        # Of documents each ends with it, of stored sequences they end somewhere within
        at = slice(None) if text.packing == "stored" else slice(-1, None)
        if end is not None and not any(end in tokens[at] for tokens in part):
            raise ConfigError(
                f"text.end is {text.end!r}, the token {end}, which ends none of the first "
                f"documents of {name}, expected it behind each; give the token that does, or leave "
                "text.end out"
            )
    return TextInfo(
        tokenizer=text.tokenizer, digest="" if tokenizer is None else tokenizer.digest,
        vocabulary=vocabulary, end=end, dtype=np.result_type(*(part[0] for part in parts)).name,
        documents=0, tokens=0, shards=tuple(names),
    )  # fmt: skip


def end_of(config: Config) -> int | None:
    """Find the number of ``text.end``: of a token of the tokenizer, or the number itself."""
    end = config.text.end
    if isinstance(end, int) or end == "":
        return None if end == "" else int(end)
    return open_tokenizer(config.text.tokenizer).token(end)


@cache
def _look(
    names: tuple[str, ...], length: int, *, is_stored: bool
) -> tuple[list[NDArray[np.integer]], ...]:
    return tuple(_stored(name, length) if is_stored else _documents(name) for name in names)


def _documents(name: str) -> list[NDArray[np.integer]]:
    """Read the first documents of Megatron's files."""
    source = dataio.open_source(name)
    assert isinstance(source, ShardedSource), "nothing else is named so"
    path = source.shards[0].path
    if not path.endswith(".bin"):
        raise ConfigError(
            f"text.packing: {name} holds {Path(path).suffix} shards, expected .bin and .idx, of "
            "whose documents sequences are made; give text.packing=stored, which takes the tokens "
            "of each sample as a sequence"
        )
    with open_index(Storage(), path, MegatronFormat().index_of(path)) as file:
        index = read_head(file)
        lengths = read_part(file, 34, "<i4", 0, min(LOOKED_AT, index.num_sequences))
    if index.dtype.kind not in "iu":
        raise ConfigError(f"{path}: its tokens are {index.dtype}, expected whole numbers")
    if index.num_documents != index.num_sequences + 1:
        raise ConfigError(
            f"{path}: has {index.num_sequences} sequences in {index.num_documents - 1} documents, "
            "expected one each; write it without --split-sentences"
        )
    tokens = np.memmap(path, index.dtype, mode="r")[: lengths.sum()]
    return np.split(tokens, np.cumsum(lengths)[:-1])


def _stored(name: str, length: int) -> list[NDArray[np.integer]]:
    """Read the first stored sequences."""
    source = dataio.open_source(name)
    ids, why = np.arange(min(LOOKED_AT, source.num_samples)), ""
    for dtype in DTYPES:
        for width in (length, length + 1):
            field = dataio.Array("tokens", (width,), dtype)
            try:
                parts = [rows.fixed[0] for rows in source.read(ids, {"tokens": field})]
            except dataio.FieldError as error:
                why = str(error)
                continue
            return list(np.concatenate(parts).view(dtype).reshape(-1, width))
    raise ConfigError(
        f"data.sequence_length is {length}, but {name} has no whole numbers as tokens, {length} or "
        f"{length + 1} in each sample ({why}); give the length that they have"
    )
