"""A study: arms to compare, over seeds. An arm is a name and changes to a file of `tonari train`.

A cell is an arm and a seed: one run of `tonari train`.
"""

import copy
import shlex
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from dataio.base.checked import Count, Positive, Share, Whole
from tonari.ablate.grid import expand_grid, leaves
from tonari.ablate.identity import digest
from tonari.names import EXAMPLES
from tonari.trainer.config.config import (
    SECTIONS,
    Change,
    Config,
    build_config,
    change,
    read_tables,
)
from tonari.trainer.config.settings import (
    Section,
    apply_override,
    build_section,
    check_known,
    parse_override,
)
from tonari.trainer.errors import ConfigError

TABLES = ("study", "train", "arms", "grid", "full")

LABELS = ("control", "against")
"""Keys of an arm that change nothing of what is trained."""

Control = Literal["", "epochs", "random", "highest", "ema", "robust", "oracle"]
CONTROLS: tuple[Control, ...] = ("", "epochs", "random", "highest", "ema", "robust", "oracle")

SEED = "{seed}"
"""In a text of [train] or of an arm it stands for the cell's seed, as in the name of a file."""

Tables = dict[str, object]


@dataclass(frozen=True, kw_only=True)
class StudyConfig(Section):
    """What is compared with what; ``margin_points`` is what counts as no loss of accuracy.

    Seeds are ``first_seed`` and those behind it: what is tried out on some is shown on others.

    ``config`` is the file of `tonari train` that all arms change; without one, [train] says it all.
    Arms are judged by ``measure`` of the test data: the accuracy, or the loss, which is what text
    has where nothing is said. Arms are timed to ``target_accuracy``; 0: to their baseline's mean,
    less the margin. A policy is held against controls of no more ``cost``: seconds of training,
    which a busy machine makes noisy, or rows, see `tonari.ablate.training.Trained`. ``wrong`` names
    a field of the training data that is not 0 where a sample is wrong: the report then says how
    many of these were left out. ``launch`` is what starts the ranks of a run, such as
    ``"mpiexec -n 4"``, where one process is not enough. ``keep_runs`` leaves each run's directory,
    with its checkpoints, below ``runs``.
    """

    baseline: str
    config: str = ""
    seeds: Count = 5
    first_seed: Whole = 0
    measure: Literal["", "accuracy", "loss"] = ""
    margin_points: Positive = 0.5
    target_accuracy: Share = 0.0
    cost: Literal["train_s", "cost_rows"] = "train_s"
    wrong: str = ""
    launch: str = ""
    keep_runs: bool = False

    def __post_init__(self) -> None:
        super().__post_init__()
        try:
            _ = self.launcher
        except ValueError as error:
            raise ConfigError(
                f"study.launch is {self.launch!r}, expected a command as a shell takes it ({error})"
            ) from error

    @property
    def all_seeds(self) -> range:
        """The seeds, by their numbers."""
        return range(self.first_seed, self.first_seed + self.seeds)

    @property
    def launcher(self) -> list[str]:
        """The words of ``launch``; none: a run is this process."""
        return shlex.split(self.launch)


@dataclass(frozen=True)
class Arm:
    """A name in the report, and what is trained under it.

    Attributes:
        name: In the report.
        tables: Those of a file of `tonari train`, before the seed is put in.
        baseline: The arm that it is compared with.
        control: What it shows beside the policies: the price of fewer ``"epochs"``, or of leaving
            out ``"random"`` rows, or those of the ``"highest"`` loss; averaged weights
            (``"ema"``); a ``"robust"`` loss. The report draws each set as a line. ``"oracle"``: it
            knows what nobody could, and is held against nothing.
    """

    name: str
    tables: Tables
    baseline: str
    control: Control = ""

    def tables_of(self, seed: int) -> Tables:
        """Put a seed in."""
        found = _with_seed(self.tables, seed)
        assert isinstance(found, dict)
        apply_override(found, ("run", "seed"), seed)
        return found

    def config(self, seed: int) -> Config:
        """Check what is trained with a seed; results go where the file says.

        Raises:
            ConfigError: If a setting is wrong.
        """
        try:
            return build_config(self.tables_of(seed))
        except ConfigError as error:
            raise ConfigError(f"arm {self.name!r}: {error}") from error

    @property
    def settings(self) -> dict[str, object]:
        """All that the file and the study say, by ``section.key``."""
        return {".".join(path): value for path, value in leaves(self.tables)}


@dataclass(frozen=True)
class Cell:
    """One training run of a study.

    Attributes:
        arm: What is trained.
        seed: Of the run: its first weights and its order; arms of one seed share what they can.
        digest: Of all that the result depends on: a changed setting makes another cell.
    """

    arm: Arm
    seed: int
    digest: str

    @property
    def name(self) -> str:
        """A name of its own in the study's directory."""
        plain = "".join(c if c.isalnum() or c in ".=-" else "-" for c in self.arm.name)
        return f"{plain}-seed{self.seed}-{self.digest}"

    @property
    def file_name(self) -> str:
        """The file of its results."""
        return f"{self.name}.json"


@dataclass(frozen=True)
class Study:
    """A study as its file and the command line say."""

    study: StudyConfig
    arms: tuple[Arm, ...]

    def cells(self) -> list[Cell]:
        """List the cells, a seed after the other, so that a part of them compares all arms."""
        return [
            Cell(arm, seed, digest(arm.config(seed), seed=seed, launch=self.study.launcher))
            for seed in self.study.all_seeds
            for arm in self.arms
        ]


def load_study(path: Path, overrides: Sequence[str] = (), *, full: bool = False) -> Study:
    """Read a study.

    Args:
        path: TOML file with the tables study, train, arms.NAME for each arm, and grid.NAME for
            arms that differ in some values.
        overrides: ``study.key=value``, or ``section.key=value`` as of `tonari train`, above what
            all arms share.
        full: Whether the tables under ``full`` apply above the others.

    Raises:
        ConfigError: If a file cannot be read, a key is unknown or missing, a value is out of
            range, or an arm is compared with one that is not there.
    """
    tables = read_tables(path, example=EXAMPLES / "selection_study.toml")
    try:
        return _build(tables, overrides, full=full)
    except ConfigError as error:
        raise ConfigError(f"{path}: {error}") from error


def _build(tables: Tables, overrides: Sequence[str], *, full: bool) -> Study:
    for name in tables:
        check_known(name, dict.fromkeys(TABLES))
    if full:
        _apply_full(tables)
    changes = [parse_override(text) for text in overrides]
    for keys, value in changes:
        check_known(keys[0], dict.fromkeys(("study", *SECTIONS)))
        if keys[0] == "study":
            apply_override(tables, keys, value)
    study = build_section(StudyConfig, tables.get("study", {}))
    shared = read_tables(Path(study.config)) if study.config else {}
    change(shared, list(_settings_of(tables, "train")))
    change(shared, [each for each in changes if each[0][0] != "study"])
    arms = tuple(_arms(tables, shared, study))
    names = {arm.name: None for arm in arms}
    for arm in arms:
        if arm.baseline not in names:
            raise ConfigError(
                f"arm {arm.name!r} is compared with {arm.baseline!r}, which is no arm; expected "
                f"one of {', '.join(map(repr, names))}: set study.baseline, or the arm's `against`"
            )
        _check(arm, study)
    return Study(study, arms)


def _apply_full(tables: Tables) -> None:
    for name, table in _table(tables, "full").items():
        check_known(f"full.{name}", {f"full.{known}": None for known in TABLES[:-1]})
        given = {"full": {name: table}}
        if name == "train":
            changed = {"train": _table(tables, name)}
            change(_table(changed, name), list(_settings_of(_table(given, "full"), name)))
            tables |= changed
        else:
            tables[name] = _table(tables, name) | _table(_table(given, "full"), name)


def _arms(tables: Tables, shared: Tables, study: StudyConfig) -> Iterator[Arm]:
    given = _table(tables, "arms")
    found = [(name, _table(given, name)) for name in given]
    grids = _table(tables, "grid")
    for name in grids:
        found += expand_grid(name, _table(grids, name), [*LABELS, *SECTIONS])
    if not found:
        raise ConfigError("arms: there is none; write [arms.NAME] for each, with its settings")
    for name, count in Counter(name for name, _ in found).items():
        if count > 1:
            raise ConfigError(
                f"arm {name!r} is there {count} times, expected a name of its own for each; write "
                f'name = "..." with every {{section.key}} that varies into its grid'
            )
    for name, own in found:
        try:
            yield _arm(name, own, shared, study)
        except ConfigError as error:
            raise ConfigError(f"arm {name!r}: {error}") from error


def _arm(name: str, own: Mapping[str, object], shared: Tables, study: StudyConfig) -> Arm:
    for key in own:
        check_known(key, dict.fromkeys((*LABELS, *SECTIONS)))
    control, against = own.get("control", ""), own.get("against", study.baseline)
    if control not in CONTROLS:
        raise ConfigError(
            f"control is {control!r}, expected one of {', '.join(map(repr, CONTROLS))}; correct it"
        )
    tables = copy.deepcopy(shared)
    settings = {key: table for key, table in own.items() if key not in LABELS}
    change(tables, list(_settings_of({"": settings}, "")))
    return Arm(name, tables, str(against), control)


def _check(arm: Arm, study: StudyConfig) -> None:
    config = arm.config(study.first_seed)
    if not (config.data.test or config.data.test_fraction):
        raise ConfigError(
            f"arm {arm.name!r}: data.test is missing, by which the arms are judged; give it, or "
            "for text data.test_fraction"
        )
    if config.run.evaluation != "inline":
        raise ConfigError(
            f'arm {arm.name!r}: run.evaluation is "{config.run.evaluation}", expected "inline": a '
            "study judges epochs as they end; leave it out"
        )
    for name in ("max_steps", "max_tokens"):
        if getattr(config.run, name):
            raise ConfigError(
                f"arm {arm.name!r}: run.{name} is {getattr(config.run, name)}, expected 0: a study "
                "counts whole epochs; give run.epochs"
            )


def _settings_of(tables: Mapping[str, object], name: str) -> Iterator[Change]:
    """List what the tables of sections in a table say."""
    for section, table in _table(tables, name).items():
        where = f"{name}.{section}" if name else section
        check_known(where, {f"{name}.{known}" if name else known: None for known in SECTIONS})
        if not isinstance(table, dict):
            raise ConfigError(f"{where} is {table!r}, expected a table; give {where}.KEY = VALUE")
        yield from leaves({section: table})


def _with_seed(value: object, seed: int) -> object:
    if isinstance(value, dict):
        return {name: _with_seed(its, seed) for name, its in value.items()}
    if isinstance(value, list):
        return [_with_seed(its, seed) for its in value]
    return value.replace(SEED, str(seed)) if isinstance(value, str) else value


def _table(tables: Mapping[str, object], name: str) -> dict[str, object]:
    table = tables.get(name, {})
    if not isinstance(table, dict):
        raise ConfigError(f"{name} is {table!r}, expected a table; write [{name}] above its keys")
    return table
