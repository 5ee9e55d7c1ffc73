"""Documents of packed text that are left out: found in the sequences, and masked in each batch.

The other documents of a sequence are trained as before; a sequence without a target left is left
out whole. An `Exclusion` numbers documents behind the samples, so that its name tells lists apart.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from dataio.plan.exclusion import Exclusion, exclude_ids
from dataio.rows.fields import Field
from dataio.rows.samples import Batch, BatchTransform
from dataio.source import Source, TransformedSource
from dataio.source.formats.megatron import DOCUMENT
from dataio.source.wrap.packed import SequenceSource
from dataio.world import World
from dataio.world.agree import agree


class MaskedPieces(NamedTuple):
    """Where documents lie.

    Attributes:
        sample_id: int64[n]: Sequences, ascending.
        number: int64[n]: What the column ``document`` says of the piece there.
        is_last: bool[n]: Whether no target is left in that sequence without them all.
    """

    sample_id: NDArray[np.int64]
    number: NDArray[np.int64]
    is_last: NDArray[np.bool_]


def exclude_documents(
    documents: NDArray[np.int64], ids: Sequence[NDArray[np.integer]], source: Source, world: World
) -> Exclusion:
    """Leave out documents, by their numbers, and samples, by their ids. Collective.

    Raises:
        ValueError: If the source has no documents, or not these, or no such samples.
    """
    if not isinstance(source, SequenceSource):
        raise ValueError(
            f"exclude: the list has the column document, and {source.name} has no documents that "
            "are numbered, expected packed text; give a column sample_id or key"
        )
    num_documents, num_samples = int(source.first_documents[-1]), source.num_samples
    if documents.min() < 0 or documents.max() >= num_documents:
        wrong = documents[(documents < 0) | (documents >= num_documents)]
        raise ValueError(
            f"exclude: found document {wrong[0]}, expected numbers in [0, {num_documents}), as "
            f"{source.name} has {num_documents} documents; give a list that was made of this source"
        )
    exclude_ids(ids, num_samples)  # refuses what would be taken for documents
    found = find_pieces(documents, source, world)
    every = [*ids, found.sample_id[found.is_last], num_samples + documents]
    return exclude_ids(every, num_samples + num_documents).of(num_samples)


def find_pieces(documents: NDArray[np.int64], source: SequenceSource, world: World) -> MaskedPieces:
    """Find where documents lie in sequences. Collective: rank 0 reads the index of their shards."""

    def look() -> bytes:
        parts = [np.empty((0, 3), np.int64)]
        for number in [] if world.rank else range(len(source.shards)):
            first, stop = source.first_documents[number : number + 2]
            mine = documents[(documents >= first) & (documents < stop)] - first
            if not len(mine):
                continue
            pieces = source.pieces(number)
            counts = np.diff(pieces.starts)
            row = np.repeat(np.arange(len(counts)), counts)
            gone = np.isin(pieces.documents, mine)
            left = np.bincount(row, np.where(gone, 0, pieces.lengths - 1), len(counts))
            number_in_row = np.arange(len(row)) - pieces.starts[row] + 1
            columns = (row + source.shards[number].first, number_in_row, left[row] == 0)
            parts.append(np.stack(columns, axis=1)[gone])
        return np.concatenate(parts).astype("<i8").tobytes()

    data = agree(world, look, doing="find the documents to leave out")[0]
    rows = np.frombuffer(data, "<i8").reshape(-1, 3)
    return MaskedPieces(rows[:, 0], rows[:, 1], rows[:, 2] > 0)


@dataclass(frozen=True)
class DocumentMask:
    """Makes the tokens of some documents padding, which no token sees and no loss counts.

    Attributes:
        pieces: Where they lie.
        column: Of a batch, which numbers documents.
        then: Changes the batch afterwards; None: nothing does.
    """

    pieces: MaskedPieces
    column: str
    then: BatchTransform | None

    def __call__(self, batch: Batch, rng: np.random.Generator) -> Batch:
        """Mask a batch in place."""
        documents, ids = batch[self.column].numpy(), batch["sample_id"].numpy()
        begin = np.searchsorted(self.pieces.sample_id, ids, "left")
        end = np.searchsorted(self.pieces.sample_id, ids, "right")
        for row in np.flatnonzero(end > begin).tolist():
            gone = np.isin(documents[row], self.pieces.number[begin[row] : end[row]])
            documents[row, gone] = 0
        return batch if self.then is None else self.then(batch, rng)


def mask_documents(
    then: BatchTransform | None, fields: Mapping[str, Field], source: Source, exclusion: Exclusion,
    world: World,
) -> BatchTransform | None:  # fmt: skip
    """Make what takes left-out documents out of batches. Collective if there are some.

    Args:
        then: What changes batches anyway; a mask of other documents gives way.
        fields: Of a batch.
        source: The dataset.
        exclusion: What is left out.
        world: All ranks.

    Raises:
        ValueError: If the batch has no column that numbers documents.
    """
    then = then.then if isinstance(then, DocumentMask) else then
    source = source.inner if isinstance(source, TransformedSource) else source
    documents = exclusion.beyond()
    if not len(documents) or not isinstance(source, SequenceSource):
        return then
    column = next((name for name, field in fields.items() if field.key == DOCUMENT), None)
    if column is None:
        raise ValueError(
            f"exclude: names documents, and the fields are {', '.join(fields)}, expected one of "
            f"the key {DOCUMENT!r}, by which their tokens are masked; give fields=sequences.fields("
            "...), or leave out whole samples"
        )
    return DocumentMask(find_pieces(documents, source, world), column, then)
