"""A step by simple equations, beside the parts of the simulated one."""

from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass

from tonari.oracle.cluster.cluster import Cluster
from tonari.oracle.cluster.probed import cluster_of
from tonari.oracle.paradl import Link, Terms, link_across, name_of, price, probed_link
from tonari.oracle.probe.probe import Probe
from tonari.oracle.programs import first_like
from tonari.oracle.simulate import Simulation
from tonari.oracle.traffic import axes_of
from tonari.trainer.config.config import Config
from tonari.trainer.run.build import lay_out


@dataclass(frozen=True, kw_only=True)
class Explanation:
    """Why a step takes what it takes.

    Attributes:
        pp_rank: Coordinate of pp whose ranks the equations give the longest step; of tiles, those
            of one.
        stages: Ranks along pp.
        microbatches: Parts of a batch.
        terms: By the equations.
        simulated_s: Of these ranks' mean step: computing, waiting for data, and for each of the
            terms' messages by its name, the wait for the ranks that came later included.
    """

    pp_rank: int
    stages: int
    microbatches: int
    terms: Terms
    simulated_s: dict[str, float]


def explain(
    config: Config, found: Probe, simulation: Simulation, *,
    cluster: Cluster | Probe | None = None,
) -> Explanation:  # fmt: skip
    """Price a step by ParaDL's equations, from what a probe timed and a machine's links.

    Args:
        config: The settings of the probe.
        found: Of as many ranks as the job has on a node.
        simulation: Of the job, as `tonari.oracle.plan.plan_step` makes it.
        cluster: As of `tonari.oracle.plan.plan_step`.

    Raises:
        OracleError: If the probe timed no sends on a node of several ranks.
    """
    layout = lay_out(config, found.world_size)
    inside = probed_link(found.inside) if found.ranks > 1 else None
    machine = cluster_of(found, cluster)

    def link_of(ranks: tuple[int, ...]) -> Link:
        if machine is not None:
            return link_across(machine, ranks, inside=inside)
        assert inside is not None, "a group of several ranks on a node that has one"
        return inside

    of_stages = [
        price(
            timed.events, computation_s=timed.computing_s, sizes=layout.sizes,
            microbatches=layout.microbatches, link_of=link_of,
        ) for timed in found.steps
    ]  # fmt: skip
    slowest = max(range(len(of_stages)), key=lambda number: of_stages[number].step_s)
    firsts = [timed.rank for timed in found.steps]
    ranks = [
        rank for rank in range(found.world_size)
        if first_like(rank, firsts, found.world_size, layout.sizes) == firsts[slowest]
    ]  # fmt: skip
    return Explanation(
        pp_rank=firsts[slowest] * layout.sizes[0] // found.world_size,
        stages=layout.sizes[0],
        microbatches=layout.microbatches,
        terms=of_stages[slowest],
        simulated_s=_simulated_s(simulation, ranks, layout.sizes),
    )


def _simulated_s(
    simulation: Simulation, ranks: Sequence[int], sizes: Sequence[int]
) -> dict[str, float]:
    spans_s: defaultdict[tuple[str, tuple[int, ...]], float] = defaultdict(float)
    for span in simulation.spans:
        if span.rank in ranks:
            spans_s[span.name, span.ranks] += span.end_s - span.start_s
    parts: defaultdict[str, float] = defaultdict(float)
    for (kind, group), seconds in spans_s.items():
        name = name_of(axes_of(group, sizes), kind) if group else kind
        parts[name] += seconds / len(ranks) / len(simulation.step_ends_s)
    return dict(parts)
