"""A source whose samples are decoded and changed once, while they are staged."""

import json
import logging
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import replace
from typing import Any, get_args

import numpy as np
import xxhash
from numpy.typing import NDArray

from dataio.base.checked import checked
from dataio.base.errors import FieldError, SourceError
from dataio.rows.fields import (
    Array,
    Bytes,
    Decodes,
    Field,
    Float,
    Image,
    Int,
    Mask,
    Raw,
    Text,
    Tokens,
    declarations,
    row_schema,
)
from dataio.rows.patch import RandomPatch
from dataio.rows.refused import Lenient, find_refused, is_replaced, refused_row
from dataio.rows.rows import Rows, row_offsets
from dataio.rows.views import Crop, Resize, Resizing
from dataio.source.base import Source, costs_of, place_of
from dataio.source.classes import class_names
from dataio.source.formats.folder import ImageFolderSource
from dataio.source.row_block import RowBlock
from dataio.source.values import raw_value
from dataio.source.wrap.function_hash import describe_function
from dataio.world import World, single_world
from dataio.world.agree import agree

log = logging.getLogger(__name__)

Value = NDArray[np.generic] | np.generic | int | float | bytes | str
SourceSample = dict[str, Value]
StageTransform = Callable[[SourceSample], Mapping[str, object]]

FIELDS: Mapping[str, Callable[..., Field]] = {
    kind.__name__: kind for kind in (Array, Bytes, Float, Image, Mask, Int, Text, Tokens)
}
SAMPLES_TRIED = 100
"""To find one that decodes, which shows what the function returns."""

VIEWS: Mapping[str, Callable[..., object]] = {
    kind.__name__: kind for kind in (*get_args(Resizing), *get_args(Crop), RandomPatch)
}
"""What images are resized and cropped by, and arrays cut."""


@checked
class TransformedSource:
    """A `Source` of what a function makes of another's samples.

    The function gets a sample as a dict: an image as uint8[height, width, channels], numbers as
    NumPy scalars, arrays and tokens as arrays, bytes and text as they are. It must return the same
    for the same sample. Of what it returns for the first sample, numbers and arrays are kept with
    their shapes and dtypes, which all samples must share; bytes and str have any length. An
    `Image` that stays uint8[height, width, channels] stays an `Image`, decoded; `Tokens` that stay
    in one dimension stay `Tokens`.

    Args:
        source: What is transformed.
        fields: What the function gets of a sample.
        transform: The function.
        version: Whatever changes when the function does something else; its own code is looked at,
            what it calls is not.
        world: Ranks that all make this source: then one reads the first sample for all, and asking
            for ``fields`` the first time is collective.
    """

    made_as = "TransformedSource"
    total_bytes = 0

    def __init__(
        self,
        source: Source,
        fields: Mapping[str, Field],
        transform: StageTransform,
        *,
        version: str = "",
        world: World | None = None,
    ) -> None:
        self.name = source.name
        self.num_samples = source.num_samples
        self._source = source
        self._fields = fields
        self._transform = transform
        self._version = version
        self._world = world if world is not None else single_world()
        self._made_fields: Mapping[str, Field] | None = None

    @property
    def inner(self) -> Source:
        """What is transformed: the same samples, by the same ids."""
        return self._source

    @property
    def shard_starts(self) -> NDArray[np.int64]:
        return self._source.shard_starts

    @property
    def bytes_read(self) -> int:
        return self._source.bytes_read

    @property
    def costs(self) -> NDArray[np.uint8] | None:
        """What training each sample costs beside the others, see `costs_of`."""
        return costs_of(self._source)

    def class_names(self, key: str) -> list[str] | None:
        """Name the classes of a key of the source that is transformed."""
        return class_names(self._source, key)

    def place_of(self, sample_id: int) -> str:
        """Name a sample's place in the source that is transformed."""
        return place_of(self._source, sample_id)

    @property
    def fingerprint(self) -> str:
        """Hash the inner fingerprint and fields, the function's name and code, and the version."""
        return _hashed([self._source.fingerprint, *self._marks()])

    @property
    def variant(self) -> str:
        """Hash all of that but the inner fingerprint: each function has a cache of its own."""
        inner = self._source
        own = [inner.variant] if isinstance(inner, ImageFolderSource) and inner.variant else []
        return _hashed(self._marks() + own)

    def _marks(self) -> list[str]:
        declared = [declarations(self._fields), row_schema(self._fields)]
        # What images are decoded to, the function gets.
        declared += [str(f) for f in self._fields.values() if isinstance(f, Image | Mask)]
        return [str(declared), describe_function(self._transform), self._version]

    @property
    def fields(self) -> Mapping[str, Field]:
        """The fields of what the function returns, by the first sample.

        Raises:
            SourceError: If the function fails.
            FieldError: If it returns what cannot be kept.
        """

        def look() -> bytes:
            if self._world.rank:
                return b""
            sample_id, sample = self._first()
            made = self._made(sample_id, sample)
            return _packed(self._fields_of(sample_id, made))

        # No cached_property: before Python 3.12 it locks out the other ranks of a thread world.
        if self._made_fields is None:
            parts = agree(self._world, look, doing="transform the first sample")
            self._made_fields = _unpacked(parts[0])
        return self._made_fields

    def _first(self) -> tuple[int, SourceSample]:
        """Read the first sample that decodes; if the first few do not, raise why."""
        failed: FieldError | None = None
        for sample_id in range(min(self.num_samples, SAMPLES_TRIED)):
            try:
                rows = next(iter(self._source.read(np.array([sample_id]), self._fields)))
                _, sample = next(self._samples(rows))
            except FieldError as error:
                failed = failed or error
                continue
            assert sample is not None, "nothing is skipped"
            return sample_id, sample
        assert failed is not None, "a source has samples"
        raise failed

    def read(
        self, sample_ids: NDArray[np.int64], fields: Mapping[str, Field], *, skips: bool = False
    ) -> Iterator[Rows]:
        """Read and transform samples; see `Source.read`.

        Args:
            sample_ids: int64[n], sorted, distinct.
            fields: Some of ``self.fields``.
            skips: Whether a sample whose pictures do not decode is refused in its row, where that
                has room for it, and is no error.
        """
        unknown = [field.key for field in fields.values() if field.key not in self.fields]
        if unknown:
            raise FieldError(
                f"{self.name}: the transform returns {', '.join(self.fields)}, expected "
                f"{unknown[0]!r}; name one of these, or return it too"
            )
        skips = skips and any(isinstance(field, Lenient) for field in fields.values())
        return self._read(sample_ids, fields, skips=skips)

    def _read(
        self, sample_ids: NDArray[np.int64], fields: Mapping[str, Field], *, skips: bool
    ) -> Iterator[Rows]:
        block = RowBlock(fields)
        keys = {name: field.key for name, field in fields.items()}
        for rows in self._source.read(sample_ids, self._asked(skips)):
            for sample_id, sample in self._samples(rows, skips=skips):
                if sample is None:
                    if len(block):
                        yield block.take()
                    yield refused_row(fields, sample_id)
                    continue
                made = self._made(sample_id, sample)
                self._check_same(sample_id, made)
                raw = {name: made[key] for name, key in keys.items()}
                block.add(sample_id, raw, self._where(sample_id))
                if block.full:
                    yield block.take()
        if len(block):
            yield block.take()

    def _asked(self, skips: bool) -> dict[str, Field]:
        asked = dict(self._fields)
        return asked | {n: Lenient(f) for n, f in asked.items() if skips and is_replaced(f)}

    def _samples(
        self, rows: Rows, *, skips: bool = False
    ) -> Iterator[tuple[int, SourceSample | None]]:
        """Take rows apart into samples, decoded; None for one that is refused."""
        refused = {
            row
            for column, data in zip(rows.schema.fixed, rows.fixed, strict=True)
            if skips and is_replaced(self._fields[column.name])
            for row in find_refused(data, column)
        }
        fixed = {
            column.name: np.ascontiguousarray(data)
            .view(column.dtype)
            .reshape(len(rows), *column.shape)
            for column, data in zip(rows.schema.fixed, rows.fixed, strict=True)
        }
        bounds = [row_offsets(rows.lengths[:, i]).tolist() for i in range(len(rows.variable))]
        for row, sample_id in enumerate(rows.sample_id.tolist()):
            if row in refused:
                yield sample_id, None
                continue
            # Copies: the function may write to what it gets.
            sample: SourceSample = {name: values[row].copy() for name, values in fixed.items()}
            try:
                for name, data, cuts in zip(
                    rows.schema.variable, rows.variable, bounds, strict=True
                ):
                    where = f"{self.place_of(sample_id)}: sample {sample_id}, field {name!r}"
                    held = data[cuts[row] : cuts[row + 1]]
                    sample[name] = _decoded(self._fields[name], held, where)
            except FieldError as error:
                if not skips:
                    raise
                log.warning("%s; its row is padding", error)
                yield sample_id, None
                continue
            yield sample_id, {name: sample[name] for name in self._fields}

    def _where(self, sample_id: int) -> str:
        return f"{self.place_of(sample_id)}: sample {sample_id}, transformed"

    def _made(self, sample_id: int, sample: SourceSample) -> dict[str, Raw]:
        """Call the function, and bring what it returns to what fields take."""
        try:
            made = self._transform(sample)
        except Exception as error:
            raise SourceError(
                f"{self.place_of(sample_id)}: the stage transform failed on sample {sample_id} "
                f"({type(error).__name__}: {error}), expected a dict; repair it or the sample"
            ) from error
        if not isinstance(made, Mapping) or not made:
            raise FieldError(
                f"{self._where(sample_id)}: found {type(made).__name__}, expected the sample as a "
                "dict that is not empty; return it at the end of the transform"
            )
        where = self._where(sample_id)
        return {name: raw_value(value, f"{where}, field {name!r}") for name, value in made.items()}

    def _fields_of(self, sample_id: int, made: Mapping[str, Raw]) -> dict[str, Field]:
        """Describe what the function returned."""
        try:
            return {
                name: _field_of(name, value, self._fields.get(name)) for name, value in made.items()
            }
        except ValueError as error:
            raise FieldError(
                f"{self._where(sample_id)}: found what cannot be kept ({error}), expected arrays "
                "of numbers, bytes or text; return these from the transform"
            ) from error

    def _check_same(self, sample_id: int, made: Mapping[str, Raw]) -> None:
        found, expected = self._fields_of(sample_id, made), self.fields
        if found == expected:
            return
        name = next(n for n in [*expected, *found] if found.get(n) != expected.get(n))
        raise FieldError(
            f"{self._where(sample_id)}, field {name!r}: found {found.get(name, 'nothing')}, "
            f"expected {expected.get(name, 'nothing')} as sample 0 has; let the transform return "
            "the same fields, shapes and dtypes for all"
        )


def _hashed(marks: Sequence[str]) -> str:
    return xxhash.xxh3_64_hexdigest("\n".join(marks).encode())


def _field_of(name: str, value: Raw, before: Field | None) -> Field:
    if isinstance(value, (bytes, memoryview)):
        return Bytes(name)
    if isinstance(value, str):
        return Text(name)
    if not isinstance(value, np.ndarray):
        return Int(name) if isinstance(value, int) else Float(name)
    kind = value.dtype.name
    if value.ndim == 0 and kind in ("int64", "float32"):
        return Int(name) if kind == "int64" else Float(name)
    if isinstance(before, Image) and kind == "uint8" and value.shape[2:] == (before.channels,):
        # What is drawn is drawn anew for each delivery.
        resize = Resize((value.shape[0], value.shape[1]))
        return replace(before.anew, key=name, resize=resize, decoded=True)
    if isinstance(before, Mask) and before.draws:
        raise FieldError(
            f"stage_transform: field {name!r} is {before}, expected a Mask without flip or random "
            "crop, as its pixels are kept; crop and flip it in the transform of the loader"
        )
    if isinstance(before, Tokens) and value.ndim == 1 and kind == np.dtype(before.dtype).name:
        return replace(before, key=name)
    patch = before.patch if isinstance(before, Array) else None
    return Array(name, value.shape, kind, patch=patch)


def _packed(fields: Mapping[str, Field]) -> bytes:
    forms = {name: [type(field).__name__, vars(field)] for name, field in fields.items()}
    return json.dumps(forms, default=lambda view: [type(view).__name__, vars(view)]).encode()


def _unpacked(data: bytes) -> dict[str, Field]:
    fields = {}
    for name, (kind, values) in json.loads(data).items():
        fields[name] = FIELDS[kind](**{key: _value(value) for key, value in values.items()})
    return fields


def _value(value: Any) -> Any:
    if not isinstance(value, list):
        return value
    if value and value[0] in VIEWS:
        return VIEWS[value[0]](**{key: _value(each) for key, each in value[1].items()})
    # JSON has no tuples.
    return tuple(value)


def _decoded(field: Field, data: NDArray[np.uint8], where: str) -> Value:
    if isinstance(field, Image | Mask):
        from dataio.rows.decode import decode_image, image_shape

        fixed = field.once if isinstance(field, Image) else field
        size = fixed.out or image_shape(data, where=where, upright=fixed.upright)
        pixels = np.empty((*size, fixed.channels), np.uint8)
        decode_image(data, pixels, fixed, where=where)
        return pixels
    if isinstance(field, Tokens):
        return np.frombuffer(data.tobytes(), np.dtype(field.dtype).newbyteorder("<")).copy()
    if isinstance(field, Decodes):
        return field.decode(data.data.toreadonly(), where)  # type: ignore[return-value]
    raw = data.tobytes()
    return raw.decode() if isinstance(field, Text) else raw
