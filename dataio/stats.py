"""The figures that `Loader.stats` returns.

Times are in seconds, sizes in bytes. All are of this rank since construction, but for those that
say otherwise.

Batches:
    ``wait_s`` blocked on batches and its percentiles ``wait_p50_s``, ``wait_p95_s``,
    ``wait_p99_s``; the same by what was waited for, such as ``wait_decode_s`` and
    ``wait_decode_p95_s``, for the causes that there were: ``source``, ``disk``, ``decode``,
    ``copy``, ``transform``, ``processes``, ``feeder``; ``queue_depth`` batches ready now;
    ``skipped_rows`` that became padding by ``on_error``.
With feeders:
    ``feeder_cores`` connected now; ``feeder_rows`` that they made, ``feeder_sent_bytes`` to them,
    ``feeder_received_bytes`` from them; ``feeder_lost_parts`` of batches that one had as it was
    lost, and that were made here.
Ends of epochs:
    ``epoch_end_s`` between epochs, ``exchange_blocked_s`` of it waiting for partners,
    ``exchange_cpu_s`` of a core, ``exchange_overlap_fraction`` of the last epoch's arrivals in
    before; ``exchanged_rows`` sent; ``lost_reports`` of rows that had left this node.
Bytes by where they came from:
    ``source_bytes`` (indexes and the counting of samples included), ``disk_bytes`` (read by this
    process, as the kernel counts), ``page_cache_bytes`` (the rest of the batches), ``peer_bytes``;
    ``disk_bytes_written`` to the node's cache.
Staging:
    ``staging_s`` reading the source, and ``staging_bytes`` of ``source_bytes`` and ``staged_rows``
    read meanwhile; ``pulled_rows`` that came from other nodes because a cache was lost, older or
    laid out otherwise, or as copies.
With a quota:
    ``resident_fraction`` of this node's rows that stay, ``streamed_rows`` and ``streamed_bytes``
    read from the source because they do not, ``streamed_s`` that the source took for them beside
    training, ``window_wait_s`` (part of ``wait_s``) blocked on them.
Of the last epoch over all ranks:
    ``straggler_rank``, who waited longest, ``wait_max_s`` and ``wait_mean_s``.
Of importance in this epoch:
    ``hidden_fraction`` of this node's rows, ``excluded_fraction`` of them left out for good,
    ``padded_fraction`` of all replicas' batches, and the policy's own, such as Kakurenbo's
    ``hidden_cap`` and ``moved_back``; where it goes by cost, what was measured before the epoch:
    ``source_s_per_mb``, ``batch_s_per_mb``, ``step_s_per_row``.
"""

from collections.abc import Mapping

from dataio.batch.figures import Figures
from dataio.batch.gather import Gather
from dataio.plan.epoch import EpochPlan
from dataio.state.report import Feedback
from dataio.store.pool import Pool

SPREAD = ("straggler_rank", "wait_max_s", "wait_mean_s")
"""What is reported of the last epoch over all ranks."""


def collect_stats(
    pool: Pool,
    gather: Gather,
    feedback: Feedback,
    figures: Figures,
    *,
    epoch: int,
    step: int,
    plan: EpochPlan | None,
    last_epoch: Mapping[str, float],
) -> dict[str, float]:
    """Collect a loader's figures from its parts.

    Args:
        pool: Its rows.
        gather: Makes its batches.
        feedback: Takes its reports.
        figures: What it measures.
        epoch: The running epoch.
        step: Batches of it delivered.
        plan: Of the running epoch; None while none runs.
        last_epoch: The line of the last epoch that ended; see `figures.summarise`.
    """
    hidden = len(plan.selection.hidden) if plan is not None else 0
    excluded = plan.num_excluded if plan is not None else 0
    return {
        **figures.to_stats(cache_bytes=gather.num_bytes, pulled_bytes=pool.pulled_bytes),
        **{name: last_epoch[name] for name in SPREAD if last_epoch},
        "epoch": epoch,
        "step": step,
        "hidden_fraction": hidden / pool.num_slots,
        "excluded_fraction": excluded / pool.num_slots,
        "padded_fraction": plan.padded_fraction if plan is not None else 0.0,
        **(plan.selection.figures if plan is not None else {}),
        "disk_bytes_written": pool.cache.log.tables.bytes_written,
        "staging_s": pool.staging_s,
        "staging_bytes": pool.staging_bytes,
        "staged_rows": pool.staged_rows,
        "pulled_rows": pool.pulled_rows,
        "source_bytes": pool.source.bytes_read,
        "resident_fraction": pool.resident_fraction,
        "streamed_rows": pool.streamed.rows,
        "streamed_bytes": pool.streamed.bytes,
        "streamed_s": pool.streamed.read_s,
        "window_wait_s": pool.streamed.wait_s,
        "queue_depth": gather.ready,
        "skipped_rows": gather.num_skipped,
        **(gather.feeders.figures if gather.feeders is not None else {}),
        "lost_reports": feedback.num_lost,
    }
