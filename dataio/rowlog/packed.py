"""What an epoch selected of one sampling group, in few bits a row. Pure.

A row's hidden bit, its weight and its count are each a number in a short list of those that occur:
as many bits a row as the list needs, then zlib. A list of more than 256 is kept as it is.
"""

import json
import zlib
from typing import Any

import numpy as np
from numpy.typing import NDArray

from dataio.plan.policies import Selection

MOST_CODES = 256
LEVEL = 1
"""Of zlib: at rows hidden at random, higher ones gain nothing."""


def pack_selection(selection: Selection, num_rows: int) -> bytes:
    """Keep which rows of a sampling group an epoch hides, how often the others come, and weights.

    The order of the hidden rows, and the figures of the policy, are not kept.
    """
    columns: dict[str, NDArray[Any]] = {}
    visible = np.ones(num_rows, np.bool_)
    visible[selection.hidden] = False
    if selection.counts is not None:
        columns["counts"] = selection.counts
    elif len(selection.hidden):
        columns["hidden"] = ~visible
    if selection.weights is not None and visible.any():
        # What a hidden row would weigh is of no use: it takes the first visible row's weight
        weights = selection.weights.astype(np.float32)
        columns["weights"] = np.where(visible, weights, weights[int(np.argmax(visible))])
    packed = {name: _pack(values) for name, values in columns.items()}
    head = {name: [*known, len(data)] for name, (known, data) in packed.items()}
    text = json.dumps({"rows": num_rows, "columns": head}).encode()
    return b"".join([len(text).to_bytes(4, "little"), text, *(data for _, data in packed.values())])


def unpack_selection(data: bytes) -> Selection:
    """Read what `pack_selection` kept; hidden slots are ascending."""
    start = 4 + int.from_bytes(data[:4], "little")
    head = json.loads(data[4:start])
    found: dict[str, NDArray[Any]] = {}
    for name, (kind, codes, num_bytes) in head["columns"].items():
        part = zlib.decompress(data[start : start + num_bytes])
        found[name] = _unpack(part, kind, codes, head["rows"])
        start += num_bytes
    counts = found.get("counts")
    hides = found.get("hidden", np.empty(0, np.bool_)) if counts is None else counts == 0
    return Selection(np.flatnonzero(hides), found.get("weights"), counts=counts)


def _pack(values: NDArray[Any]) -> tuple[list[Any], bytes]:
    """Return the dtype and the list of values that occur, None for a long one; and the rows."""
    codes = np.arange(2).astype(np.bool_) if values.dtype == np.bool_ else np.unique(values)
    kind = values.dtype.str
    if len(codes) > MOST_CODES:
        return [kind, None], zlib.compress(values.tobytes(), LEVEL)
    numbers = values.view(np.uint8) if values.dtype == np.bool_ else _numbers(codes, values)
    width = _width(len(codes))
    # uint8[rows, width]: the bits of each row's number
    bits = (numbers[:, None] >> np.arange(width, dtype=np.uint8)) & 1
    return [kind, codes.tobytes().hex()], zlib.compress(np.packbits(bits).tobytes(), LEVEL)


def _numbers(codes: NDArray[Any], values: NDArray[Any]) -> NDArray[np.uint8]:
    return np.searchsorted(codes, values).astype(np.uint8)


def _unpack(data: bytes, kind: str, codes: str | None, num_rows: int) -> NDArray[Any]:
    if codes is None:
        return np.frombuffer(data, kind)
    known = np.frombuffer(bytes.fromhex(codes), kind)
    width = _width(len(known))
    bits = np.unpackbits(np.frombuffer(data, np.uint8), count=num_rows * width)
    numbers = bits.reshape(num_rows, width) @ (1 << np.arange(width, dtype=np.uint8))
    return np.asarray(known[numbers])


def _width(num_codes: int) -> int:
    return max((num_codes - 1).bit_length(), 1)


def pack_shown(values: NDArray[np.int64]) -> str:
    """Keep a number for each sampling group, as text that is quick to read over."""
    return zlib.compress(np.diff(values, prepend=0).tobytes()).hex()


def unpack_shown(text: str) -> NDArray[np.int64]:
    """Read back what `pack_shown` kept."""
    return np.cumsum(np.frombuffer(zlib.decompress(bytes.fromhex(text)), np.int64))
