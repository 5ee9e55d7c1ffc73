"""What a way cost, held against null storage, the DataLoader and what was predicted. Pure."""

import statistics
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from msgspec.structs import replace

from tonari.bench.storage.results.results import TrainingWay
from tonari.bench.storage.site.counters import Moved
from tonari.bench.storage.site.evidence import BLOCK_BACKED, CacheVerdict
from tonari.bench.storage.site.site import Site
from tonari.bench.storage.training.predict import Predicted, WayName, paid_after


@dataclass(frozen=True, kw_only=True)
class Ran:
    """One way's epochs, as all ranks agree on them, and the bytes."""

    staging_s: float
    epoch_s: list[float]
    samples: list[int]
    moved: Mapping[str, int | None]
    staging_bytes: int | None
    verdicts: Sequence[CacheVerdict] = ()


def make_way(
    name: WayName, ran: Ran, all_ran: Mapping[WayName, Ran], predicted: Predicted
) -> TrainingWay:
    """Hold one way against null storage, the DataLoader and its prediction. Pure."""
    null, shared = all_ran["null"], all_ran.get("dataloader")
    later = later_s(ran.epoch_s)
    said_s = statistics.median(predicted.epoch_s[1 : len(ran.epoch_s)]) if predicted.epoch_s else 0
    paid = None
    if shared is not None and name not in ("null", "dataloader"):
        paid = paid_after(
            ran.staging_s, ran.epoch_s, shared.epoch_s, later=later,
            other_later=later_s(shared.epoch_s),
        )  # fmt: skip
    null_sample_s = sum(null.epoch_s[1:]) / sum(null.samples[1:])
    # Null storage was there before anything was predicted, and fetched nothing that counts.
    is_real = name != "null"
    is_said = bool(predicted.epoch_s) and is_real
    return TrainingWay(
        name=name, staging_s=ran.staging_s if is_real else 0.0, epoch_s=ran.epoch_s,
        samples_of_epoch=ran.samples,
        utilisation_fraction=null_sample_s * sum(ran.samples[1:]) / sum(ran.epoch_s[1:]),
        moved_bytes=ran.moved if is_real else {},
        staging_bytes=ran.staging_bytes if is_real else None,
        predicted_staging_s=predicted.staging_s if is_real else None,
        predicted_epoch_s=said_s if is_said else None,
        prediction_error_fraction=(later - said_s) / later if is_said else None,
        paid_after=paid,
        predicted_paid_after=predicted.paid_after,
        verdict_of_epoch=ran.verdicts,
    )  # fmt: skip


def shared_bytes(moved: Moved, site: Site) -> int | None:
    """Find how many bytes came from a filesystem, by a counter that sees them; None without one."""
    if moved.client_read_bytes is not None:
        return moved.client_read_bytes
    if site.name in BLOCK_BACKED:
        return moved.process_read_bytes
    if site.is_shared and site.mount.server is not None:
        links = [moved.network_received_bytes, moved.rdma_received_bytes]
        known = [link for link in links if link is not None]
        return sum(known) if known else None
    return None


def add_read(moved: Moved, read_bytes: int) -> Moved:
    """Count what a process's workers fetched from block devices as its own."""
    own = moved.process_read_bytes
    return replace(moved, process_read_bytes=None if own is None else own + read_bytes)


def later_s(epoch_s: Sequence[float]) -> float:
    """Take the median of all epochs but the first."""
    return statistics.median(epoch_s[1:])
