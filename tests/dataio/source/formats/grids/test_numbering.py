"""Samples of a file are numbered cell by cell."""

from math import prod

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from dataio.source.formats.grids.numbering import (
    LARGE_CELL_BYTES,
    Axis,
    Numbering,
    number_samples,
    region,
    take_samples,
)
from dataio.source.formats.grids.variables import Variable, contiguous_chunks
from dataio.source.formats.raw import RawArray

SIDES = st.integers(1, 9)


@st.composite
def numberings(draw: st.DrawFn) -> Numbering:
    counts = draw(st.lists(SIDES, max_size=3))
    cell = [draw(st.integers(1, count)) for count in counts]
    return Numbering(tuple(counts), tuple(cell), tuple(counts), 1)


@given(numbers=numberings())
def test_every_place_has_one_number(numbers: Numbering) -> None:
    starts = numbers.cell_starts()
    cells, places = numbers.locate(np.arange(numbers.num_samples), starts)
    assert len(places) == len(set(map(tuple, places.tolist()))) == prod(numbers.counts)
    assert (places >= 0).all()
    assert (places < np.array(numbers.counts)).all()
    assert (np.diff(cells) >= 0).all()
    corners = places // np.array(numbers.cell)
    of_cell = {cell: set(map(tuple, corners[cells == cell].tolist())) for cell in set(cells)}
    assert all(len(found) == 1 for found in of_cell.values())
    assert len(of_cell) == len(starts)


@given(data=st.data())
def test_samples_that_share_a_chunk_share_a_cell_where_tiles_and_chunks_fit(
    data: st.DataObject,
) -> None:
    tile, per_chunk, num_tiles = data.draw(SIDES), data.draw(st.integers(1, 3)), data.draw(SIDES)
    chunk = tile * per_chunk
    rows, row_chunk = data.draw(st.integers(1, 40)), data.draw(SIDES)
    shape = (rows, tile * num_tiles)
    variable = Variable(("time", "lat"), shape, "<f4", (row_chunk, chunk))
    axes = (Axis("time", is_row=True), Axis("lat", tile))
    numbers = number_samples({"x": variable}, axes, drop_edge=False, path="a")
    cells, places = numbers.locate(np.arange(numbers.num_samples), numbers.cell_starts())
    cell_of: dict[tuple[int, int], int] = {}
    for cell, (row, column) in zip(cells.tolist(), places.tolist(), strict=True):
        shared = (row // row_chunk, column * tile // chunk)
        assert cell_of.setdefault(shared, cell) == cell


@given(data=st.data())
def test_along_one_axis_samples_are_in_its_order(data: st.DataObject) -> None:
    shape = (data.draw(st.integers(1, 200)), data.draw(SIDES))
    variable = Variable(("", ""), shape, "<f4", (data.draw(SIDES), 1))
    numbers = number_samples({"x": variable}, [Axis(0, is_row=True)], drop_edge=False, path="a")
    _, places = numbers.locate(np.arange(shape[0]), numbers.cell_starts())
    assert places[:, 0].tolist() == list(range(shape[0]))


class _Memory:
    """A file whose bytes are at hand; counts what is read."""

    path = "memory"

    def __init__(self, data: bytes) -> None:
        self.data, self.size, self.num_read = data, len(data), 0

    def read_at(self, offset: int, length: int) -> bytes:
        self.num_read += length
        return self.data[offset : offset + length]


@given(data=st.data())
def test_a_region_of_a_raw_array_is_what_a_slice_of_it_is(data: st.DataObject) -> None:
    shape = tuple(data.draw(st.lists(SIDES, min_size=1, max_size=4)))
    rows = np.arange(prod(shape), dtype=">i4").reshape(shape)
    gap = data.draw(st.integers(0, 3)) * 4
    stored = b"head" + b"".join(rows[i : i + 1].tobytes() + b"x" * gap for i in range(shape[0]))
    bounds = [sorted(data.draw(st.tuples(st.integers(0, n), st.integers(0, n)))) for n in shape]
    box = tuple(slice(*pair) for pair in bounds)
    raw = RawArray(_Memory(stored), 4, shape, rows.dtype, rows[0].nbytes + gap if gap else 0)  # type: ignore[arg-type]
    np.testing.assert_array_equal(raw.read(box), rows[box])


def test_a_narrow_region_of_a_large_array_does_not_cost_all_of_it() -> None:
    values = np.arange(64 << 16, dtype="<i4").reshape(64, 256, 256)
    file = _Memory(values.tobytes())
    raw = RawArray(file, 0, values.shape, values.dtype)  # type: ignore[arg-type]
    box = (slice(0, 64), slice(16, 32), slice(0, 16))
    np.testing.assert_array_equal(raw.read(box), values[box])
    assert file.num_read == 64 * 16 * 256 * 4


@given(data=st.data())
def test_a_sample_is_the_part_of_the_array_at_its_place(data: st.DataObject) -> None:
    tile = data.draw(st.integers(1, 3))
    overlap = data.draw(st.integers(0, tile - 1))
    values = np.arange(6 * 6 * tile * 2).reshape(6, 6 * tile, 2)
    variable = Variable(("a", "b", ""), values.shape, "<i8", values.shape)
    axes = (Axis("a", is_row=True), Axis("b", tile, overlap=overlap))
    places = np.array(data.draw(st.lists(st.tuples(*[st.integers(0, 5)] * 2), min_size=1)))
    low, high = places.min(axis=0), places.max(axis=0) + 1
    part = values[region(variable, axes, low.tolist(), high.tolist())]
    found = take_samples(part, variable, axes, places - low)
    for sample, (row, column) in zip(found, places.tolist(), strict=True):
        start = column * (tile - overlap)
        np.testing.assert_array_equal(sample, values[row, start : start + tile])


@given(shape=st.lists(st.integers(1, 3000), min_size=1, max_size=3))
def test_what_is_read_together_of_a_contiguous_array_is_whole_rows(shape: list[int]) -> None:
    chunks = contiguous_chunks(shape, 4)
    partial = [i for i in range(len(shape)) if chunks[i] < shape[i]]
    assert prod(chunks) * 4 <= 1 << 20
    assert all(length == 1 for length in chunks[: partial[-1] if partial else 0])


@given(data=st.data())
def test_a_cell_takes_a_bounded_part_of_memory(data: st.DataObject) -> None:
    sides = st.integers(1, 100_000)
    shape = (data.draw(sides), data.draw(sides))
    chunks = tuple(data.draw(st.integers(1, length)) for length in shape)
    variable = Variable(("a", "b"), shape, "<f8", chunks)
    axes = (Axis("a", is_row=True), Axis("b", data.draw(st.integers(1, shape[1]))))
    numbers = number_samples({"x": variable}, axes, drop_edge=True, path="a")
    assert prod(numbers.cell) * axes[1].length * 8 <= LARGE_CELL_BYTES
