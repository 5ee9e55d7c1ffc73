"""Say figures in words: the cells of a report's table."""

from collections.abc import Sequence

from tonari.ablate.controls import AgainstControl
from tonari.ablate.lines import Costs, Line, Target
from tonari.ablate.measure import ACCURACY as BY_ACCURACY
from tonari.ablate.measure import LOSS as BY_LOSS
from tonari.ablate.measure import MEASURES, Measure
from tonari.ablate.stats import Difference, Mean

NOTHING = "-"

ARM, INTERVAL = "arm", "95 % interval"
BASELINE, VERDICT, SECONDS = "compared with", "verdict", "seconds a cell"
TIME_RATIO, AGAINST_CONTROLS = "time, x baseline", "at its own cost"
COST_COLUMNS = (
    "training, s",
    "rows trained",
    "cost in rows",
    "hidden, %",
    "s to target",
)
WRONG_COLUMNS = ("of hidden, wrong, %", "of wrong, hidden, %")


def has_costs(lines: Sequence[Line]) -> bool:
    """Whether any cell says what training took."""
    return any(line.costs for line in lines)


def table_columns(lines: Sequence[Line]) -> list[str]:
    """Name the columns that these lines can fill, what is looked for first on the left."""
    by = measure_of_lines(lines)
    # Of a study that is judged by the loss, the accuracy stands beside it
    judged = [ARM, *dict.fromkeys([by.column, BY_ACCURACY.column]), by.difference, INTERVAL]
    if not has_costs(lines):
        return [*judged, BASELINE, VERDICT, SECONDS]
    columns = [*judged, VERDICT, TIME_RATIO]
    columns += [AGAINST_CONTROLS] if any(line.is_policy for line in lines) else []
    columns += [BASELINE] if len({line.baseline for line in lines}) > 1 else []
    knows_wrong = any(x.costs and x.costs.hidden_precision is not None for x in lines)
    return [*columns, *COST_COLUMNS, *(WRONG_COLUMNS if knows_wrong else ())]


def measure_of_lines(lines: Sequence[Line]) -> Measure:
    """Say what all arms of a study are judged by."""
    return lines[0].measure if lines else BY_ACCURACY


def table_row(line: Line, columns: Sequence[str]) -> list[str]:
    """Say a line in words, for the columns given."""
    words = _base_words(line) | _cost_words(line.costs)
    words[AGAINST_CONTROLS] = line.control_verdict or NOTHING
    return [words[column] for column in columns]


def _base_words(line: Line) -> dict[str, str]:
    seconds = NOTHING if line.wall_s is None else f"{line.wall_s:.0f}"
    difference = NOTHING if line.difference is None else f"{line.difference.mean:+.2f}"
    bounds = NOTHING if line.difference is None else interval(line.difference) or NOTHING
    return {
        ARM: line.arm,
        BY_ACCURACY.column: spread(line.accuracy),
        BY_LOSS.column: spread(line.test_loss, digits=4),
        **dict.fromkeys((measure.difference for measure in MEASURES), difference),
        INTERVAL: bounds,
        BASELINE: NOTHING if line.arm == line.baseline else line.baseline,
        VERDICT: line.verdict,
        SECONDS: seconds,
    }


def _cost_words(costs: Costs | None) -> dict[str, str]:
    if costs is None:
        return dict.fromkeys((TIME_RATIO, *COST_COLUMNS, *WRONG_COLUMNS), NOTHING)
    values = [
        spread(costs.train_s, digits=1),
        count(costs.rows_trained),
        count(costs.cost_rows),
        _percent(costs.hidden_fraction),
        time_to_target(costs.target),
        _percent(costs.hidden_precision),
        _percent(costs.hidden_recall),
    ]
    columns = (*COST_COLUMNS, *WRONG_COLUMNS)
    return {TIME_RATIO: ratio(costs.train_ratio)} | dict(zip(columns, values, strict=True))


def _percent(share: float | None) -> str:
    return NOTHING if share is None else f"{100 * share:.1f}"


def spread(mean: Mean | None, *, digits: int = 2) -> str:
    """Mean and standard deviation."""
    if mean is None:
        return NOTHING
    deviation = "" if mean.deviation is None else f" ± {mean.deviation:.{digits}f}"
    return f"{mean.mean:.{digits}f}{deviation}"


def interval(difference: Difference) -> str:
    """Bounds of a difference in points; nothing of one pair."""
    if difference.low is None or difference.high is None:
        return ""
    return f"[{difference.low:+.2f}, {difference.high:+.2f}]"


def points(difference: Difference) -> str:
    """A difference with its interval."""
    return f"{difference.mean:+.2f} {interval(difference)}".strip()


def ratio(found: Difference | None, *, with_interval: bool = True) -> str:
    """A ratio, and its interval where there is one."""
    if found is None:
        return NOTHING
    if not with_interval or found.low is None or found.high is None:
        return f"{found.mean:.2f}"
    return f"{found.mean:.2f} [{found.low:.2f}, {found.high:.2f}]"


def count(value: float | None) -> str:
    """A large count in few characters."""
    if value is None:
        return NOTHING
    for unit, size in (("G", 1e9), ("M", 1e6), ("k", 1e3)):
        if value >= size:
            return f"{value / size:.3g} {unit}"
    return f"{value:.0f}"


def time_to_target(target: Target | None) -> str:
    """Seconds to the target; "never" where no seed reached it, how many where not all did."""
    if target is None:
        return NOTHING
    if target.seconds is None:
        return f"never (0 of {target.num_seeds})"
    some = "" if target.num_reached == target.num_seeds else (
        f" ({target.num_reached} of {target.num_seeds})"
    )  # fmt: skip
    return f"{target.seconds:.1f}{some}"


def verdict_sentence(line: Line) -> str:
    """Say how a policy stands to the controls at its own cost, and to its baseline."""
    parts = [f"{line.arm}: {line.control_verdict}."]
    parts += [_against(one) for one in line.controls]
    if line.difference is not None:
        cost = line.costs and line.costs.train_ratio
        time = f" in {ratio(cost)} x its time" if cost else ""
        parts.append(
            f"Against {line.baseline}: {points(line.difference)} points{time} ({line.verdict})."
        )
    return " ".join(parts)


def _against(one: AgainstControl) -> str:
    if one.difference is None:
        return f"Against {one.name}: no seed has all its cells yet."
    seeds = one.difference.num_seeds
    figures = f"{points(one.difference)} points over {seeds} seed{'s' if seeds > 1 else ''}"
    said = {
        "better": f"It is above {one.name} by {figures}",
        "worse": f"{one.name.capitalize()} wins at no more cost: the policy is at {figures}",
        "undecided": f"Against {one.name} it is undecided: {figures}",
    }[one.outcome]
    return f"{said}{_outside(one)}."


def _outside(one: AgainstControl) -> str:
    n = one.difference.num_seeds if one.difference else 0
    said = []
    if one.num_cheaper:
        said.append(
            f"in {one.num_cheaper} of {n} seeds it cost less than the cheapest such run, with "
            "which it is compared"
        )
    if one.num_dearer:
        said.append(
            f"in {one.num_dearer} of {n} seeds it cost more than the dearest such run, with "
            "which it is compared"
        )
    return f" ({'; '.join(said)})" if said else ""
