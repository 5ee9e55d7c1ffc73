"""A study: arms to compare, over seeds. An arm is a name and settings, a cell an arm and a seed."""

import hashlib
import json
import tomllib
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Annotated, Literal

import dataio.policies
import shuffle as shuffles
from trainer.errors import ConfigError
from trainer.settings import (
    Count,
    Fraction,
    NotNegative,
    Positive,
    Range,
    Section,
    Share,
    Whole,
    apply_override,
    build_section,
    check_known,
)

RESULTS_VERSION = 1
"""Raised when the same settings give other results than before."""

TABLES = ("study", "data", "settings", "arms", "full")


@dataclass(frozen=True, kw_only=True)
class StudyConfig(Section):
    """What is compared with what; ``margin_points`` is what counts as no loss of accuracy."""

    baseline: str
    seeds: Count = 5
    margin_points: Positive = 0.5
    device: Literal["cpu", "cuda"] = "cpu"


@dataclass(frozen=True, kw_only=True)
class DataConfig(Section):
    """The images; ``train_samples`` drawn anew for each seed, 0 for all, as ``test_samples``."""

    train: str
    test: str
    image: str = "jpg"
    label: str = "cls"
    image_size: Annotated[int, Range(8)] = 32
    num_classes: Count = 10
    train_samples: Whole = 0
    test_samples: Whole = 0


@dataclass(frozen=True, kw_only=True)
class SettingsConfig(Section):
    """What an arm may change.

    Attributes:
        partition: Numbering of the samples that is dealt to the nodes at first: by class, or mixed.
        shuffle: Which node holds which row; ``exchange`` is for partial shuffling.
        replicas: In all; ``replicas_per_node`` of them share a pool.
        batch_size: Rows a step and replica.
        update: ``"gradients"``: averaged every step, one model. The others train one model a
            replica and every ``local_steps`` steps average all of them, average each with a drawn
            partner's, or hand each on to a drawn partner.
        norm: See `StudyResNet`; ``running`` is for ``"batch"``.
        evaluate_epochs: Test accuracy is measured every so many epochs, and after the last.
        against: The arm that this one is compared with, where it is not ``study.baseline``.
    """

    partition: Literal["sorted", "random"] = "sorted"
    shuffle: Literal["local", "partial", "global"] = "global"
    exchange: Fraction = 0.1
    replicas: Count = 16
    replicas_per_node: Count = 1
    batch_size: Count = 16
    epochs: Count = 10
    update: Literal["gradients", "average", "average_partner", "swap_partner"] = "gradients"
    local_steps: Count = 8
    width: Annotated[int, Range(4)] = 16
    blocks: Count = 1
    norm: Literal["none", "group", "batch"] = "none"
    running: Literal["mean", "first"] = "mean"
    lr: Positive = 0.1
    momentum: Share = 0.9
    weight_decay: NotNegative = 5e-4
    warmup_epochs: Whole = 1
    flip: bool = True
    evaluate_epochs: Count = 5
    against: str = ""

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.replicas % self.replicas_per_node:
            raise ConfigError(
                f"settings.replicas is {self.replicas}, expected a multiple of "
                f"settings.replicas_per_node ({self.replicas_per_node}); change one of them"
            )
        if self.width % 4:
            raise ConfigError(f"settings.width is {self.width}, expected a multiple of 4")
        if self.norm == "batch" and self.update != "gradients":
            raise ConfigError(
                f"settings.norm is 'batch' with settings.update {self.update!r}, expected 'none' "
                f"or 'group': replicas that train apart keep no running statistics here"
            )

    @property
    def nodes(self) -> tuple[int, ...]:
        """Replicas on each node."""
        return (self.replicas_per_node,) * (self.replicas // self.replicas_per_node)

    @property
    def policy(self) -> dataio.policies.Shuffle:
        """The shuffle that a loader would be handed."""
        if self.shuffle == "partial":
            return shuffles.Partial(self.exchange)
        return shuffles.Local() if self.shuffle == "local" else shuffles.Global()


@dataclass(frozen=True)
class Arm:
    """A name in the report, and what is trained under it."""

    name: str
    settings: SettingsConfig
    baseline: str


@dataclass(frozen=True)
class Cell:
    """One training run of a study.

    Attributes:
        arm: What is trained.
        seed: Of the subset, the first weights, the partition and the order.
        digest: Of all that the result depends on: a changed setting makes another cell.
    """

    arm: Arm
    seed: int
    digest: str

    @property
    def file_name(self) -> str:
        """A name of its own in the directory of results."""
        plain = "".join(c if c.isalnum() or c in ".=-" else "-" for c in self.arm.name)
        return f"{plain}-seed{self.seed}-{self.digest}.json"


@dataclass(frozen=True)
class Study:
    """A study as its file and the command line say."""

    study: StudyConfig
    data: DataConfig
    arms: tuple[Arm, ...]

    def cells(self) -> list[Cell]:
        """List the cells, a seed after the other, so that a part of them compares all arms."""
        return [
            Cell(arm, seed, self._digest(arm, seed))
            for seed in range(self.study.seeds)
            for arm in self.arms
        ]

    def _digest(self, arm: Arm, seed: int) -> str:
        trained = asdict(arm.settings)
        # What it is compared with changes no result; nor where the files lie, if they are the same
        del trained["against"]
        data = asdict(self.data) | {
            name: _file_key(getattr(self.data, name)) for name in ("train", "test")
        }
        text = json.dumps([RESULTS_VERSION, trained, data, self.study.device, seed], sort_keys=True)
        return hashlib.sha256(text.encode()).hexdigest()[:12]


def load_study(path: Path, overrides: Sequence[str] = (), *, full: bool = False) -> Study:
    """Read a study.

    Args:
        path: TOML file with the tables study, data, settings, and arms.NAME for each arm.
        overrides: ``section.key=value``, above the file's.
        full: Whether the tables under ``full`` apply above the others.

    Raises:
        ConfigError: If the file cannot be read, a key is unknown or missing, a value is out of
            range, or an arm is compared with one that is not there.
    """
    try:
        tables = tomllib.loads(path.read_text())
    except (OSError, UnicodeDecodeError, tomllib.TOMLDecodeError) as error:
        raise ConfigError(
            f"{path}: cannot be read as TOML: {error}; give a file like examples/shuffle_study.toml"
        ) from error
    try:
        return _build(tables, overrides, full=full)
    except ConfigError as error:
        raise ConfigError(f"{path}: {error}") from error


def _build(tables: dict[str, object], overrides: Sequence[str], *, full: bool) -> Study:
    for name in tables:
        check_known(name, dict.fromkeys(TABLES))
    if full:
        for name, table in _table(tables, "full").items():
            check_known(f"full.{name}", {f"full.{known}": None for known in TABLES[:3]})
            tables[name] = _table(tables, name) | _table({name: table}, name)
    for text in overrides:
        check_known(text.partition(".")[0], dict.fromkeys(TABLES[:3]))
        apply_override(tables, text)
    study = build_section(StudyConfig, tables.get("study", {}))
    data = build_section(DataConfig, tables.get("data", {}))
    assert isinstance(study, StudyConfig)
    assert isinstance(data, DataConfig)
    found = _table(tables, "arms")
    if not found:
        raise ConfigError("arms: there is none; write [arms.NAME] for each, with its settings")
    arms = tuple(
        _arm(name, _table(tables, "settings"), _table(found, name), study.baseline)
        for name in found
    )
    for arm in arms:
        if arm.baseline not in found:
            raise ConfigError(
                f"arm {arm.name!r} is compared with {arm.baseline!r}, which is no arm; expected "
                f"one of {', '.join(map(repr, found))}: set study.baseline, or the arm's `against`"
            )
    return Study(study, data, arms)


def _arm(name: str, common: Mapping[str, object], own: Mapping[str, object], baseline: str) -> Arm:
    try:
        settings = build_section(SettingsConfig, {**common, **own})
    except ConfigError as error:
        raise ConfigError(f"arm {name!r}: {error}") from error
    assert isinstance(settings, SettingsConfig)
    return Arm(name, settings, settings.against or baseline)


def _table(tables: Mapping[str, object], name: str) -> dict[str, object]:
    table = tables.get(name, {})
    if not isinstance(table, dict):
        raise ConfigError(f"{name} is {table!r}, expected a table; write [{name}] above its keys")
    return table


def _file_key(pattern: str) -> object:
    path = Path(pattern)
    return [path.name, path.stat().st_size] if path.is_file() else pattern
