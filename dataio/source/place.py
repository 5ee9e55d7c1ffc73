"""Where a source has a sample, for messages."""

from typing import Protocol, runtime_checkable

from dataio.source.base import Source


@runtime_checkable
class _KnowsPlaces(Protocol):
    """A source that can say where a sample is. Optional: a source need not."""

    def place_of(self, sample_id: int) -> str: ...


def place_of(source: Source, sample_id: int) -> str:
    """Name the shard or file of a sample; the source alone where it does not know."""
    return source.place_of(sample_id) if isinstance(source, _KnowsPlaces) else source.name
