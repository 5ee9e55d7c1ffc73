"""`tonari plan` of several probes of one job: which settings are the fastest."""

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from tonari.errors import CommandError
from tonari.oracle.search.words import why_slower
from tonari.report.tables import Table
from tonari.sizes import format_bytes

if TYPE_CHECKING:
    from tonari.oracle.cluster.cluster import Cluster
    from tonari.oracle.plan import StepPlan
    from tonari.oracle.probe.probe import Probe
    from tonari.trainer.config.config import Config


@dataclass(frozen=True)
class Choice:
    """Settings, and what they take.

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
    settings: Path, probes: Path, overrides: Sequence[str], *,
    tries: Sequence[tuple[str, ...]] = ((),), cluster: "Cluster | Probe | None",
    hidden_fraction: float,
) -> list[Choice]:  # fmt: skip
    """Plan one probe or all of a directory, the shortest epoch first.

    Where not all were probed with their data, the one first that trains most samples a second.

    Args:
        settings: Their file.
        probes: A file or a directory.
        overrides: Beside those that each was probed with.
        tries: Further ones to choose among, with each probe.
        cluster: As of `tonari.oracle.plan.plan_step`.
        hidden_fraction: Of the rows, that an epoch leaves out.

    Raises:
        CommandError, ConfigError, OracleError: As reading and planning each do.
    """
    from tonari.oracle.plan import plan_step
    from tonari.oracle.probe.probe import load_probe
    from tonari.trainer.config.config import load_config

    found = [load_probe(path) for path in find_probes(probes)]
    choices = []
    for own, each in zip(own_overrides(found), found, strict=True):
        for words in tries:
            config = load_config(settings, [*each.overrides, *overrides, *words])
            plan = plan_step(config, each, cluster=cluster, hidden_fraction=hidden_fraction)
            choices.append(Choice((*own, *words), config, each, plan))
    plans = [choice.plan for choice in choices]
    order = sorted(
        range(len(plans)), key=[sum(each.values()) for each in _parts_s(plans)].__getitem__
    )
    return [choices[number] for number in order]


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
    lines = [*choice_table(choices).text(), ""]
    for number, (settings, why) in enumerate(choice_notes(choices), 1):
        lines += [f"{number}. {why}".rstrip(), f"  {settings}"]
    return lines


def choice_table(choices: Sequence[Choice]) -> Table:
    """Lay plans out, the fastest first."""
    parts_s = _parts_s([choice.plan for choice in choices])
    best_s = sum(parts_s[0].values())
    return Table(HEAD, [
        _row(number, choice.plan, sum(own_s.values()) / best_s - 1)
        for number, (choice, own_s) in enumerate(zip(choices, parts_s, strict=True), 1)
    ])  # fmt: skip


def choice_notes(choices: Sequence[Choice]) -> list[tuple[str, str]]:
    """Give each one's settings, and why it is slower than the first."""
    first_s, *others_s = _parts_s([choice.plan for choice in choices])
    whys = ["", *(why_slower(own_s, first_s) for own_s in others_s)]
    return [
        (" ".join(choice.overrides) or "as in the file", why)
        for choice, why in zip(choices, whys, strict=True)
    ]


HEAD = (
    "", "epoch", "over the first", "samples/s", "step", "range", "computing", "waiting", "memory"
)  # fmt: skip


def _row(number: int, plan: "StepPlan", over: float) -> list[str]:
    computing = plan.parts_s.get("compute", 0.0) / sum(plan.parts_s.values())
    return [
        str(number), f"{plan.epoch.epoch_s:.1f} s" if plan.epoch else "-", f"{over:+.1%}",
        f"{plan.samples_per_s:,.1f}", f"{plan.step_s:.3f} s",
        f"{plan.low_s:.3f} to {plan.high_s:.3f} s", f"{computing:.0%}", f"{1 - computing:.0%}",
        format_bytes(max(plan.peak_bytes)) if plan.peak_bytes else "not known",
    ]  # fmt: skip


def _parts_s(plans: Sequence["StepPlan"]) -> list[dict[str, float]]:
    """Split what is compared: an epoch of each, or as many samples as a step of the first has."""
    epochs = [plan.epoch for plan in plans]
    found = []
    for plan, epoch in zip(plans, epochs, strict=True):
        steps_s, others_s = plans[0].samples_per_s * plans[0].step_s / plan.samples_per_s, {}
        if epoch is not None and None not in epochs:
            others_s = dict(epoch.parts_s)
            steps_s = others_s.pop("steps")
        scale = steps_s / sum(plan.parts_s.values())
        found.append({name: seconds * scale for name, seconds in plan.parts_s.items()} | others_s)
    return found
