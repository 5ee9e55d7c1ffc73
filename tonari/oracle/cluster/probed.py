"""A machine whose links a probe of several nodes timed, in place of one from a file. Pure."""

import math
from collections.abc import Sequence

from tonari.oracle.cluster.cluster import Cluster, Level
from tonari.oracle.errors import OracleError
from tonari.oracle.probe.messages import MessageTimes
from tonari.oracle.probe.probe import Probe


class ProbedCluster(Cluster, frozen=True, kw_only=True):
    """Nodes that are joined as those of a probe.

    Attributes:
        messages: Between nodes, as they were timed.
    """

    messages: tuple[MessageTimes, ...]


def cluster_of(found: Probe, given: Cluster | Probe | None) -> Cluster | None:
    """Find the machine of a job.

    Args:
        found: Of the job.
        given: A machine, or a probe of several nodes whose links the job's nodes are joined by;
            None: the nodes that ``found`` was started on.

    Returns:
        None: the one node that was probed.

    Raises:
        OracleError: If the probe that was given is of one node.
    """
    if isinstance(given, Cluster):
        return given
    if given is None and found.nodes == 1:
        return None
    network = found if given is None else given
    if network.nodes == 1:
        raise OracleError(
            "--cluster is a probe of one node, which timed no messages between nodes; start "
            "tonari probe on two nodes at least, or give a machine's file"
        )
    between = network.between
    gbyte_s, latency_us = measure_link(between)
    units = max(-(-found.world_size // found.ranks), network.nodes)
    return ProbedCluster(
        name=f"{network.nodes} probed nodes",
        level=(
            Level(name="node", units=found.ranks),
            # Nodes beyond those that were probed are taken to be joined alike
            Level(name="network", units=units, gbyte_s=gbyte_s, latency_us=latency_us),
        ),
        messages=between,
    )


def measure_link(messages: Sequence[MessageTimes]) -> tuple[float, float]:
    """Find what a node's link carries each way, in 1e9 bytes/s, and what it waits, in us.

    By the sends of one rank and of all of a node, the faster of them: one alone may not fill a
    link. What a message of the largest size takes more than one of the size before it is the rate,
    as what buffers hold passes at once. What a message waits is that of a send, or of a round of an
    all-reduce, if it is less: a thread that slept has to wake once, not in each round.

    Args:
        messages: Between nodes.
    """
    rates, latencies_us = [], []
    for each in messages:
        if each.kind == "all_reduce":
            latencies_us.append(each.seconds[0] * 1e6 / (2 * math.ceil(math.log2(each.ranks))))
        if each.kind == "send":
            at, seconds = (0, *each.num_bytes[-2:]), (0.0, *each.seconds[-2:])
            more_bytes, more_s = at[-1] - at[-2], seconds[-1] - seconds[-2]
            if more_s <= 0:  # noise
                more_bytes, more_s = at[-1], seconds[-1]
            rates.append(each.ranks // 2 * more_bytes / more_s / 1e9)
            latencies_us.append(each.seconds[0] * 1e6)
    return max(rates), min(latencies_us)
