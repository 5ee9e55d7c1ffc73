"""What rehearsals of a long run found, as words, tables, a JSON document and a page."""

import math
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, replace

import numpy as np

from tonari.rehearse.model import (
    BEFORE,
    CAUSES,
    DAY_S,
    FULL,
    LIMIT,
    LOST,
    MOST_DAYS,
    MOST_STARTS,
    LongRun,
    RehearsedRuns,
    simulate,
)
from tonari.report.chart import Chart, Curve
from tonari.report.pages import lay_out
from tonari.report.tables import UNKNOWN, Table
from tonari.report.units import span
from tonari.trainer.watch.page import TEMPLATE

FACTORS = (0.25, 0.5, 1.0, 2.0, 4.0)
"""Of the interval of Young and Daly, that are tried beside those asked for."""
COPIES = {1: "goes on live, one copy of each row", 2: "goes on live, two copies of each row"}
SURE = 0.95
"""Share of the rehearsals that ended in time, from which on the run is said to."""
NAMES = {
    "queue": "waiting in the queue", "start": "starting", "staging": "filling caches",
    "reload": "reading checkpoints", "checkpoint": "writing checkpoints",
    "repeated": "steps trained again", "ending": "noticing failures",
}  # fmt: skip
ENDS = {LOST: "lost nodes", LIMIT: "time limits", FULL: "full disks"}
NOTE = (
    "Nodes fail independently of one another, after times that are exponential. Another node takes "
    "the place of a lost one, with an empty disk; filling its cache takes as long as filling all. "
    "A job that goes on live has a node fewer until then."
)


@dataclass(frozen=True, kw_only=True)
class LongRehearsal:
    """A run that was rehearsed.

    Attributes:
        run: What it takes.
        found: What became of it.
        tried: The same by interval between checkpoints, its own included.
        live: The same by copies of each row, if the job goes on live when it loses a node.
        assumed: What was not given.
        seed: Of the failures.
    """

    run: LongRun
    found: RehearsedRuns
    tried: Mapping[float, RehearsedRuns]
    live: Mapping[int, RehearsedRuns]
    assumed: Sequence[str]
    seed: int

    @property
    def best_s(self) -> float:
        """Find the interval that gets ahead fastest, of those tried."""
        return max(self.tried, key=lambda each: self.tried[each].pace)

    def in_time(self, found: RehearsedRuns) -> int:
        """Count the rehearsals that ended within their days."""
        return int((found.ended_s <= self.run.days * DAY_S).sum())


def rehearse(
    run: LongRun, intervals_s: Sequence[float], assumed: Sequence[str], *, runs: int, seed: int
) -> LongRehearsal:
    """Rehearse a run, and the same with other intervals between checkpoints."""
    near = [run.young_daly_s * factor for factor in FACTORS]
    every = sorted({min(each, run.whole_s) for each in (*intervals_s, *near) if each > 0})
    tried = {each: simulate(replace(run, interval_s=each), runs=runs, seed=seed) for each in every}
    middle = int(np.argsort(tried[run.piece_s].ended_s, kind="stable")[(runs - 1) // 2])
    found = simulate(run, runs=runs, seed=seed, follow=middle)
    live = {
        copies: simulate(replace(run, copies=copies), runs=runs, seed=seed)
        for copies in COPIES if run.nodes > 1
    }  # fmt: skip
    return LongRehearsal(run=run, found=found, tried=tried, live=live, assumed=assumed, seed=seed)


def findings(made: LongRehearsal) -> list[str]:
    """Answer in sentences: whether the run ends in time, what is lost, what would be better."""
    run, found, count = made.run, made.found, len(made.found.ended_s)
    ended = made.in_time(found)
    word = "ends" if ended >= SURE * count else "may end" if ended else "does not end"
    shares = {"5 %": 0.05, "half": 0.5, "95 %": 0.95}
    known = [f"{share} by day {day}" for share, at in shares.items()
             if (day := _day(found, at)) != UNKNOWN]  # fmt: skip
    days = f"{run.days:g} day{'s' * (run.days != 1)}"
    lines = [f"The run {word} within its {days}: {ended} of {count} rehearsals did."]
    if known:
        lines.append(f"Ends: {', '.join(known)}.")
    if given_up := int(np.isinf(found.ended_s).sum()):
        lines.append(
            f"Given up were {given_up}, after {MOST_DAYS * run.days:g} days or {MOST_STARTS:,} "
            "starts."
        )
    lines.append(
        f"Goodput: {found.goodput(run):.1%} of the node hours trained steps that counted; a run "
        f"lost {_count(found.times[LOST].mean())} nodes on average."
    )
    if made.live:
        one, two = (other.goodput(run) for other in made.live.values())
        lines.append(
            f"If the job went on live when it loses a node: {one:.1%}, and with two copies of each "
            f"row {two:.1%}."
        )
    if len(made.tried) > 1:
        best = made.tried[made.best_s]
        gets = f"goodput {best.goodput(run):.1%}, {made.in_time(best)} of {count} in time"
        lines.append(
            f"Of the intervals between checkpoints that were tried, {span(made.best_s)} is the "
            f"best ({'that of the run' if made.best_s == run.piece_s else gets})"
            + (
                f"; the formula of Young and Daly gives {span(run.young_daly_s)}"
                * (run.checkpoint_s > 0)
            )
            + "."
        )
    return lines


def _day(found: RehearsedRuns, share: float) -> str:
    day = found.day(share)
    return f"{day:.{1 if day >= 10 else 2}f}" if math.isfinite(day) else UNKNOWN


def _count(mean: float) -> str:
    return f"{mean:,.0f}" if mean >= 100 else f"{mean:.3g}"


def tables(made: LongRehearsal) -> list[Table]:
    """Lay out where the time goes, what interrupts the run, and the intervals that were tried."""
    run, found = made.run, made.found
    hours = hours_by_cause(made)
    whole = sum(hours.values())
    spent = [
        (name, f"{each:,.2f}", f"{each / whole:.1%}",
         UNKNOWN if name == NAMES["queue"] else f"{each * run.nodes:,.0f}")
        for name, each in hours.items() if each
    ]  # fmt: skip
    times, cost_h = found.times.mean(axis=1), found.cost_s.mean(axis=1) / 3600
    interrupted = [
        (name, _count(times[n]), f"{cost_h[n] / times[n]:,.2f}", f"{cost_h[n]:,.2f}")
        for n, name in ENDS.items() if times[n]
    ]  # fmt: skip
    marks = {run.piece_s: "of this run", run.young_daly_s: "Young and Daly"}

    def shares(of: RehearsedRuns) -> tuple[str, ...]:
        in_time = f"{made.in_time(of) / len(of.ended_s):.0%}"
        return _day(of, 0.5), _day(of, SURE), f"{of.goodput(run):.1%}", in_time

    tried = [(span(each), *shares(of), marks.get(each, "")) for each, of in made.tried.items()]
    ways = [("starts again", *shares(found))] if made.live else []
    ways += [(COPIES[copies], *shares(of)) for copies, of in made.live.items()]
    figures = ("half by day", "95 % by day", "goodput", "in time")
    made_tables = [
        Table(("", "hours", "share", "node hours"), spent, "Where the time of a run goes (mean)"),
        Table(("", "times", "hours each", "hours"), interrupted, "What interrupts a run (mean)"),
        Table(("interval", *figures, ""), tried, "Checkpoints"),
        Table(("", *figures), ways, "When a node is lost, the job"),
    ]  # fmt: skip
    return [table for table in made_tables if table.rows]


def hours_by_cause(made: LongRehearsal) -> dict[str, float]:
    """Say what the hours of a run go into, on average; steps that counted come first."""
    run, means = made.run, made.found.spent_s.mean(axis=1) / 3600
    counted = {
        f"{name} that counted" if name == "steps" else name: means[BEFORE] * each / run.whole_s
        for name, each in run.work_s.items()
    }
    lost = {NAMES[c]: hours for c, hours in zip(CAUSES, means, strict=True) if c in NAMES}
    return {name: float(hours) for name, hours in (counted | lost).items()}


def words(made: LongRehearsal) -> list[str]:
    """Write what a terminal shows."""
    lines = findings(made)
    for table in tables(made):
        lines += ["", *table.text()]
    assumed = ", ".join(made.assumed)
    return [*lines, "", *([f"Not given, so assumed: {assumed}."] if assumed else []), NOTE]


def document(made: LongRehearsal) -> dict[str, object]:
    """Put it all into a JSON document; what is infinite is null."""
    run, found = made.run, made.found
    shares = {"p5": 0.05, "median": 0.5, "p95": SURE}

    def figures(of: RehearsedRuns) -> dict[str, object]:
        return {
            "in_time": made.in_time(of), "goodput_fraction": of.goodput(run),
            "end_days": {name: _finite(of.day(share)) for name, share in shares.items()},
        }  # fmt: skip

    times, cost_h = found.times.mean(axis=1).tolist(), (found.cost_s.mean(axis=1) / 3600).tolist()
    return {
        "run": {name: _finite(value) for name, value in asdict(run).items()},
        "assumed": list(made.assumed), "seed": made.seed, "runs": len(found.ended_s),
        **figures(found), "hours": hours_by_cause(made),
        "ends": {name: {"times": times[n], "hours": cost_h[n]} for n, name in ENDS.items()},
        "young_daly_s": run.young_daly_s, "best_s": made.best_s,
        "tried": [{"interval_s": each, **figures(of)} for each, of in made.tried.items()],
        "live": [{"copies": each, **figures(of)} for each, of in made.live.items()],
        "followed": [
            {"ended": ENDS.get(how, "done"), **dict(zip(CAUSES, spent, strict=True))}
            for spent, how in found.followed
        ],
    }  # fmt: skip


def _finite(value: object) -> object:
    return None if value == math.inf else value


def charts(made: LongRehearsal) -> list[Chart]:
    """Draw one run's progress, and the shares of the rehearsals that had ended by each day."""
    run, found = made.run, made.found
    unit, unit_s = ("day", DAY_S) if run.days >= 3 else ("hour", 3600.0)
    now, saved, progress, lost = 0.0, 0.0, [(0.0, 0.0)], []
    for spent, how in found.followed:
        kept, checkpoint, repeated, ending = spent[BEFORE:]
        now += sum(spent[:BEFORE]) / unit_s
        progress.append((now, saved / run.whole_s))
        now += (kept + checkpoint + repeated) / unit_s
        progress.append((now, (saved + kept + repeated) / run.whole_s))
        saved += kept
        lost += [now] if how == LOST else []
        now += ending / unit_s
        progress.append((now, saved / run.whole_s))
    names = {made.best_s: "the best tried", run.piece_s: "this run"}
    ended = [
        Curve(f"{name}: a checkpoint every {span(each)}", _ended(made.tried[each], unit_s))
        for each, name in reversed(names.items())
    ]
    limit = run.days * DAY_S / unit_s
    until = max(limit, *(curve.points[-1][0] for curve in ended))
    done = [Curve("share of the steps", progress)]
    return [
        Chart("One run's training that is done; marks: lost nodes", done, "share", now, lost, unit),
        Chart("Rehearsals that have ended; mark: in time", ended, "share", until, [limit], unit),
    ]


def _ended(found: RehearsedRuns, unit_s: float) -> list[tuple[float, float]]:
    """List by when which share of the rehearsals had ended."""
    ends = [each / unit_s for each in np.sort(found.ended_s).tolist() if math.isfinite(each)]
    shares = [(end, (n + 1) / len(found.ended_s)) for n, end in enumerate(ends)]
    return [(0.0, 0.0), (ends[0] if ends else 0.0, 0.0), *shares]


def page(made: LongRehearsal, command: str) -> str:
    """Lay it all out as one page; needs the `report` extra."""
    run = made.run
    return lay_out(
        TEMPLATE,
        heading="A long run, rehearsed",
        subtitle=f"{run.nodes:,} nodes, each of which fails once in {span(run.mtbf_s)}; "
        f"{len(made.found.ended_s):,} rehearsals in virtual time",
        findings=findings(made),
        charts=charts(made),
        tables=tables(made),
        facts=[("command", command), ("assumed", ", ".join(made.assumed)), ("model", NOTE)],
        settings=[(name, f"{value}") for name, value in asdict(run).items()],
    )
