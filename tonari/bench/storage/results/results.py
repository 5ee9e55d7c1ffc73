"""What `tonari bench io` found: the one shape that is measured, reported, compared and drawn.

Seconds are ``*_s``, sizes ``*_bytes``, shares of one ``*_fraction``. A figure that was not measured
is None: nothing here is derived from another figure, except where its name has ``predicted``.
"""

from collections.abc import Mapping, Sequence
from typing import Any, Literal

from tonari.bench.storage.site.counters import Moved
from tonari.bench.storage.site.evidence import CacheVerdict
from tonari.bench.storage.site.record import JsonRecord, Natural, NonNegative
from tonari.bench.storage.site.site import Site

SCHEMA_VERSION = 1

Tier = Literal["shared", "local"]
Temperature = Literal["cold", "warm"]


class Operation(JsonRecord, frozen=True, kw_only=True):
    """How long one kind of operation took, over all clients and repeats of a phase.

    Attributes:
        name: ``"open"``, ``"stat"``, ``"read"``, ``"close"``, ``"write"``, ``"fsync"``, ...
        count: Operations.
        p50_s: Half of them took at most this long.
        p999_s: All but one in a thousand did.
        max_s: The longest.
        p50_of_repeat_s: Of each repeat that had any, in their order.
        edges_s: float[bins + 1]: Of the histogram, evenly spaced in their logarithm.
        counts: int[bins].
    """

    name: str
    count: Natural
    mean_s: NonNegative
    p50_s: NonNegative
    p90_s: NonNegative
    p99_s: NonNegative
    p999_s: NonNegative
    max_s: NonNegative
    p50_of_repeat_s: Sequence[float]
    edges_s: Sequence[float]
    counts: Sequence[int]


class Repeat(JsonRecord, frozen=True, kw_only=True):
    """One run of a phase.

    Attributes:
        seconds: From the common start to the end of the last client.
        bytes_of_client: Bytes of each client.
        seconds_of_client: Seconds of each client.
        verdict: Whether it was cold or warm on all nodes together.
        verdict_of_node: The same for each node, by host name.
        moved: Counters, summed over nodes; None where a node lacks the counter.
    """

    seconds: NonNegative
    bytes_of_client: Sequence[int]
    seconds_of_client: Sequence[float]
    verdict: CacheVerdict
    verdict_of_node: Mapping[str, CacheVerdict]
    moved: Moved

    @property
    def bytes_per_s(self) -> float:
        """Of all clients together."""
        return sum(self.bytes_of_client) / self.seconds


class Phase(JsonRecord, frozen=True, kw_only=True):
    """One pattern at one number of clients and threads.

    Attributes:
        pattern: ``"file_per_sample"``, ``"sequential_shard"``, ``"random_record"``, ...
        tier: Directory that was measured: DIR, or the node's own.
        clients: Ranks that took part.
        nodes: Nodes that they were on.
        threads: Threads of each client.
        wanted: State of the client's cache that was aimed at.
        request_bytes: Size of one read or write; 0 where there is none.
        direct: Whether files were read with O_DIRECT.
        repeats: Runs of the phase, in their order.
        operations: Operations by kind, over all repeats.
        notes: What a reader has to know, such as why it ended early.
    """

    pattern: str
    tier: Tier
    clients: Natural
    nodes: Natural
    threads: Natural
    wanted: Temperature
    request_bytes: Natural
    direct: bool
    repeats: Sequence[Repeat]
    operations: Sequence[Operation]
    notes: Sequence[str] = ()


class Scaling(JsonRecord, frozen=True, kw_only=True):
    """How one pattern grows with clients x threads: its phases, and a curve through them.

    Attributes:
        pattern: As of the phases.
        wanted: As of the phases.
        readers: int[points]: Clients x threads, ascending.
        bytes_per_s: Medians over repeats, by point.
        fairness: Jain's index over clients, in (0, 1], by point.
        knee: The fewest readers that reach 90 % of the largest bandwidth.
        fitted_most_bytes_per_s: What the curve n -> most x n / (n + half) tends to; None: no fit.
        fitted_half: Readers that reach half of it.
        fit_error_fraction: Root mean square of the relative errors at the points.
    """

    pattern: str
    wanted: Temperature
    readers: Sequence[int]
    bytes_per_s: Sequence[float]
    fairness: Sequence[float]
    knee: int
    fitted_most_bytes_per_s: NonNegative | None
    fitted_half: float | None
    fit_error_fraction: float | None


class MeasuredLink(JsonRecord, frozen=True, kw_only=True):
    """Between two nodes, one rank of each, all pairs of a round at a time.

    Attributes:
        nodes: Host names.
        bytes_per_s: Each way, both ways at once: median over repeats.
        round_trip_s: Of an empty message: median.
        repeats: Bandwidths.
    """

    nodes: tuple[str, str]
    bytes_per_s: NonNegative
    round_trip_s: NonNegative
    repeats: Sequence[float]


class TrainingWay(JsonRecord, frozen=True, kw_only=True):
    """One way to feed training, over some epochs.

    Attributes:
        name: ``"null"``, ``"dataloader"``, ``"staged"``, ``"exchange"`` (staged, too), or
            ``"hiding"`` (staged and exchanged, too).
        staging_s: Before the first step; 0 where nothing is staged.
        epoch_s: By epoch, compute included.
        samples_of_epoch: Trained, by epoch, over all ranks.
        utilisation_fraction: Null storage's time for as many samples over this way's, after the
            first epoch.
        moved_bytes: By ``"shared"``, ``"network"``, ``"local"``: over all nodes and epochs, staging
            apart; None where no counter saw it.
        staging_bytes: Read from DIR for it.
        predicted_staging_s: Predicted before it was run.
        predicted_epoch_s: Time of a later epoch, predicted before it was run.
        prediction_error_fraction: Of later epochs' median: (measured - predicted) / measured.
        paid_after: Epochs after which, with staging, less time has passed than with the
            DataLoader; epochs beyond those measured count as the median of the later ones. None:
            never, or there is nothing to compare.
        predicted_paid_after: The same, predicted before it was run.
        verdict_of_epoch: Of the client's cache, by epoch, of the DataLoader; else empty.
    """

    name: Literal["null", "dataloader", "staged", "exchange", "hiding"]
    staging_s: NonNegative
    epoch_s: Sequence[float]
    samples_of_epoch: Sequence[int]
    utilisation_fraction: float | None
    moved_bytes: Mapping[str, int | None]
    staging_bytes: Natural | None
    predicted_staging_s: NonNegative | None = None
    predicted_epoch_s: NonNegative | None = None
    prediction_error_fraction: float | None = None
    paid_after: int | None = None
    predicted_paid_after: int | None = None
    verdict_of_epoch: Sequence[CacheVerdict] = ()


class EndToEnd(JsonRecord, frozen=True, kw_only=True):
    """Training with an emulated step.

    Attributes:
        step_s: Seconds of compute in a step.
        step_from: ``"given"`` or the script that it was measured from.
        batch_size: Samples a step of each rank.
        num_samples: Samples of the dataset.
        sample_bytes: Stored size of a sample, on average.
        exchange_fraction: Part of a rank's rows that an epoch exchanges.
        hidden_fraction: Part of the rows that an epoch hides.
        ways: Results of each way, null storage first.
    """

    step_s: NonNegative
    step_from: str
    batch_size: int
    num_samples: int
    sample_bytes: NonNegative
    exchange_fraction: float
    hidden_fraction: float
    ways: Sequence[TrainingWay]


class Results(JsonRecord, frozen=True, kw_only=True):
    """Everything of one run.

    Attributes:
        environment: `describe_machine` of rank 0, and of the job: ranks, nodes, host names,
            launcher, the command's options.
        site: Where DIR lies.
        local: Where the node's own directory lies.
        complete: Whether everything was measured; not so if time ran out, for example.
        problems: What could not be measured, and why.
    """

    environment: Mapping[str, Any]
    site: Site
    local: Site
    phases: Sequence[Phase] = ()
    scalings: Sequence[Scaling] = ()
    links: Sequence[MeasuredLink] = ()
    end_to_end: EndToEnd | None = None
    complete: bool = True
    problems: Sequence[str] = ()
