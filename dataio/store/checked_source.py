"""A source as staging reads it: pictures whose end is missing are found now, not epochs later."""

import logging
from collections.abc import Callable, Iterator, Mapping

import numpy as np
from numpy.typing import NDArray

from dataio.base.errors import FieldError, SourceError
from dataio.rows.fields import Field, Text, row_schema
from dataio.rows.image import Image, Mask
from dataio.rows.refused import Lenient, is_replaced, with_refused
from dataio.rows.rows import Rows, lost_rows, row_offsets
from dataio.rows.whole import Check, find_suspects
from dataio.source.base import Source, place_of
from dataio.source.wrap.transformed import TransformedSource

MOST_NAMED = 20
"""Pictures that a message or the log names of those that are refused."""
MOST_NOTED = 100_000
"""Pictures that are remembered; the others are refused where they are delivered."""

log = logging.getLogger(__name__)

AreExcluded = Callable[[NDArray[np.int64]], NDArray[np.bool_]]
"""int64[n] samples -> bool[n]: whether no epoch shows them."""


def no_rows(sample_id: NDArray[np.int64]) -> NDArray[np.bool_]:
    """Exclude nothing: bool[n]."""
    return np.zeros(len(sample_id), np.bool_)


class CheckedSource:
    """A `Source` that marks the pictures of which a part is missing, see `with_refused`.

    Excluded samples that the source does not give are lost, see `lost_rows`, and no error. Reader
    threads note what they find; whoever delivers rows raises it.

    Args:
        source: What is read.
        check: See `Staging`.
        skips: Whether a sample that fails is no error, but keeps a row that is padding.
        are_excluded: Says which samples no epoch shows.

    Attributes:
        refused: Samples whose pictures failed, and what is wrong with each.
    """

    def __init__(
        self, source: Source, *, check: Check, skips: bool, are_excluded: AreExcluded
    ) -> None:
        self._source, self._check, self._skips = source, check, skips
        self._are_excluded = are_excluded
        self.refused: list[tuple[int, str]] = []
        self.name, self.made_as = source.name, source.made_as
        self.num_samples, self.total_bytes = source.num_samples, source.total_bytes
        self.fingerprint, self.shard_starts = source.fingerprint, source.shard_starts

    @property
    def bytes_read(self) -> int:
        return self._source.bytes_read

    def read(self, sample_ids: NDArray[np.int64], fields: Mapping[str, Field]) -> Iterator[Rows]:
        """Read samples; see `Source.read`."""
        asked = dict(fields)
        if self._skips:
            asked |= {n: Lenient(field) for n, field in fields.items() if is_replaced(field)}
        if self._skips and isinstance(self._source, TransformedSource):
            blocks = self._source.read(sample_ids, asked, skips=True)
        else:
            blocks = self._source.read(sample_ids, asked)
        pictures = {name: kind for name, kind in fields.items() if isinstance(kind, Image | Mask)}
        done = 0
        try:
            for rows in blocks:
                yield self._checked(rows, pictures)
                done += len(rows)
            return
        except (FieldError, SourceError) as error:
            left = sample_ids[done:]
            lost = self._are_excluded(left)
            if not lost.any():
                raise
            log.warning("%s; %d excluded samples are passed over", error, lost.sum())
        for part in np.split(left, np.flatnonzero(np.diff(lost)) + 1):
            if self._are_excluded(part[:1])[0]:
                yield lost_rows(row_schema(fields), part)
            else:
                yield from self.read(part, fields)

    def _checked(self, rows: Rows, pictures: Mapping[str, Image | Mask]) -> Rows:
        refused: dict[int, set[int]] = {}
        for number, name in enumerate(rows.schema.variable):
            if name not in pictures or self._check == "none":
                continue
            data, lengths = rows.variable[number], rows.lengths[:, number]
            every = self._check == "decode"
            suspects = range(len(rows)) if every else find_suspects(data, lengths)
            bounds = row_offsets(lengths).tolist() if suspects else []
            for row in suspects:
                try:
                    self._decode(data[bounds[row] : bounds[row + 1]], pictures[name])
                except FieldError as error:
                    self._note(int(rows.sample_id[row]), name, error)
                    refused.setdefault(number, set()).add(row)
        return with_refused(rows, refused) if refused else rows

    def _decode(self, data: NDArray[np.uint8], kind: Image | Mask) -> None:
        # Its libraries are not needed where all pictures are whole.
        from dataio.rows.decode import check_decodes

        check_decodes(data, kind, where="")

    def _note(self, sample_id: int, name: str, error: FieldError) -> None:
        number = len(self.refused)
        if number < MOST_NOTED:
            self.refused.append((sample_id, f"sample {sample_id}, field {name!r}{error}"))
        if self._skips and number < MOST_NAMED:
            log.warning("%s; its row becomes padding", self._named(number))

    def _named(self, number: int) -> str:
        sample_id, text = self.refused[number]
        return f"{place_of(self._source, sample_id)}{self._key_of(sample_id)}: {text}"

    def raise_refused(self) -> None:
        """Raise what was found, if that is an error.

        Raises:
            FieldError: It names the first samples, and says how many there are.
        """
        if self._skips or not self.refused:
            return
        ids = np.array([sample_id for sample_id, _ in self.refused])
        shown = np.flatnonzero(~self._are_excluded(ids)).tolist()
        if not shown:
            return
        first, *others = map(self._named, shown[:MOST_NAMED])
        more = f", among them\n{chr(10).join(others)}" if others else ""
        raise FieldError(
            f'{first}, or go on without such samples with on_error="skip", or as if they were '
            f'whole with Staging(check="none"); {len(shown)} such pictures were staged{more}'
        )

    def _key_of(self, sample_id: int) -> str:
        """Read the key of one sample, where the source has keys."""
        try:
            ids = np.array([sample_id])
            rows = next(iter(self._source.read(ids, {"key": Text("__key__")})))
        except Exception:  # a source of somebody else's that has none raises what it likes
            return ""
        return f", key {rows.variable[0].tobytes().decode(errors='replace')!r}"
