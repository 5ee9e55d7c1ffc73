"""What is to be measured of a filesystem."""

from collections.abc import Sequence
from dataclasses import dataclass

from tonari.bench.storage.patterns.files import LEAST_BYTES
from tonari.bench.storage.patterns.patterns import READS
from tonari.bench.storage.results.results import Temperature

PATTERNS = (*READS, "checkpoint_burst")
"""Those that one may choose from; two more have flags of their own."""


@dataclass(frozen=True, kw_only=True)
class StorageOptions:
    """What is to be measured.

    Attributes:
        size_bytes: Written by each rank, in each directory; None: 64 MiB, 1 GiB in all at most.
        sample_bytes: Of a sample, which is a file or a record of a shard; a multiple of 4096.
        patterns: By name, some of `PATTERNS`.
        threads: Of each client, one phase for each number.
        clients: Ranks that take part, one phase for each number; none: 1, 2, 4, ... all.
        repeats: Of each phase.
        time_limit_s: After which nothing new is begun.
        metadata_storm: Whether to burden the metadata server as a job's start does.
        direct: Whether cold phases read with O_DIRECT where the filesystem takes it.
        temperatures: To try, each in phases of its own.
        dataset: Patterns of the user's own files, read beside the benchmark's own.
        seed: Of contents and orders.
    """

    size_bytes: int | None = None
    sample_bytes: int = 128 << 10
    patterns: Sequence[str] = PATTERNS
    threads: Sequence[int] = (1, 4)
    clients: Sequence[int] = ()
    repeats: int = 3
    time_limit_s: float = 300.0
    metadata_storm: bool = False
    direct: bool = False
    temperatures: Sequence[Temperature] = ("cold", "warm")
    dataset: Sequence[str] | None = None
    seed: int = 0

    def __post_init__(self) -> None:
        if unknown := sorted(set(self.patterns) - set(PATTERNS)):
            raise ValueError(f"pattern {unknown[0]!r}: expected some of {', '.join(PATTERNS)}")
        if min(self.threads, default=0) < 1 or min(self.clients, default=1) < 1:
            raise ValueError("threads and clients must be numbers >= 1")
        if self.repeats < 1 or not self.time_limit_s > 0:
            raise ValueError("repeats must be >= 1, and the time limit > 0 seconds")
        if self.sample_bytes < LEAST_BYTES or self.sample_bytes % LEAST_BYTES:
            raise ValueError(
                f"samples of {self.sample_bytes} bytes: must be a multiple of {LEAST_BYTES}"
            )

    def client_counts(self, world_size: int) -> list[int]:
        """Choose the numbers of clients to measure, ascending."""
        if self.clients:
            return sorted(set(self.clients))
        return sorted({*(2**power for power in range(world_size.bit_length())), world_size})
