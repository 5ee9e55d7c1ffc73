"""`tonari plan` of several probes of one job: which settings are the fastest."""

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from oracle.search.words import why_slower
from tonari.errors import CommandError
from tonari.plan.table import lay_table
from tonari.sizes import format_bytes

if TYPE_CHECKING:
    from oracle.cluster.cluster import Cluster
    from oracle.plan import StepPlan
    from oracle.probe.probe import Probe
    from trainer.config.config import Config


@dataclass(frozen=True)
class Choice:
    """Settings that were probed, and what they take.

    Attributes:
        overrides: Those that not all choices have in common, as `tonari train` takes them.
        config: All of them.
        probe: Of their ranks.
        plan: What they take.
    """

    overrides: tuple[str, ...]
    config: "Config"
    probe: "Probe"
    plan: "StepPlan"


def plan_choices(
    settings: Path, probes: Path, overrides: Sequence[str], *, cluster: "Cluster | None",
    hidden_fraction: float,
) -> list[Choice]:  # fmt: skip
    """Plan one probe or all of a directory, the fastest first.

    Args:
        settings: Their file.
        probes: A file or a directory.
        overrides: Beside those that each was probed with.
        cluster: As of `oracle.plan.plan_step`.
        hidden_fraction: Likewise.

    Raises:
        CommandError, ConfigError, OracleError: As reading and planning each do.
    """
    from oracle.plan import plan_step
    from oracle.probe.probe import load_probe
    from trainer.config.config import load_config

    found = [load_probe(path) for path in find_probes(probes)]
    choices = []
    for own, each in zip(own_overrides(found), found, strict=True):
        config = load_config(settings, [*each.overrides, *overrides])
        plan = plan_step(config, each, cluster=cluster, hidden_fraction=hidden_fraction)
        choices.append(Choice(own, config, each, plan))
    return sorted(choices, key=lambda choice: -choice.plan.samples_per_s)


def find_probes(path: Path) -> list[Path]:
    """List the probes of a directory, or the one that was given.

    Raises:
        CommandError: If the directory has none.
    """
    if not path.is_dir():
        return [path]
    found = sorted(path.glob("*.json"))
    if not found:
        raise CommandError(
            f"--probe {path}: found no *.json there, expected probes; make them with "
            "tonari probe --try ... --out DIRECTORY"
        )
    return found


def own_overrides(probes: Sequence["Probe"]) -> list[tuple[str, ...]]:
    """List, for each probe, the settings that not all were made with."""
    common = set(probes[0].overrides).intersection(*(each.overrides for each in probes))
    return [tuple(word for word in each.overrides if word not in common) for each in probes]


def choice_words(choices: Sequence[Choice]) -> list[str]:
    """Describe plans in lines, in their order.

    Args:
        choices: At least one, the fastest first.
    """
    best = choices[0].plan
    rows = [_row(number, each.plan, best) for number, each in enumerate(choices, 1)]
    lines = [*lay_table(HEAD, rows), ""]
    for number, each in enumerate(choices, 1):
        why = why_slower(_of_a_sample(each.plan, best), best.parts_s) if number > 1 else ""
        lines += [f"{number}. {why}".rstrip(), f"  {' '.join(each.overrides) or 'as in the file'}"]
    return lines


HEAD = ("", "samples/s", "over the first", "step", "range", "computing", "waiting", "memory")


def _row(number: int, plan: "StepPlan", best: "StepPlan") -> list[str]:
    computing = plan.parts_s.get("compute", 0.0) / plan.step_s
    return [
        str(number), f"{plan.samples_per_s:,.1f}",
        f"{best.samples_per_s / plan.samples_per_s - 1:+.1%}", f"{plan.step_s:.3f} s",
        f"{plan.low_s:.3f} to {plan.high_s:.3f} s", f"{computing:.0%}", f"{1 - computing:.0%}",
        format_bytes(max(plan.peak_bytes)) if plan.peak_bytes else "not known",
    ]  # fmt: skip


def _of_a_sample(plan: "StepPlan", best: "StepPlan") -> dict[str, float]:
    """Split the time for as many samples as a step of the best one has."""
    scale = best.samples_per_s * best.step_s / (plan.samples_per_s * plan.step_s)
    return {name: seconds * scale for name, seconds in plan.parts_s.items()}
