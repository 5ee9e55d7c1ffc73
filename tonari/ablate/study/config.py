"""A study: arms to compare, over seeds. An arm is a name and settings, a cell an arm and a seed."""

import hashlib
import json
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, fields
from pathlib import Path
from typing import Annotated, Any, ClassVar, Literal

import shuffle as shuffles
from dataio.base import toml
from dataio.plan.policies import Importance, Shuffle
from importance import policies
from tonari.ablate.study.grid import expand_grid
from tonari.ablate.study.identity import changed, code_key, content_key
from tonari.names import EXAMPLES
from tonari.trainer.config.importance import policy_of
from tonari.trainer.config.kinds import Named
from tonari.trainer.config.settings import (
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
    missing_setting,
)
from tonari.trainer.errors import ConfigError

RESULTS_VERSION = 1
"""Raised when the same settings give other results than before."""

TABLES = ("study", "data", "settings", "arms", "grid", "full")

NAMED = Named(key="settings.importance", kinds=policies())

FIRST_DEFAULTS = {"shuffle": "global", "image_size": 32}
"""Defaults when cells were first named. In their names ``min_lr`` is a share of ``lr``, as then."""

LABELS = ("against", "control")
"""Settings that change no result."""


@dataclass(frozen=True, kw_only=True)
class StudyConfig(Section):
    """What is compared with what; ``margin_points`` is what counts as no loss of accuracy.

    Seeds are ``first_seed`` and those behind it: what is tried out on some is shown on others.

    Arms are timed to ``target_accuracy``; 0: to their baseline's mean, less the margin. A policy is
    held against controls of no more ``cost``: seconds of training, which a busy machine makes
    noisy, or rows (`CellResult.cost_rows`).
    """

    baseline: str
    seeds: Count = 5
    first_seed: Whole = 0
    margin_points: Positive = 0.5
    target_accuracy: Share = 0.0
    cost: Literal["train_s", "cost_rows"] = "train_s"
    device: Literal["cpu", "cuda"] = "cpu"

    @property
    def all_seeds(self) -> range:
        """The seeds, by their numbers."""
        return range(self.first_seed, self.first_seed + self.seeds)


@dataclass(frozen=True, kw_only=True)
class DataConfig(Section):
    """The samples; ``train_samples`` drawn anew for each seed, 0 for all, as ``test_samples``.

    ``image_size`` is what images are resized to, once: a study of images has to give it.

    ``kind`` ``"text"``: ``train`` and ``test`` are patterns of files, each a source of its own; a
    sample is ``sequence_length`` bytes and the one after them. Of these ``junk`` is half shuffled
    sequences, half random bytes, see `tonari.ablate.study.corrupt.spoil_text`; validation samples
    have none.

    ``noise``, ``duplicates``, ``repeats``, ``junk`` (shares), ``repeats_of`` and ``imbalance`` make
    the training samples worse, see `tonari.ablate.study.corrupt.corrupt`. ``truth`` names a field
    of the right classes, where ``label`` may hold wrong ones: these are then known to be wrong.
    With ``validation_samples`` the accuracy is that of so many other training images, their labels
    as noisy: to choose lengths and knobs by, with seeds of their own, before the test images are
    looked at.
    """

    train: str
    test: str
    kind: Literal["images", "text"] = "images"
    sequence_length: Count = 128
    image: str = "jpg"
    label: str = "cls"
    image_size: Annotated[int, Range(8)] | None = None
    num_classes: Count = 10
    train_samples: Whole = 0
    test_samples: Whole = 0
    validation_samples: Whole = 0
    noise: Share = 0.0
    duplicates: Share = 0.0
    junk: Share = 0.0
    imbalance: Annotated[float, Range(1)] = 1.0
    repeats: Share = 0.0
    repeats_of: Count = 20
    truth: str = ""

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.kind == "images" and self.image_size is None:
            raise missing_setting("data.image_size")
        if self.kind == "text":
            found = [
                f"data.{name} is {getattr(self, name)!r}"
                for name in ("noise", "duplicates", "imbalance", "repeats", "truth")
                if getattr(self, name) != getattr(type(self), name)
            ]
            if found:
                raise ConfigError(
                    f"{', '.join(found)}, which are for images; leave them out where data.kind is "
                    "'text', and set data.junk"
                )


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
        width, blocks, norm: Of images, see `StudyResNet`; ``running`` is for ``"batch"``. Of text,
            width, blocks and ``heads`` are those of a GPT.
        optimizer: ``"sgd"``, with ``momentum``, or ``"adamw"``, which needs averaged gradients.
        evaluate_epochs: Test accuracy is measured every so many epochs, and after the last.
        evaluate_samples: Test images of the measurements before the last; 0: all.
        min_lr: What the learning rate ends at.
        loss: ``"generalised"``: (1 - p ** q) / q of the probability p of the label, q = ``gce_q``,
            which wrong labels pull at less (Zhang and Sabuncu, NeurIPS 2018, section 3.3).
        ema: What a step keeps of the averaged weights, which then are what is tested; 0: none.
        importance: Which rows an epoch leaves out; needs averaged gradients. A class of your own,
            ``"package.module:Class"``, takes the table ``args``. Policies may ask for the fields
            ``label``, ``is_wrong`` and ``is_copy``; only an oracle may use the last two.
        knobs: All other keys: what the policy's class takes, and defaults to what the class has;
            0 or ``""`` stand for None. ``warmup_epochs`` are those above.
        epochs_fraction: Part of ``epochs`` that is trained, with the schedule compressed into it.
        control: What the arm shows beside the policies: the price of fewer ``"epochs"``, or of
            leaving out ``"random"`` rows, or those of the ``"highest"`` loss; averaged weights
            (``"ema"``); a ``"robust"`` loss. The report draws each set as a line. ``"oracle"``: it
            knows what nobody could, and is held against nothing.
        against: The arm that this one is compared with, where it is not ``study.baseline``.
    """

    REST: ClassVar[str] = "knobs"

    partition: Literal["sorted", "random"] = "sorted"
    shuffle: Literal["local", "partial", "global"] = "local"
    exchange: Fraction = 0.1
    replicas: Count = 16
    replicas_per_node: Count = 1
    batch_size: Count = 16
    epochs: Count = 10
    update: Literal["gradients", "average", "average_partner", "swap_partner"] = "gradients"
    local_steps: Count = 8
    width: Annotated[int, Range(4)] = 16
    blocks: Count = 1
    heads: Count = 4
    optimizer: Literal["sgd", "adamw"] = "sgd"
    norm: Literal["none", "group", "batch"] = "none"
    running: Literal["mean", "first"] = "mean"
    lr: Positive = 0.1
    momentum: Share = 0.9
    weight_decay: NotNegative = 5e-4
    min_lr: NotNegative = 0.0
    loss: Literal["cross_entropy", "generalised"] = "cross_entropy"
    gce_q: Annotated[float, Range(0, 1, "(]")] = 0.7
    ema: Share = 0.0
    warmup_epochs: Whole = 1
    flip: bool = True
    evaluate_epochs: Count = 5
    evaluate_samples: Whole = 0
    importance: str = "full"
    args: dict[str, object] = field(default_factory=dict)
    knobs: dict[str, Any] = field(default_factory=dict)
    epochs_fraction: Annotated[float, Range(0, 1, "(]")] = 1.0
    control: Literal["", "epochs", "random", "highest", "ema", "robust", "oracle"] = ""
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
        if self.min_lr > self.lr:
            raise ConfigError(
                f"settings.min_lr is {self.min_lr}, expected at most settings.lr = {self.lr}; give "
                "a smaller one"
            )
        if self.norm == "batch" and self.update != "gradients":
            raise ConfigError(
                f"settings.norm is 'batch' with settings.update {self.update!r}, expected 'none' "
                f"or 'group': replicas that train apart keep no running statistics here"
            )
        special = self.loss != "cross_entropy" or self.ema or self.optimizer != "sgd"
        if special and self.update != "gradients":
            raise ConfigError(
                "settings.loss or settings.ema is set with settings.update "
                f"{self.update!r}, or an optimizer other than sgd, expected 'gradients'; leave "
                "them out"
            )
        if self.ema and self.norm == "batch" and self.running == "first":
            raise ConfigError(
                f"settings.ema is {self.ema} with settings.running 'first', expected 'mean': the "
                "weights would be averaged over all replicas, and tested with the batch statistics "
                "of one; change running, or leave ema out"
            )
        if self.importance != "full" and self.update != "gradients":
            raise ConfigError(
                f"settings.importance is {self.importance!r} with settings.update {self.update!r}, "
                f"expected 'gradients': replicas that train apart have no common loss of a row"
            )
        self.make_importance()

    @property
    def num_epochs(self) -> int:
        """Epochs that are trained."""
        return max(round(self.epochs * self.epochs_fraction), 1)

    @property
    def num_warmup_epochs(self) -> int:
        """Of these, the ones in which the learning rate rises."""
        return round(self.warmup_epochs * self.epochs_fraction)

    def make_importance(self) -> Importance:
        """Make the importance policy that a loader would be handed."""
        return policy_of(
            NAMED, self.importance, self.knobs, self.args, beside=own_settings(),
            defaults={"warmup_epochs": self.num_warmup_epochs},
        )  # fmt: skip

    @property
    def nodes(self) -> tuple[int, ...]:
        """Replicas on each node."""
        return (self.replicas_per_node,) * (self.replicas // self.replicas_per_node)

    @property
    def policy(self) -> Shuffle:
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
            for seed in self.study.all_seeds
            for arm in self.arms
        ]

    def _digest(self, arm: Arm, seed: int) -> str:
        settings = changed(arm.settings, was=FIRST_DEFAULTS)
        settings |= settings.pop("knobs", {})  # type: ignore[call-overload]
        trained = {name: value for name, value in settings.items() if name not in LABELS}
        if arm.settings.min_lr:
            trained["min_lr"] = round(arm.settings.min_lr / arm.settings.lr, 12)
        if arm.settings.importance != "full":
            trained["code"] = code_key(arm.settings.make_importance())
        data = changed(self.data, was=FIRST_DEFAULTS) | {
            name: content_key(getattr(self.data, name)) for name in ("train", "test")
        }
        text = json.dumps([RESULTS_VERSION, trained, data, self.study.device, seed], sort_keys=True)
        return hashlib.sha256(text.encode()).hexdigest()[:12]


def load_study(path: Path, overrides: Sequence[str] = (), *, full: bool = False) -> Study:
    """Read a study.

    Args:
        path: TOML file with the tables study, data, settings, arms.NAME for each arm, and
            grid.NAME for arms that differ in some values.
        overrides: ``section.key=value``, above the file's.
        full: Whether the tables under ``full`` apply above the others.

    Raises:
        ConfigError: If the file cannot be read, a key is unknown or missing, a value is out of
            range, or an arm is compared with one that is not there.
    """
    try:
        tables = toml.loads(path.read_text())
    except (OSError, UnicodeDecodeError, toml.TOMLDecodeError) as error:
        raise ConfigError(
            f"{path}: cannot be read as TOML: {error}; give a file like "
            f"{EXAMPLES / 'shuffle_study.toml'}"
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
            check_known(f"full.{name}", {f"full.{known}": None for known in TABLES[:-1]})
            tables[name] = _table(tables, name) | _table({name: table}, name)
    for text in overrides:
        check_known(text.partition(".")[0], dict.fromkeys(TABLES[:3]))
        apply_override(tables, text)
    study = build_section(StudyConfig, tables.get("study", {}))
    data = build_section(DataConfig, tables.get("data", {}))
    found = _arm_tables(tables)
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


def own_settings() -> list[str]:
    """List the keys of an arm beside those of its policy."""
    return [its.name for its in fields(SettingsConfig) if its.name != SettingsConfig.REST]


def _arm_tables(tables: dict[str, object]) -> dict[str, dict[str, object]]:
    arms = _table(tables, "arms")
    found = [(name, _table(arms, name)) for name in arms]
    grids, known = _table(tables, "grid"), [*own_settings(), *sorted(NAMED.all_settings())]
    for name in grids:
        found += expand_grid(name, _table(grids, name), known, lists=NAMED.lists())
    if not found:
        raise ConfigError("arms: there is none; write [arms.NAME] for each, with its settings")
    for name, count in Counter(name for name, _ in found).items():
        if count > 1:
            raise ConfigError(
                f"arm {name!r} is there {count} times, expected a name of its own for each; write "
                f'name = "..." with every {{setting}} that varies into its grid'
            )
    return dict(found)


def _arm(name: str, common: Mapping[str, object], own: Mapping[str, object], baseline: str) -> Arm:
    try:
        settings = build_section(SettingsConfig, {**common, **own})
    except ConfigError as error:
        raise ConfigError(f"arm {name!r}: {error}") from error
    return Arm(name, settings, settings.against or baseline)


def _table(tables: Mapping[str, object], name: str) -> dict[str, object]:
    table = tables.get(name, {})
    if not isinstance(table, dict):
        raise ConfigError(f"{name} is {table!r}, expected a table; write [{name}] above its keys")
    return table
