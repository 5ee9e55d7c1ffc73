"""Located rows -> the fields of a batch: copied or decoded, row by row, on any thread."""

import math
import threading
from collections.abc import Iterable, Mapping

import numpy as np
from numpy.typing import NDArray

from dataio.base.buffers import BufferRing
from dataio.base.errors import About, FieldError
from dataio.base.seeding import key
from dataio.batch.job import BatchJob, BatchWork, Pictures
from dataio.rows.at_once import DONE, LEFT, SKIPPED, PicturesAtOnce, PicturesCall
from dataio.rows.decode import check_decodes, decode_image, image_shape, store_pixels
from dataio.rows.fields import Array as ArrayField
from dataio.rows.fields import Decodes, Field, Text, Tokens
from dataio.rows.image import Image, Mask
from dataio.rows.on_device import DeviceDecoder, PicturesOnDevice
from dataio.rows.patch import Patches
from dataio.rows.refused import WORDS, find_refused, is_replaced
from dataio.rows.samples import Array, AsList, NothingDecodesError, OnError, Value
from dataio.rows.views import Draws, RandomResizedCrop, Size
from dataio.store.files.reader import RowPieces, RowReader

SMALL_BYTES = 64
"""Fixed fields up to this width are gathered for many batches at once."""


class Filler:
    """Fills the fields of batches; the lock guards the rows known to be bad.

    Args:
        reader: The files.
        fields: How each is decoded.
        ring: Where buffers come from.
        seed: The run's seed.
        on_error: What to do with a row that does not decode.
        trusts_pictures: Whether pictures that were refused while staging are decoded all the same.
        decoder: Of the device that decodes pictures; None: no field asks for it.

    Attributes:
        sizes: Of fields of pictures that name none: that of the first picture.
        worked_on: The fields that are more than copied.
    """

    def __init__(
        self,
        reader: RowReader,
        fields: Mapping[str, Field],
        *,
        ring: BufferRing,
        seed: int,
        on_error: OnError,
        trusts_pictures: bool = False,
        decoder: DeviceDecoder | None = None,
    ) -> None:
        self._reader, self._fields, self._ring, self._on_error = reader, fields, ring, on_error
        self._seed, self._trusts_pictures, self._decoder = seed, trusts_pictures, decoder
        self.sizes: dict[str, Size] = {}
        self._at_once: dict[str, PicturesAtOnce | None] = {}
        self._lock = threading.Lock()
        schema = reader.schema
        pictures = {name: kind for name, kind in fields.items() if isinstance(kind, Image | Mask)}
        self._replaced = [
            (number, column)
            for number, column in enumerate(schema.fixed)
            if is_replaced(fields[column.name])
        ]
        self.decoded = [name for name in pictures if name not in schema.variable]
        # Kept as pixels, of which every epoch delivers another part.
        self._anew = {
            column.name: (number, kind.anew)
            for number, column in enumerate(schema.fixed)
            if isinstance(kind := fields[column.name], Image) and kind.draws
        }
        self._patches = {
            column.name: (number, patch)
            for number, column in enumerate(schema.fixed)
            if isinstance(kind := fields[column.name], ArrayField) and (patch := kind.patch)
        }
        # Of a row's fixed fields, what is read of them
        self.fixed_bytes = schema.fixed_bytes
        for number, patch in self._patches.values():
            column = schema.fixed[number]
            saved = math.prod(column.shape) - math.prod(patch.out(column.shape))
            self.fixed_bytes -= saved * np.dtype(column.dtype).itemsize
        others = self._anew.keys() | self._patches
        kept = [(i, column) for i, column in enumerate(schema.fixed) if column.name not in others]
        self._large = [(i, column.name) for i, column in kept if column.width_bytes > SMALL_BYTES]
        self._small = [(i, column.name) for i, column in kept if column.width_bytes <= SMALL_BYTES]
        self._aligned = _aligned({n: kind for n, kind in pictures.items() if n in schema.variable})
        self._draws = any(kind.draws for kind in pictures.values())
        texts = [name for name, kind in fields.items() if isinstance(kind, Text)]
        self._key = next((name for name in texts if fields[name].key in ("__key__", "path")), None)
        # An image has a word of the name of theirs
        own = [name for name in schema.variable if isinstance(fields[name], Decodes)]
        self.own = [name for name in own if name not in pictures]
        self.varying = self.own + [
            name
            for name in schema.variable
            if isinstance(kind := fields[name], Tokens) and kind.length is None
        ]
        compressed = pictures.keys() & {*schema.variable}
        self.worked_on = {*compressed, *self._anew, *self.own, *self._patches}
        self.decodes = bool(self.worked_on)

    def gather_small(
        self, position: NDArray[np.int64], reader: RowReader | None = None
    ) -> dict[str, Array]:
        """Copy the small fixed fields of positions of any shape: dtype[*position.shape, *shape]."""
        reader = reader or self._reader
        return {name: reader.column(number)[position] for number, name in self._small}

    def plain_columns(self) -> dict[str, Array] | None:
        """The large fixed fields, if a batch is nothing but copies of fixed fields; or None."""
        if self.decodes or self._replaced or self._reader.schema.variable:
            return None
        return {name: self._reader.column(number) for number, name in self._large}

    def parts(self, work: BatchWork) -> dict[str, Patches]:
        """Draw the patches of a batch, for each field that is delivered so."""
        stream, shapes = key(self._seed, "patches", epoch=work.epoch), self._reader.schema.fixed
        return {
            name: patch.part(shapes[number].shape, stream, work.occurrences)
            for name, (number, patch) in self._patches.items()
        }

    def prepare(self, work: BatchWork) -> BatchJob:
        """Allocate what a batch needs."""
        located, num_rows = work.located, len(work.located.position)
        reader = work.reader or self._reader
        job = BatchJob(work, dict(work.small), [], [], [], [])
        if self._replaced:
            self._refuse_replaced(job, reader)
        for number, name in self._large:
            column = reader.column(number)
            out = self._ring.take((num_rows, *column.shape[1:]), column.dtype)
            job.copies.append((column, out))
            job.values[name] = out
        for name, part in self.parts(work).items() if self._patches else ():
            number, patch = self._patches[name]
            column = reader.column(number)
            out = self._ring.take((num_rows, *patch.out(part.whole)), column.dtype)
            job.values[name] = out
            into = out if patch.num else out[:, None]
            # What was fetched is the patches already
            if work.reader is not None:
                job.copies.append((column, into))
            else:
                job.cuts.append((column, part, into))
        for number, name in enumerate(self._reader.schema.variable):
            bounds = located.bounds
            start, stop = bounds[:, number], bounds[:, number + 1]
            data = reader.pieces(located.heap, start, stop)
            kind = self._fields[name]
            if isinstance(kind, Image | Mask):
                job.values[name] = self._image(job, name, kind, data, stop - start)
            else:
                job.values[name] = self._variable(job, name, data)
        for name, (number, anew) in self._anew.items():
            pixels = np.asarray(reader.column(number), np.uint8)
            _, height, width, channels = pixels.shape
            size = anew.out if anew.out is not None else (height, width)
            out = self._ring.take((num_rows, *size, channels), np.uint8)
            row_bytes = math.prod(pixels.shape[1:])
            addresses = located.position.astype(np.uint64) * np.uint64(row_bytes)
            job.images.append(
                Pictures(
                    name, anew, pixels, out.view(np.uint8),
                    addresses + np.uint64(pixels.ctypes.data), np.full(num_rows, row_bytes),
                    self._find_at_once(name, anew, size, (height, width)),
                )
            )  # fmt: skip
            job.values[name] = out
        if self._draws:
            stream = key(self._seed, "pictures", epoch=work.epoch)
            job.drawn = stream, work.occurrences
        return job

    def _refuse_replaced(self, job: BatchJob, reader: RowReader) -> None:
        """Refuse the rows whose pictures did not decode when they were staged."""
        for number, column in self._replaced:
            position = job.work.located.position
            for row in find_refused(reader.column(number), column, position):
                self.refuse(
                    job,
                    row,
                    FieldError(
                        f"{_where(job, row, column.name)}: its picture did not decode when it was "
                        'staged with on_error="skip", expected one that does; repair the sample, '
                        "or go on without such samples as before"
                    ),
                )

    def _variable(self, job: BatchJob, name: str, data: RowPieces) -> Value:
        kind = self._fields[name]
        if isinstance(kind, Tokens):
            return self._tokens(kind, data)
        if isinstance(kind, Text):
            return self._text(job, name, data)
        if isinstance(kind, Decodes):
            job.decodes.append((name, kind, data))
            return [None] * len(data)
        return [piece.tobytes() for piece in data]

    def _text(self, job: BatchJob, name: str, data: RowPieces) -> list[str]:
        texts = []
        for row, piece in enumerate(data):
            try:
                texts.append(str(piece, "utf-8"))
            except UnicodeDecodeError as error:
                texts.append("")
                found = f"{len(piece)} bytes beginning {bytes(piece[:8])!r} are not UTF-8 ({error})"
                self.refuse(
                    job,
                    row,
                    FieldError(
                        f"{_where(job, row, name)}: {found}, expected text; repair the sample, or "
                        "declare Bytes"
                    ),
                )
        return texts

    def _tokens(self, kind: Tokens, data: RowPieces) -> Array | list[Array]:
        dtype = np.dtype(kind.dtype).newbyteorder("<")
        if kind.length is None:
            ends = np.cumsum([0, *map(len, data)]).tolist()
            flat = self._ring.take((ends[-1] // dtype.itemsize,), dtype)
            target = flat.view(np.uint8).data
            for piece, start in zip(data, ends, strict=False):
                target[start : start + len(piece)] = piece
            return np.split(flat, np.array(ends[1:-1]) // dtype.itemsize)
        out = self._ring.take((len(data), kind.length), dtype)
        out.fill(kind.pad)
        width = kind.length * dtype.itemsize
        target = out.reshape(-1).view(np.uint8).data
        for start, piece in zip(range(0, len(data) * width, width), data, strict=True):
            cut = piece[:width]
            target[start : start + len(cut)] = cut
        return out

    def _image(
        self,
        job: BatchJob,
        name: str,
        kind: Image | Mask,
        data: RowPieces,
        lengths: NDArray[np.int64],
    ) -> Value:
        size = kind.out if kind.out is not None else self.sizes.get(name)
        if size is None:
            size = self.sizes[name] = self._first_size(job, name, kind, data)
        if isinstance(kind, Image) and kind.decode == "device":
            planned = PicturesOnDevice(kind, len(data), size)
            job.images.append(Pictures(name, kind, data, planned, data.addresses, lengths))
            return []
        out = self._ring.take((len(data), *size, kind.channels), np.uint8).view(np.uint8)
        at_once = self._find_at_once(name, kind, size)
        job.images.append(Pictures(name, kind, data, out, data.addresses, lengths, at_once))
        # uint8[batch, channels, height, width], channels last in memory
        return out[..., 0] if isinstance(kind, Mask) else out.transpose(0, 3, 1, 2)

    def _find_at_once(
        self, name: str, kind: Image | Mask, out: Size, kept: Size | None = None
    ) -> PicturesAtOnce | None:
        if name not in self._at_once:
            found = PicturesAtOnce(kind, out, kept) if isinstance(kind, Image) else None
            self._at_once[name] = found if found is not None and found.is_there else None
        return self._at_once[name]

    def _first_size(self, job: BatchJob, name: str, kind: Image | Mask, data: RowPieces) -> Size:
        for row, piece in enumerate(map(_unmarked, data)):
            try:
                return image_shape(piece, where=_where(job, row, name), upright=kind.upright)
            except FieldError as error:
                self.refuse(job, row, error)
        raise NothingDecodesError(
            f"step {job.work.step}, field {name!r}: none of its {len(data)} pictures decodes, "
            "expected one at least to see their size; look at the source"
        )

    def fill(self, job: BatchJob, start: int, stop: int) -> None:
        """Copy and decode the rows [start, stop)."""
        position = job.work.located.position[start:stop]
        for column, out in job.copies:
            # mode="clip" because the default checks by way of a second buffer
            column.take(position, 0, out[start:stop], "clip")
        for column, part, out in job.cuts:
            for row, at in enumerate(position, start):
                part.copy(row, column[at], out[row])
        sizes: dict[tuple[str, int], Size] = {}
        for pictures in job.images:
            for row in self._deliver(job, pictures, range(start, stop), sizes):
                if row not in job.work.bad and (size := self._decode(job, row, pictures)):
                    sizes[pictures.name, row] = size
        for names in self._aligned:
            for row in range(start, stop):
                if row not in job.work.bad:
                    self._check_aligned(job, row, {name: sizes[name, row] for name in names})
        for name, own, data in job.decodes:
            for row in range(start, stop):
                if row not in job.work.bad:
                    job.values[name][row] = self._decoded(job, row, name, own, data[row])  # type: ignore[assignment]

    def _decoded(
        self, job: BatchJob, row: int, name: str, kind: Decodes, data: memoryview
    ) -> object:
        where = _where(job, row, name)
        try:
            value = kind.decode(data.toreadonly(), where)
        except FieldError as error:
            self.refuse(job, row, error)
            return None
        except Exception as error:
            refused = FieldError(
                f"{where}: {type(kind).__name__}.decode raised {type(error).__name__} ({error}) "
                f"on {len(data)} bytes beginning {bytes(data[:8])!r}, expected a value; repair the "
                'sample, or go on without such samples with on_error="skip"'
            )
            refused.__cause__ = error
            self.refuse(job, row, refused)
            return None
        if isinstance(value, AsList):
            return AsList(_kept(value.value))
        return _kept(value)

    def _check_aligned(self, job: BatchJob, row: int, sizes: Mapping[str, Size]) -> None:
        """Refuse a row whose picture and mask are cut at different places."""
        (name, size), *others = sizes.items()
        kind = self._fields[name]
        assert isinstance(kind, Image | Mask)
        resize = kind.resize
        for other, its_size in others:
            if size == its_size:
                continue
            (height, width), (its_height, its_width) = size, its_size
            # Its part is drawn as shares of the sides.
            if isinstance(kind.crop, RandomResizedCrop) and (
                abs(height * its_width - width * its_height) <= max(size)
            ):
                continue
            if resize is not None:
                pairs = zip(resize.resized(size), resize.resized(its_size), strict=True)
                # Sides are rounded where proportions stay.
                if all(abs(one - its) <= 1 for one, its in pairs):
                    continue
            self.refuse(
                job,
                row,
                FieldError(
                    f"{_where(job, row, other)}: is {its_size[0]} x {its_size[1]} (height x "
                    f"width), expected {size[0]} x {size[1]} as field {name!r}, or {kind.crop} "
                    "cuts another part; store both in one size, or declare resize=Resize(...) "
                    "before the crop of both"
                ),
            )
            return

    def call(self, job: BatchJob, pictures: Pictures, rows: range) -> PicturesCall | None:
        """Describe pictures to compiled code; None if it delivers none of that field."""
        if pictures.at_once is None:
            return None
        part, states = slice(rows.start, rows.stop), np.zeros(len(rows), np.uint8)
        states[[row - rows.start for row in job.work.bad if row in rows]] = SKIPPED
        assert isinstance(pictures.out, np.ndarray)
        return pictures.at_once.call(
            pictures.addresses[part], pictures.lengths[part],
            job.drawn and (job.drawn[0], job.drawn[1][part]), pictures.out[part], states,
        )  # fmt: skip

    def _deliver(
        self, job: BatchJob, pictures: Pictures, rows: range, sizes: dict[tuple[str, int], Size]
    ) -> Iterable[int]:
        """Deliver most pictures of some rows, and note their sizes; give the rows that are left."""
        call = self.call(job, pictures, rows)
        if call is None:
            return rows
        assert pictures.at_once is not None
        pictures.at_once.deliver(call)
        if self._aligned:
            for row, state, size in zip(
                rows, call.states.tolist(), call.sizes.tolist(), strict=True
            ):
                if state == DONE:
                    sizes[pictures.name, row] = size[0], size[1]
        return (np.flatnonzero(call.states == LEFT) + rows.start).tolist()

    def fill_left(self, job: BatchJob, number: int, rows: Iterable[int]) -> None:
        """Decode pictures of a field that compiled code has left."""
        for row in rows:
            if row not in job.work.bad:
                self._decode(job, row, job.images[number])

    def _decode(self, job: BatchJob, row: int, pictures: Pictures) -> Size | None:
        """Decode a picture; its own size, or None where that is not known any more."""
        name, kind, data, out = pictures[:4]
        where = _where(job, row, name)
        draws = job.draws(row)
        try:
            if isinstance(out, PicturesOnDevice):
                size = out.plan(row, data[row], draws, where=where)
                if size is None:
                    pixels = np.empty(out.shape, np.uint8)
                    size = self._decode_kept(data[row], pixels, kind, draws, where)
                    out.keep(row, pixels)
                return size
            if isinstance(data, np.ndarray):
                store_pixels(
                    data[job.work.located.position[row]], out[row], kind, draws, where=where
                )
            else:
                return self._decode_kept(data[row], out[row], kind, draws, where)
        except FieldError as error:
            self.refuse(job, row, error)
        return None

    def _decode_kept(
        self, data: memoryview, out: NDArray[np.uint8], kind: Image | Mask, draws: Draws, where: str
    ) -> Size:
        try:
            return decode_image(data, out, kind, draws, where=where)
        except FieldError:
            # The words before a picture that was refused while staging are none.
            if data[: len(WORDS)] != WORDS:
                raise
            if not self._trusts_pictures:
                check_decodes(data[len(WORDS) :], kind, where=where)
            return decode_image(data[len(WORDS) :], out, kind, draws, where=where)

    def refuse(self, job: BatchJob, row: int, error: FieldError) -> None:
        """Raise what is wrong with a row, or leave the row to become padding."""
        if self._on_error == "raise":
            message = str(error)
            if "on_error" not in message:
                message += ', or go on without such samples with on_error="skip"'
            raise FieldError(message).knowing(self.about(job, row)) from error.__cause__
        self.add_bad(job, {row})

    def add_bad(self, job: BatchJob, rows: Iterable[int]) -> None:
        """Leave rows to become padding."""
        with self._lock:
            job.work.bad |= frozenset(rows)

    def about(self, job: BatchJob, row: int) -> About:
        """Name the sample of a row, for an error."""
        key = "" if self._key is None else str(job.values[self._key][row])
        return About(int(job.work.located.sample_id[row]), key)

    def values(self, job: BatchJob) -> dict[str, Value]:
        """Give the filled fields by name, images with their channels first."""
        values = {name: job.values[name] for name in self._fields}
        for pictures in job.images:
            if isinstance(pictures.out, PicturesOnDevice):
                assert self._decoder is not None, "opened where a field asks for it"
                tensor = pictures.out.deliver(
                    self._decoder,
                    lambda row: self._decode(job, row, pictures),  # noqa: B023
                )
                # A tensor already, as `as_tensor` leaves it
                values[pictures.name] = tensor  # type: ignore[assignment]
        for name in self.decoded:
            stored = values[name]
            assert isinstance(stored, np.ndarray)
            # [batch, channels, height, width], channels last in memory
            values[name] = stored.transpose(0, 3, 1, 2)
        return values


def _aligned(pictures: Mapping[str, Image | Mask]) -> list[list[str]]:
    """Group the fields that show one part of a sample: masks, and what is cropped as they are."""
    groups: list[list[str]] = []
    seen: list[tuple[object, object]] = []
    for kind in pictures.values():
        way = kind.resize, kind.crop
        if not isinstance(kind, Mask) or kind.crop is None or way in seen:
            continue
        seen.append(way)
        names = [name for name, its in pictures.items() if (its.resize, its.crop) == way]
        # The size of a picture that is named first is what the others' is compared to.
        groups.append(sorted(names, key=lambda name: isinstance(pictures[name], Mask)))
    return [names for names in groups if len(names) > 1]


def _unmarked(data: memoryview) -> memoryview:
    return data[len(WORDS) :] if data[: len(WORDS)] == WORDS else data


def _where(job: BatchJob, row: int, name: str) -> str:
    return f"sample {job.work.located.sample_id[row]}, field {name!r}"


def _kept(value: object) -> object:
    # What shows the cache's own memory would be gone with it.
    shows = isinstance(value, np.ndarray) and not value.flags.writeable
    return value.copy() if shows else value  # type: ignore[attr-defined]
