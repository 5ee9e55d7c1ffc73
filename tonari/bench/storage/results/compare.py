"""Compare two runs: which figures changed for the worse, beyond a tolerance and beyond noise."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from math import isclose
from statistics import median
from typing import Literal

from msgspec.structs import asdict

from tonari.bench.storage.results.noise import ENOUGH_REPEATS, significant, worse_by_chance
from tonari.bench.storage.results.results import EndToEnd, Operation, Phase, Results

Outcome = Literal["regression", "improvement", "noise", "same", "too few repeats"]
Better = Literal["higher", "lower"]

OF_DATA = ("read", "write", "fsync", "checkpoint")
"""Operations whose time is in the bandwidth already."""
ENOUGH_OPERATIONS = 30
"""Operations in each repeat that a median needs to be compared."""
LEAST_S = 20e-6
"""An operation that takes less was answered by the client itself."""

SETTINGS = ("step_s", "batch_size", "num_samples", "exchange_fraction", "hidden_fraction")
"""Settings of the end-to-end runs with which epochs can be compared only if they are equal."""


@dataclass(frozen=True)
class Figure:
    """What is compared of a run.

    Attributes:
        name: The same in every run that measured the same.
        unit: Of the values.
        better: Its direction.
        repeats: Its values, > 0, in the order measured.
    """

    name: str
    unit: str
    better: Better
    repeats: tuple[float, ...]


@dataclass(frozen=True)
class Change:
    """A figure of two runs.

    Attributes:
        before: Median of the first run's repeats.
        after: Of the second's.
        change_fraction: (after - before) / before.
        repeats: Of the first and second run.
        by_chance: Probability that noise alone makes it as much worse; None: too few repeats.
        outcome: What that amounts to.
    """

    name: str
    unit: str
    better: Better
    before: float
    after: float
    change_fraction: float
    repeats: tuple[int, int]
    by_chance: float | None
    outcome: Outcome


@dataclass(frozen=True)
class Comparison:
    """Two runs beside each other.

    Attributes:
        changes: By figure that both have.
        differences: Why they cannot be compared, a sentence each.
        notes: What a reader should know.
    """

    changes: Sequence[Change]
    differences: Sequence[str]
    notes: Sequence[str]

    @property
    def regressions(self) -> list[Change]:
        """The figures that became worse."""
        return [change for change in self.changes if change.outcome == "regression"]

    @property
    def status(self) -> int:
        """0: no figure became worse; 1: some did; 2: not comparable."""
        return 2 if self.differences else 1 if self.regressions else 0


def compare(before: Results, after: Results, *, tolerance_fraction: float) -> Comparison:
    """Compare two runs.

    A figure is a regression if its median became worse by more than the tolerance, and noise, as
    seen in the repeats of all figures, does not explain it.

    Args:
        before: The run that was accepted.
        after: The run to judge.
        tolerance_fraction: Change that does not matter, >= 0.
    """
    first = {figure.name: figure for figure in figures_of(before)}
    second = {figure.name: figure for figure in figures_of(after)}
    pairs = [(first[name], second[name]) for name in first if name in second]
    changes = _changes(pairs, tolerance_fraction)
    differences = [
        *(f"only the first run has {name}" for name in first if name not in second),
        *(f"only the second run has {name}" for name in second if name not in first),
        *_other_settings(before.end_to_end, after.end_to_end, tolerance_fraction),
        *_other_temperatures(before, after),
    ]
    if not differences and all(change.by_chance is None for change in changes):
        differences = [f"no figure has {ENOUGH_REPEATS} repeats in both runs"]
    return Comparison(changes, differences, list(_notes(before, after)))


def figures_of(results: Results) -> list[Figure]:
    """List what is compared of a run, in its order."""
    return [figure for figure in _all_figures(results) if figure.repeats]


def _all_figures(results: Results) -> Iterator[Figure]:
    for phase in results.phases:
        yield from _figures_of_phase(phase)
    nodes = list(dict.fromkeys(node for link in results.links for node in link.nodes))
    for link in results.links:
        # By place, not by name: the next run may get other nodes.
        name = "link {} to {}".format(*(nodes.index(node) + 1 for node in link.nodes))
        yield Figure(f"{name}, bandwidth", "bytes/s", "higher", _measured(link.repeats))
        yield Figure(f"{name}, round trip", "s", "lower", _measured([link.round_trip_s]))
    for way in results.end_to_end.ways if results.end_to_end else ():
        yield Figure(f"{way.name}, first epoch", "s", "lower", _measured(way.epoch_s[:1]))
        yield Figure(f"{way.name}, later epochs", "s", "lower", _measured(way.epoch_s[1:]))
        yield Figure(f"{way.name}, staging", "s", "lower", _measured([way.staging_s]))


def _figures_of_phase(phase: Phase) -> Iterator[Figure]:
    name = phase_name(phase)
    repeats = [repeat for repeat in phase.repeats if repeat.seconds]
    if any(sum(repeat.bytes_of_client) for repeat in repeats):
        rates = _measured([repeat.bytes_per_s for repeat in repeats])
        yield Figure(f"{name}, bandwidth", "bytes/s", "higher", rates)
    seconds = sum(repeat.seconds for repeat in repeats)
    for operation in phase.operations:
        of = f"{name}, {operation.name}"
        if seconds:
            per_s = _measured([operation.count / seconds])
            yield Figure(f"{of} rate", "1/s", "higher", per_s)
        yield Figure(f"{of} p50", "s", "lower", _measured(_medians(operation)))
        yield Figure(f"{of} p99", "s", "lower", _measured([operation.p99_s]))


def _medians(operation: Operation) -> Sequence[float]:
    """List the medians of repeats, where these are worth comparing; else the one of all."""
    of_repeats = operation.p50_of_repeat_s
    many = operation.count >= ENOUGH_OPERATIONS * len(of_repeats)
    if many and operation.name not in OF_DATA and operation.p50_s >= LEAST_S:
        return of_repeats
    return [operation.p50_s]


def phase_name(phase: Phase) -> str:
    """Name a phase by all that makes it another one."""
    direct = " direct" if phase.direct else ""
    request = f" by {phase.request_bytes}" if phase.request_bytes else ""
    on = f"{phase.clients} client{'s' if phase.clients > 1 else ''} on {phase.nodes} x "
    return (
        f"{phase.pattern} {phase.tier} {phase.wanted}{direct}{request}, "
        f"{on}{phase.threads} thread{'s' if phase.threads > 1 else ''}"
    )


def _measured(values: Sequence[float]) -> tuple[float, ...]:
    return tuple(value for value in values if value > 0)


def _changes(pairs: Sequence[tuple[Figure, Figure]], tolerance_fraction: float) -> list[Change]:
    judged = [pair for pair in pairs if min(len(one.repeats) for one in pair) >= ENOUGH_REPEATS]
    # Of each, one where higher is better
    values = [[_upwards(one) for one in pair] for pair in judged]
    worse = worse_by_chance([a for a, _ in values], [b for _, b in values])
    better = worse_by_chance([b for _, b in values], [a for a, _ in values])
    judged_by_name = {
        pair[0].name: _Compared(chance, fell, rose)
        for pair, chance, fell, rose in zip(
            judged, worse, significant(worse), significant(better), strict=True
        )
    }
    return [_change(a, b, judged_by_name.get(a.name), tolerance_fraction) for a, b in pairs]


@dataclass(frozen=True)
class _Compared:
    """What the repeats of a figure show, before its tolerance is applied."""

    by_chance: float
    fell: bool
    rose: bool


def _upwards(figure: Figure) -> list[float]:
    return [one if figure.better == "higher" else 1 / one for one in figure.repeats]


def _change(a: Figure, b: Figure, seen: _Compared | None, tolerance_fraction: float) -> Change:
    before, after = median(a.repeats), median(b.repeats)
    change = after / before - 1
    outcome: Outcome = "noise"
    if seen is None:
        outcome = "too few repeats"
    elif abs(change) <= tolerance_fraction:
        outcome = "same"
    elif (change < 0) == (a.better == "higher"):
        outcome = "regression" if seen.fell else "noise"
    elif seen.rose:
        outcome = "improvement"
    return Change(
        a.name, a.unit, a.better, before, after, change, (len(a.repeats), len(b.repeats)),
        seen.by_chance if seen else None, outcome,
    )  # fmt: skip


def _other_settings(
    before: EndToEnd | None, after: EndToEnd | None, tolerance_fraction: float
) -> Iterator[str]:
    if before and after:
        first, second = asdict(before), asdict(after)
        for name in SETTINGS:
            a, b = first[name], second[name]
            # A step may have been measured.
            if not isclose(a, b, rel_tol=tolerance_fraction if name == "step_s" else 1e-9):
                yield f"{name} of the end-to-end runs is {a} and {b}"


def _other_temperatures(before: Results, after: Results) -> Iterator[str]:
    states = [
        {phase_name(phase): _states(phase) for phase in run.phases} for run in (before, after)
    ]
    for name in states[0]:
        a, b = states[0][name], states[1].get(name, set())
        if (a, b) in (({"cold"}, {"warm"}), ({"warm"}, {"cold"})):
            yield f"{name} was {min(a)} in the first run and {min(b)} in the second"


def _states(phase: Phase) -> set[str]:
    return {repeat.verdict.state for repeat in phase.repeats}


def _notes(before: Results, after: Results) -> Iterator[str]:
    for where, a, b in (
        ("DIR", before.site, after.site),
        ("the node's directory", before.local, after.local),
    ):
        if a.name != b.name:
            yield f"{where} lies on {a.name} in the first run and on {b.name} in the second"
    for which, run in (("first", before), ("second", after)):
        if not run.complete:
            yield f"the {which} run is not complete: {'; '.join(run.problems) or 'no reason given'}"
