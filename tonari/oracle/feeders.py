"""What feeders save of the time that a rank's batches take. Pure."""

from dataclasses import dataclass


@dataclass(frozen=True, kw_only=True)
class FedBatch:
    """A rank's batches with feeders.

    Attributes:
        batch_s: One batch, at the fastest division of its rows.
        fraction: Of the rows, what feeders make.
        bottleneck: More of which would make it shorter: ``threads``, ``feeders`` or ``link``.
    """

    batch_s: float
    fraction: float
    bottleneck: str


def fed_batch(
    rows: int, *, make_s: float, trade_s: float, threads: float, cores: float,
    sent_bytes: float = 0.0, received_bytes: float = 0.0, link_bytes_per_s: float = float("inf"),
) -> FedBatch:  # fmt: skip
    """Divide a batch's rows among a rank's threads and feeders, so that all end together.

    Args:
        rows: Of a batch.
        make_s: Of a core, for a row.
        trade_s: Of a core of the rank, to send a row and take it in.
        threads: Cores of the rank that make rows.
        cores: Of feeders, for this rank; 0: there are none.
        sent_bytes: Of a row, to a feeder.
        received_bytes: Of a row, from it.
        link_bytes_per_s: Each way, for this rank.
    """
    alone_s = make_s / threads
    # Its core receives and sends the row, too
    feeding_s = (make_s + trade_s) / cores if cores else float("inf")
    link_s = max(sent_bytes, received_bytes) / link_bytes_per_s
    slower_s = max(feeding_s, link_s)
    if trade_s >= make_s or not cores:
        return FedBatch(batch_s=rows * alone_s, fraction=0.0, bottleneck="threads")
    # All end together at this share, unless what is sent and taken in takes the threads' time
    fraction = min(alone_s / (slower_s + (make_s - trade_s) / threads), 1.0)
    own_s = ((1 - fraction) * make_s + fraction * trade_s) / threads
    row_s = max(own_s, fraction * slower_s)
    # Below 1 all are busy: more feeders would help, unless the link is as slow
    waits_for = "threads" if fraction == 1 else "feeders" if feeding_s > link_s else "link"
    return FedBatch(batch_s=rows * row_s, fraction=fraction, bottleneck=waits_for)
