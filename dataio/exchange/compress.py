"""Compress parcels segment by segment, where that takes less time than the link saves."""

import time
from collections.abc import Generator, Sequence
from typing import Literal

import numpy as np
import pyarrow as pa
from numpy.typing import NDArray

from dataio.base.errors import ExchangeError
from dataio.rows.parcel import ParcelBuffers

Compress = Literal["none", "auto", "zstd"]

CODEC, LEVEL = "zstd", 1
RATE_BYTES = 8 << 20
"""Over so many sent bytes a link's rate is found: what buffers hold, passes at once."""
MOST_LEFT = 0.9
"""Of a segment's bytes: one of which more is left goes as it is, as of large JPEG rows."""

Bytes = NDArray[np.uint8]


class Compressor:
    """Packs and unpacks the segments of a rank's parcels.

    Whether a parcel is compressed is said of each segment, by its length in the message ahead: one
    as long as the segment is goes as it is. So the two ranks of a parcel need not agree on it, and
    what a clock decides here changes no row.

    Args:
        how: ``"auto"``: parcels whose middle segment takes less time to compress and to unpack
            than its saved bytes take on the link; ``"zstd"``: all that get smaller.
        buffers: Remember how fast parcels have left.
    """

    def __init__(self, how: Compress, buffers: ParcelBuffers) -> None:
        self._always, self._buffers = how == "zstd", buffers
        self._codec = pa.Codec(CODEC, compression_level=LEVEL)

    def pack(self, segments: Sequence[Bytes]) -> Generator[bool, None, list[Bytes]]:
        """Compress a parcel's segments, if it pays; yields True after each piece of work."""
        if not (self._always or self._buffers.sent_bytes_per_s):
            return [*segments]
        trial = segments[len(segments) // 2]
        began = time.perf_counter()
        packed = self._packed(trial)
        if packed is not trial:
            self.unpack(packed, np.empty_like(trial))
        took_s = time.perf_counter() - began
        yield True
        saved_bytes = len(trial) - len(packed)
        # Of what was sent before, the fastest: a parcel that waited for its receiver took longer.
        link_s = 0.0 if self._always else saved_bytes / max(self._buffers.sent_bytes_per_s)
        if not (saved_bytes and (self._always or took_s < link_s)):
            return [*segments]
        found = []
        for segment in segments:
            found.append(self._packed(segment))
            yield True
        return found

    def _packed(self, segment: Bytes) -> Bytes:
        packed = np.frombuffer(self._codec.compress(segment, asbytes=False), np.uint8)
        return packed if len(packed) <= MOST_LEFT * len(segment) else segment

    def unpack(self, packed: Bytes, into: Bytes) -> None:
        """Restore a segment.

        Raises:
            ExchangeError: If it is none that was packed.
        """
        try:
            found = self._codec.decompress(packed, decompressed_size=len(into), asbytes=False)
            into[:] = np.frombuffer(found, np.uint8)
        except (OSError, ValueError) as error:
            raise ExchangeError(
                f"segment of {len(packed)} compressed bytes: cannot be unpacked ({error}); memory "
                "or network between the two ranks is damaged: restart from the last checkpoint"
            ) from error

    def make_room(self, lengths: NDArray[np.int64], segments: Sequence[Bytes]) -> list[Bytes]:
        """Give memory for what comes of each segment: itself, where it is not compressed.

        Args:
            lengths: int64[len(segments)]: As the sender has said.
            segments: Of the parcel.

        Raises:
            ExchangeError: If no segments are so long.
        """
        room = []
        for length, segment in zip(lengths.tolist(), segments, strict=True):
            if not 0 < length <= len(segment):
                raise ExchangeError(
                    f"length of a segment: found {length}, expected 1 to {len(segment)}; the "
                    "message is damaged: restart from the last checkpoint"
                )
            room.append(segment if length == len(segment) else np.empty(length, np.uint8))
        return room

    def note_sent(self, num_bytes: int, seconds: float) -> None:
        """Take in how long a parcel took to leave."""
        sent_bytes, sending_s = self._buffers.sending
        self._buffers.sending = sent_bytes, sending_s = sent_bytes + num_bytes, sending_s + seconds
        if sent_bytes >= RATE_BYTES and sending_s > 0:
            self._buffers.sent_bytes_per_s.append(sent_bytes / sending_s)
            self._buffers.sending = 0, 0.0


def check_codec(how: str) -> None:
    """Refuse to compress without the codec.

    Raises:
        ValueError: Says what to install.
    """
    if how != "none" and not pa.Codec.is_available(CODEC):
        raise ValueError(
            f'shuffle: compress is "{how}", but pyarrow {pa.__version__} here was built without '
            f"{CODEC}, which all ranks need; install a pyarrow from pip or conda-forge, or leave "
            "compress out"
        )
