"""Tiles of an array: together they are the array, and halos are what lies beside them."""

from math import prod

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from dataio import Array, Tiles
from dataio.rows.fields import declarations, row_schema


@given(data=st.data())
def test_tiles_without_their_halos_are_the_whole_once_and_cut_as_numpy_cuts(data) -> None:
    shape = tuple(data.draw(st.lists(st.integers(1, 9), min_size=1, max_size=3)))
    axes = data.draw(st.lists(st.integers(0, len(shape) - 1), min_size=1, unique=True))
    parts = tuple(data.draw(st.integers(1, shape[axis])) for axis in axes)
    halo = data.draw(st.integers(0, min(shape[a] // p for a, p in zip(axes, parts, strict=True))))
    whole, found = np.arange(prod(shape)).reshape(shape), np.zeros(shape, int)
    for index in range(prod(parts)):
        tiles = Tiles(tuple(axis - len(shape) for axis in axes), parts, halo, index)
        held = whole[tiles.box(shape)]
        inner = held[tiles.inner(shape)]
        found.reshape(-1)[inner.ravel()] += 1
        expected = whole
        places = np.unravel_index(index, parts)
        for axis, num_parts, place in zip(axes, parts, places, strict=True):
            expected = np.array_split(expected, num_parts, axis)[place]
        np.testing.assert_array_equal(inner, expected)
        assert Array("x", shape, "int64", tiles).column("x").shape == held.shape
    assert (found == 1).all()


def test_a_halo_is_what_the_neighbours_hold_and_ends_at_the_border() -> None:
    whole = np.arange(7 * 10).reshape(7, 10)
    parts = [whole[Tiles((0, 1), (2, 2), 2, index).box((7, 10))] for index in range(4)]
    assert [part.shape for part in parts] == [(6, 7), (6, 7), (5, 7), (5, 7)]
    np.testing.assert_array_equal(parts[0], whole[0:6, 0:7])
    np.testing.assert_array_equal(parts[3], whole[2:7, 3:10])


def test_tiles_of_no_rank_have_no_part() -> None:
    for part in (Tiles.box, Tiles.inner):
        with pytest.raises(ValueError, match="nobody said which tile is meant, expected a rank's"):
            part(Tiles((0,), (2,)), (4,))
    assert Array("x", (4,), "float32", Tiles((0,), (2,))).column("x").shape == (4,)


@pytest.mark.parametrize(
    ("tiles", "found"),
    [
        (((0,), (2, 2)), r"axes are \(0,\) and parts \(2, 2\), expected as many of both"),
        (((0,), (2,), 0, 2), r"index is 2 of 2 tiles, expected a number in \[0, 1\]"),
        (((2,), (2,)), r"Array\('x'\): tiles have axes \(2,\), expected positions in \[4, 9\]"),
        (((1, -1), (2, 2)), r"tiles have axes \(1, -1\), expected each axis once"),
        (((0,), (5,)), "tiles have 5 parts, expected at most the 4 of axis 0"),
        (((0,), (2,), 3), "tiles have the halo 3, expected at most the 2 of a tile along axis 0"),
        (((0,), (0,)), r"parts is \(0,\), expected a tuple of a whole number >= 1"),
    ],
)
def test_tiles_that_do_not_fit_are_refused(tiles, found) -> None:
    with pytest.raises(ValueError, match=found):
        Array("x", (4, 9), "float32", Tiles(*tiles))


def test_rows_of_another_tile_or_halo_are_declared_otherwise() -> None:
    """Also of the same shape; those of an array that is whole stay as they were."""
    given = [None, *(Tiles((0,), (2,), 0, index) for index in (0, 1)), Tiles((0,), (4,), 1, 1)]
    made = [{"x": Array("x", (8,), "float32", tiles)} for tiles in given]
    assert row_schema(made[1]) == row_schema(made[2]) == row_schema(made[3])
    assert len({str(declarations(fields)) for fields in made}) == 4
    whole = {"kind": "Array", "key": "x", "shape": [8], "dtype": "<f4"}
    assert declarations(made[0]) == {"x": whole}
