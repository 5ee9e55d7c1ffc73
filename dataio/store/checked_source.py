"""A source as staging reads it: pictures whose end is missing are found now, not epochs later."""

import logging
from collections.abc import Callable, Iterator, Mapping
from dataclasses import replace
from functools import partial

import numpy as np
from numpy.typing import NDArray

from dataio.base.errors import FieldError, SourceError
from dataio.rows.fields import Array, Field, Text, row_schema
from dataio.rows.image import Image, Mask
from dataio.rows.refused import Lenient, is_replaced, with_refused
from dataio.rows.rows import Rows, lost_rows, make_rows, row_offsets
from dataio.rows.whole import Check, find_suspects
from dataio.source.base import ReadsTiles, Source, place_of
from dataio.source.storage.retry import GaveUpError
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

    Samples that the source does not give are lost, see `lost_rows`, and no error where they are
    excluded, or skipped and alone damaged. Reader threads note what they find; whoever delivers
    rows raises it.

    Args:
        source: What is read.
        check: See `Staging`.
        skips: Whether a sample that fails is no error, but keeps a row that is padding.
        are_excluded: Says which samples no epoch shows.
        verifies: Whether rows are checked as they are trained, so that a lost one is found.

    Attributes:
        refused: Samples whose pictures failed, and what is wrong with each.
    """

    def __init__(
        self, source: Source, *, check: Check, skips: bool, are_excluded: AreExcluded,
        verifies: bool,
    ) -> None:  # fmt: skip
        self._source, self._check, self._skips = source, check, skips
        self._are_excluded, self._loses = are_excluded, skips and verifies
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
        read = self._source.read
        if self._skips and isinstance(self._source, TransformedSource):
            read = partial(self._source.read, skips=True)
        tiled = {n: f for n, f in fields.items() if isinstance(f, Array) and f.tiles is not None}
        if tiled and not isinstance(self._source, ReadsTiles):
            asked |= {name: replace(field, tiles=None) for name, field in tiled.items()}
            read = partial(_read_tiles, read, tiled)
        pictures = {name: kind for name, kind in fields.items() if isinstance(kind, Image | Mask)}
        parts = [(sample_ids, False)]
        while parts:
            (part, is_lost), done = parts.pop(), 0
            if is_lost:
                yield lost_rows(row_schema(fields), part)
                continue
            try:
                for rows in read(part, asked):
                    yield self._checked(rows, pictures)
                    done += len(rows)
            except (FieldError, SourceError) as error:
                left = part[done:]
                lost = self._lost(left, error)
                cuts = [0, *(np.flatnonzero(np.diff(lost)) + 1)][::-1]
                for cut in cuts:
                    parts.append((left[cut:], bool(lost[cut])))
                    left = left[:cut]

    def _lost(self, ids: NDArray[np.int64], error: FieldError | SourceError) -> NDArray[np.bool_]:
        """Choose the samples that are passed over because of an error; raise it where none is."""
        lost = self._are_excluded(ids)
        if self._loses and error.about is not None:
            lost = lost | (ids == error.about.sample_id)
        if lost.any():
            log.warning("%s; %d samples are passed over", error, lost.sum())
            return lost
        if isinstance(error, FieldError) or isinstance(error.__cause__, GaveUpError):
            raise error
        also = "" if error.about is None else ', or with on_error="skip"'
        raise SourceError(
            f"{error}; or pass over what cannot be read with exclude= (data.exclude of `tonari "
            f"train`){also}"
        ) from error.__cause__

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
        if any(isinstance(kind, Image) and kind.decoded == "auto" for kind in pictures.values()):
            from dataio.rows.kept import keep_pixels

            rows = keep_pixels(rows, pictures, refused)
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


def _read_tiles(
    read: Callable[[NDArray[np.int64], Mapping[str, Field]], Iterator[Rows]],
    tiled: Mapping[str, Array],
    sample_ids: NDArray[np.int64],
    asked: Mapping[str, Field],
) -> Iterator[Rows]:
    """Read whole samples, and keep of each tiled field this rank's part."""
    schema = row_schema({**asked, **tiled})
    for rows in read(sample_ids, asked):
        fixed = [*rows.fixed]
        for i, column in enumerate(rows.schema.fixed):
            if (field := tiled.get(column.name)) is not None and field.tiles is not None:
                # [rows, ...]: whole samples
                whole = np.ascontiguousarray(fixed[i]).view(column.dtype)
                whole = whole.reshape(len(rows), *column.shape)
                part = np.ascontiguousarray(whole[(slice(None), *field.tiles.box(field.shape))])
                fixed[i] = part.view(np.uint8).reshape(len(rows), -1)
        yield make_rows(schema, rows.sample_id, fixed, rows.lengths, rows.variable)
