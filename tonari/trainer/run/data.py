"""Text as a dataset: the bytes of files, in windows of one length."""

import json
from collections.abc import Sequence
from pathlib import Path

import numpy as np
import xxhash
from numpy.typing import NDArray

import dataio
from tonari.trainer.errors import ConfigError

VOCABULARY = 256
"""A token is a byte."""

KEY = "tokens"

LOOKED_AT_BYTES = 1 << 16
"""At a file's beginning, middle and end, to see whether it is text."""

MOST_CONTROL = 0.001
"""Of the bytes looked at that may be control characters: compressed data has a tenth, numbers more,
text hardly any."""

# Tab, the ends of lines and pages, and escape sequences of terminals are part of texts.
CONTROL = np.isin(np.arange(256), [*range(9), *range(14, 27), *range(28, 32), 127])

JSON_LINES = (".jsonl", ".ndjson", ".jsonlines")
MOST_LINES = 8
"""That are looked at of a file of another name: all of them are objects in JSON lines."""

BEGINNINGS = {
    b"\x1f\x8b": "gzip",
    b"\x28\xb5\x2f\xfd": "Zstandard",
    b"BZh": "bzip2",
    b"\xfd7zXZ": "xz",
    b"PK\x03\x04": "zip",
    b"PAR1": "Parquet",
    b"ARROW1": "Arrow",
    b"\xff\xfe": "UTF-16",
    b"\xfe\xff": "UTF-16",
    b"%PDF-": "PDF",
}
OF_NO_TEXT = tuple(begin for begin in BEGINNINGS if not begin.isalnum())
"""Those that no text begins with, however much of the file behind them is text."""
BEGIN_BYTES = 8
"""Of these not even one is a control character in a text; archives and pictures begin so."""


def token_field(sequence_length: int) -> dataio.Array:
    """Describe a sample: a sequence, and the byte after its last."""
    return dataio.Array(KEY, (sequence_length + 1,), "uint8")


def text_sources(
    train: Sequence[str], test: Sequence[str], *, sequence_length: int, test_fraction: float = 0.0
) -> tuple[dataio.Source, dataio.Source | None]:
    """Open text to train on, and to evaluate on, if there is any.

    Args:
        train: Files.
        test: Files; none where ``test_fraction`` gives the samples.
        sequence_length: Bytes that a model reads of a sample; the next sample begins after them.
        test_fraction: Of the samples of ``train``, its last ones.

    Raises:
        ConfigError: If a file cannot be read, or is shorter than a sample.
    """
    windows = _windows(train, sequence_length, "data.train")
    if test:
        held_out = _windows(test, sequence_length, "data.test")
    else:
        num_train = len(windows) - round(test_fraction * len(windows))
        windows, held_out = windows[:num_train], windows[num_train:]
        if not num_train:
            raise ConfigError(
                f"data.test_fraction is {test_fraction}, which leaves no sample of "
                f"{len(held_out)} to train on; choose a smaller one"
            )
    return _source(train, windows), _source(test or train, held_out) if len(held_out) else None


def _windows(paths: Sequence[str], sequence_length: int, key: str) -> NDArray[np.uint8]:
    """See uint8[num_samples, sequence_length + 1] in files; no sample lies in two of them."""
    each = [byte_windows(Path(path), sequence_length, key=key) for path in paths]
    # One file is mapped, and read where a sample is asked for.
    return each[0] if len(each) == 1 else np.concatenate(each)


def byte_windows(path: Path, sequence_length: int, *, key: str) -> NDArray[np.uint8]:
    """See a file as uint8[num_samples, sequence_length + 1]; a window's last byte begins the next.

    Args:
        path: The file.
        sequence_length: Bytes that a model reads of a sample.
        key: What names the file in a config, for messages.

    Raises:
        ConfigError: If it cannot be read, is shorter than a sample, or is no text.
    """
    try:
        num_bytes = path.stat().st_size
        if num_bytes <= sequence_length:
            raise ConfigError(
                f"{key}: {path} has {num_bytes} bytes, expected more than data.sequence_length = "
                f"{sequence_length}; give a longer text, or a shorter sequence"
            )
        text = np.memmap(path, np.uint8, mode="r")
    except OSError as error:
        raise ConfigError(
            f"{key}: {path} cannot be read ({error}); give the path of a text file, or "
            'data.kind="images" for shards'
        ) from error
    _check_is_text(text, path, key)
    # uint8[num_bytes - sequence_length, sequence_length + 1], then every sequence_length-th
    sliding = np.lib.stride_tricks.sliding_window_view(text, sequence_length + 1)
    return sliding[::sequence_length]


def _check_is_text(text: NDArray[np.uint8], path: Path, key: str) -> None:
    """Refuse bytes that are no text, such as compressed text or numbers of tokens.

    Raises:
        ConfigError: Names the table that such a file needs.
    """
    begins = text[:BEGIN_BYTES].tobytes()
    last = max(len(text) - LOOKED_AT_BYTES, 0)
    for start in (0, last // 2, last):
        is_control = CONTROL[text[start : start + LOOKED_AT_BYTES]]
        if is_control.mean() > MOST_CONTROL:
            at = start + int(is_control.argmax())
            found = f"holds bytes that no text has, such as 0x{text[at]:02x} at {at}"
            break
    else:
        # Its own bytes are mostly those of the texts that it holds.
        if path.suffix == ".mds" or (path.suffix == ".bin" and path.with_suffix(".idx").exists()):
            found = "is a shard of records"
        elif CONTROL[text[:BEGIN_BYTES]].any() or begins.startswith(OF_NO_TEXT):
            found = f"begins as no text does, with {begins!r}"
        elif _holds_records(text[:LOOKED_AT_BYTES].tobytes(), path):
            found = "holds records in JSON (named .txt, their braces and names are trained too)"
        else:
            return
    kind = next(
        (f" ({name})" for magic, name in BEGINNINGS.items() if begins.startswith(magic)), ""
    )
    raise ConfigError(
        f"{key}: {path}{kind} {found}, expected text in UTF-8, of which each byte is a token; "
        "decompress or convert it; or, for documents in JSON lines, Parquet, or compressed: run "
        "`tonari pack SRC DST --tokenizer ...` and give data.train=DST and the table [text] with "
        'packing = "best_fit", which takes Megatron\'s .bin and .idx too; for MDS shards of tokens '
        'packing = "stored"'
    )


def _holds_records(beginning: bytes, path: Path) -> bool:
    """Say whether a file holds JSON, by its name, or by its first lines unless it is a ``.txt``."""
    suffix = path.suffix.lower()
    if suffix == ".txt":
        return False
    if suffix in JSON_LINES:
        return True
    if suffix == ".json":
        return beginning.lstrip()[:1] in (b"{", b"[")
    *lines, rest = [line for line in beginning.split(b"\n") if line.strip()] or [b""]
    # The last of them may be cut.
    whole = lines or [rest]
    return all(map(_is_record, whole[:MOST_LINES]))


def _is_record(line: bytes) -> bool:
    try:
        return isinstance(json.loads(line), dict)
    except ValueError:
        return False


def _source(paths: Sequence[str], windows: NDArray[np.uint8]) -> dataio.Source:
    # The shape is part of the name: each length of sequence has a cache of its own.
    shown = " ".join(str(Path(path).resolve()) for path in paths)
    digest = xxhash.xxh3_64_hexdigest(shown.encode())
    name = f"text://{Path(paths[0]).name}/{digest}/{len(windows)}x{windows.shape[1]}"
    return dataio.NumpySource({KEY: windows}, name=name)
