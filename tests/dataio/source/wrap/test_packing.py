"""Sequences of documents: nothing lost, nothing twice, little padding."""

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from dataio.source.wrap.packing import WINDOW_SEQUENCES, DocumentPieces, Packing, pack

LENGTHS = st.lists(st.integers(0, 40), max_size=30).map(lambda found: np.array(found, np.int64))
WAYS = st.sampled_from(["concatenated", "best_fit"])


def pieces_of(packed: DocumentPieces) -> list[list[tuple[int, int, int]]]:
    """List the pieces of each sequence: document, first token, tokens."""
    rows = list(zip(*(column.tolist() for column in packed[1:]), strict=True))
    return [rows[a:b] for a, b in zip(packed.starts[:-1], packed.starts[1:], strict=True)]


@given(LENGTHS, st.integers(1, 12), WAYS, st.integers(1, 8))
def test_every_token_but_a_documents_first_is_a_target_once(
    lengths: np.ndarray, length: int, packing: Packing, window: int
) -> None:
    found: list[tuple[int, int]] = []
    for row in pieces_of(pack(lengths, length=length, packing=packing, window=window)):
        found += [(d, f + i) for d, f, n in row for i in range(1, n)]
    expected = [(d, i) for d, n in enumerate(lengths.tolist()) for i in range(1, n)]
    assert sorted(found) == expected


@given(LENGTHS, st.integers(1, 12), WAYS)
def test_no_sequence_is_longer_than_asked_or_empty(
    lengths: np.ndarray, length: int, packing: Packing
) -> None:
    packed = pack(lengths, length=length, packing=packing)
    for row in pieces_of(packed):
        assert 1 < sum(n for _, _, n in row) <= length + 1 or packing == "concatenated"
        assert 0 < sum(n for _, _, n in row) <= length + 1
        assert all(n > 0 and f >= 0 and f + n <= lengths[d] for d, f, n in row)


@given(LENGTHS, st.integers(1, 12))
def test_best_fit_cuts_no_document_that_fits_a_sequence(lengths: np.ndarray, length: int) -> None:
    packed = pack(lengths, length=length, packing="best_fit")
    counts = np.bincount(packed.documents, minlength=len(lengths))
    fits = (lengths > 1) & (lengths <= length + 1)
    assert (counts[fits] == 1).all()
    assert (packed.lengths[np.isin(packed.documents, np.flatnonzero(fits))] > 1).all()


@given(LENGTHS, st.integers(1, 12))
def test_best_fit_leaves_no_two_sequences_of_a_window_that_fit_in_one(
    lengths: np.ndarray, length: int
) -> None:
    packed = pack(lengths, length=length, packing="best_fit")
    two = sorted(sum(n for _, _, n in row) for row in pieces_of(packed))[:2]
    assert len(two) < 2 or sum(two) > length + 1


@given(LENGTHS, st.integers(1, 3), st.integers(1, 8))
def test_a_sequence_has_documents_that_lie_near_one_another(
    lengths: np.ndarray, length: int, window: int
) -> None:
    packed = pack(lengths, length=length, packing="best_fit", window=window)
    reach = 0
    for row in pieces_of(packed):
        first = min(d for d, _, _ in row)
        reach = max(reach, max(int(lengths[first:d].sum()) for d, _, _ in row))
    assert reach <= 2 * WINDOW_SEQUENCES * length + 2 * 40 * window


@given(LENGTHS, st.integers(1, 12))
def test_concatenated_sequences_are_full_but_for_the_last(lengths: np.ndarray, length: int) -> None:
    rows = pieces_of(pack(lengths, length=length, packing="concatenated"))
    assert all(sum(n for _, _, n in row) == length + 1 for row in rows[:-1])


def test_no_documents_are_no_sequences() -> None:
    for lengths in ([], [0, 0]):
        for packing in ("concatenated", "best_fit"):
            packed = pack(np.array(lengths, np.int64), length=4, packing=packing)
            assert packed.num_sequences == 0


@pytest.mark.parametrize("packing", ["concatenated", "best_fit"])
@pytest.mark.parametrize("middle", [20, 500, 3000])
@pytest.mark.parametrize("length", [128, 4096])
def test_at_least_97_percent_of_the_tokens_are_real(
    packing: Packing, middle: int, length: int
) -> None:
    rng = np.random.default_rng(middle)
    lengths = np.maximum(rng.lognormal(np.log(middle), 1.2, 20000).astype(np.int64), 1)
    packed = pack(lengths, length=length, packing=packing)
    assert packed.lengths.sum() >= 0.97 * packed.num_sequences * (length + 1)
