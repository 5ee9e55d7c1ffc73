"""What `tonari search` prints: the fastest settings of the mesh, as a table and commands."""

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from tonari.errors import CommandError
from tonari.report.tables import Table
from tonari.sizes import format_bytes

if TYPE_CHECKING:
    from tonari.oracle.cluster.cluster import Cluster
    from tonari.oracle.search.epoch import Epochs
    from tonari.oracle.search.search import Candidate, Plans
    from tonari.trainer.config.config import Config

NEXT = (
    "An estimate from equations of a step, {without}: docs/plan.md says what it leaves out. "
    "`tonari probe` and `tonari plan` time the few that are worth it."
)
CHOSEN = ("shuffle", "importance", "data")
"""Sections that `--try` chooses in; of data, its tables alone."""


def data_choices(
    settings: Path, overrides: Sequence[str], cluster: "Cluster", *, world_size: int,
    words: str | None, probe: Path | None, tries: Sequence[tuple[str, ...]],
    hidden_fractions: Sequence[float],
) -> list["Epochs"]:  # fmt: skip
    """List the choices of the data to price epochs of: each of ``tries`` with each hidden share.

    Args:
        settings: Their file.
        overrides: Of all of them.
        cluster: The machine.
        world_size: Ranks.
        words: The data, as of `tonari.oracle.search.data.read_data`; None: as a probe timed it.
        probe: Its file.
        tries: Settings to choose among.
        hidden_fractions: Of the rows, to choose among.

    Raises:
        CommandError: If a choice is not about the data, or the probe has none.
        ConfigError, OracleError: As reading each does.
    """
    from tonari.oracle.probe.probe import load_probe
    from tonari.oracle.search.data import read_data
    from tonari.oracle.search.epoch import Epochs
    from tonari.trainer.config.config import load_config

    config = load_config(settings, overrides)
    if words:
        data, core_s = read_data(words, config), None
    else:
        assert probe is not None
        found = load_probe(probe)
        if found.data is None:
            raise CommandError(
                f"--probe {probe}: a probe without data, by which epochs would be priced; probe "
                "without --no-data, or give --data ROWSxBYTES"
            )
        own = load_config(settings, [*found.overrides, *overrides])
        data, core_s = found.data, found.data.core_s(batch_size=own.data.batch_size)
    for each in (setting for choice in tries for setting in choice):
        section, _, key = each.partition("=")[0].partition(".")
        if section not in CHOSEN or (section == "data" and "." not in key):
            raise CommandError(
                f"--try {each}: a search chooses by itself what computes a step, expected settings "
                "of shuffle, importance, data.cache, data.staging or data.workers; give others as "
                "SECTION.KEY=VALUE"
            )
    several = len(hidden_fractions) > 1
    return [
        Epochs(
            load_config(settings, [*overrides, *choice]), cluster, data, world_size=world_size,
            hidden_fraction=hidden, core_s=core_s,
            words=(*choice, f"{hidden:.0%} hidden") if several or hidden else choice,
        )
        for choice in tries
        for hidden in hidden_fractions
    ]  # fmt: skip


def search_words(found: "Plans", config: "Config") -> list[str]:
    """Describe what a search found, in lines.

    Args:
        found: With one candidate at least.
        config: The settings of the job.
    """
    best = found.candidates[0]
    whole = "epoch" if best.epoch_s else "step"
    (settings, _), *slower = search_notes(found, config)
    lines = [
        fastest_words(best, settings),
        f"{found.legal:,} configurations are legal for {found.global_batch_size:,} samples a step: "
        f"{found.priced:,} priced, {found.unfit:,} do not fit into memory"
        f"{' or on a disk' if best.epoch_s else ''}, {found.pruned:,} have a bound above the last "
        "one's time",
        "",
        *search_table(found).text(),
        "",
        f"the first, in parts of its {whole}: {_parts(best)}",
    ]
    for number, (settings, why) in enumerate(slower, 2):
        lines += [f"{number}. {why}", f"  {settings}"]
    if found.choices:
        lines += ["", "the best of each choice:", "", *table_of_choices(found.choices).text()]
    lines += unfit_words(found)
    return [*lines, "", what_next(found)]


HEAD = (
    "", "step", "samples/s", "memory", "node hours", "pp", "dp", "shard", "cp", "tp",
    "microbatches", "schedule", "recomputes", "sp",
)  # fmt: skip
HEAD_OF_EPOCHS = (
    "", "epoch", "waits", "staging", "step", *HEAD[2:], "cache", "threads", "choice"
)  # fmt: skip
HEAD_OF_CHOICES = ("choice", "epoch", "over the first", "waits", "why")
WAITS = ("exchange", "decoding", "node disk", "windows", "epoch end", "refresh")
"""Parts of an epoch that are not of its steps."""


def search_table(found: "Plans") -> Table:
    """Lay the candidates out."""
    head = HEAD_OF_EPOCHS if found.candidates[0].epoch_s else HEAD
    return Table(head, [_row(number, each) for number, each in enumerate(found.candidates, 1)])


def fastest_words(best: "Candidate", settings: str) -> str:
    """Describe the fastest candidate in a sentence."""
    what = f"step takes {format_s(best.step_s)}, {best.samples_per_s:,.1f} samples a second"
    if best.epoch_s:
        what = f"epoch takes {format_s(best.epoch_s)}"
    hides = "".join(f", with {word}" for word in best.choice if "=" not in word)
    return f"The fastest {what}, in {format_bytes(best.memory_bytes)} a rank: {settings}{hides}."


def search_notes(found: "Plans", config: "Config") -> list[tuple[str, str]]:
    """Give each candidate's settings that the job lacks, and why it is slower than the first."""
    first, *slower = found.candidates
    others = [(_settings(each, config), each.why_slower or "It is as fast.") for each in slower]
    return [(_settings(first, config), ""), *others]


def what_next(found: "Plans") -> str:
    """Describe what the estimate leaves out, and what to do next."""
    without = "evaluations and checkpoints" if found.candidates[0].epoch_s else "loading data"
    return NEXT.format(without=f"without {without}")


def format_s(seconds: float) -> str:
    """Format a time by its size, with three digits at least."""
    if 0 < seconds < 0.1:
        return f"{_short(seconds * 1e3)} ms"
    return f"{_short(seconds)} s"


def _short(number: float) -> str:
    return f"{number:,.1f}" if number >= 10 else f"{number:#.3g}" if number else "0"


def _row(number: int, each: "Candidate") -> list[str]:
    settings = dict(setting.removeprefix("mesh.").split("=") for setting in each.settings)
    virtual = settings.get("virtual")
    of_step = [
        format_s(each.step_s), f"{each.samples_per_s:,.1f}",
        format_bytes(each.memory_bytes), _short(each.node_hours), settings["pp"],
        settings["dp_replicate"], settings["dp_shard"], settings["cp"], settings["tp"],
        settings["microbatches"], settings["schedule"] + (f" {virtual}" if virtual else ""),
        _recomputes(settings), "yes" if settings["sequence_parallel"] == "true" else "-",
    ]  # fmt: skip
    if not each.epoch_s:
        return [str(number), *of_step]
    quota = settings.get("data.cache.quota")
    return [
        str(number), format_s(each.epoch_s), format_s(_waits_s(each)),
        format_s(each.staging_s), *of_step, format_bytes(int(quota)) if quota else "-",
        settings.get("data.workers.threads", "-"), _choice(each),
    ]  # fmt: skip


def _recomputes(settings: Mapping[str, str]) -> str:
    blocks = settings["checkpointing_blocks"]
    words = settings["checkpointing"] + (f" {blocks} a stage" if blocks != "0" else "")
    swaps = settings["swap_blocks"]
    words += f", swaps {swaps} a stage" if swaps != "0" else ""
    return words + (", offloads" if settings["offload"] == "true" else "")


def _waits_s(each: "Candidate") -> float:
    return sum(each.parts_s[name] for name in WAITS)


def _choice(each: "Candidate") -> str:
    return " ".join(each.choice) or "-"


def _settings(each: "Candidate", config: "Config") -> str:
    """Give what makes of a job this candidate, as `tonari train` takes it."""
    mesh, chosen = config.mesh, [word for word in each.choice if "=" in word]
    own = {f"data.batch_size={config.data.batch_size}"}
    own |= {f"mesh.{name}={str(value).lower()}" for name, value in vars(mesh).items()}
    if mesh.dp_replicate is None:  # the ranks that remain
        own |= {word for word in each.settings if word.startswith("mesh.dp_replicate=")}
    if mesh.microbatches is None and "mesh.pp=1" in each.settings:
        own.add("mesh.microbatches=1")
    lacked = [word for word in (*each.settings, *chosen) if word not in own]
    return " ".join(lacked) or "as in the file"


def table_of_choices(choices: Sequence["Candidate"], title: str = "") -> Table:
    """Lay out what each choice costs with the mesh that suits it best, the fastest first."""
    ordered = sorted(choices, key=lambda each: each.epoch_s)
    best_s = ordered[0].epoch_s
    rows = [
        [
            _choice(each), format_s(each.epoch_s), f"{each.epoch_s / best_s - 1:+.1%}",
            format_s(_waits_s(each)), each.why_slower or "-",
        ]
        for each in ordered
    ]  # fmt: skip
    return Table(HEAD_OF_CHOICES, rows, title)


def unfit_words(found: "Plans") -> list[str]:
    """Name the choices of which nothing fits."""
    return [
        f"{' '.join(words) or 'the settings'}: does not fit into memory or on a disk, on any mesh"
        for words in found.unfit_choices
    ]


def _parts(each: "Candidate") -> str:
    largest = sorted(each.parts_s.items(), key=lambda part: -part[1])
    whole_s = each.epoch_s or each.step_s
    return ", ".join(f"{name} {seconds / whole_s:.1%}" for name, seconds in largest if seconds)
