"""A run's settings: a TOML file, then ``key=value`` overrides, into checked dataclasses.

Relative paths count from the directory the command runs in, in the file as in an override, so that
one line can be moved between the two.
"""

import dataclasses
import difflib
import math
import operator
import tomllib
import types
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Annotated, Literal, NoReturn, Union, get_args, get_origin, get_type_hints

from dataio.history import Column
from importance import POLICIES
from trainer.errors import ConfigError


@dataclass(frozen=True)
class Range:
    """Numbers from ``least`` to ``most``, ends included unless said."""

    least: float
    most: float | None = None
    ends: str = "[]"

    def holds(self, value: float) -> bool:
        above = operator.ge if self.ends[0] == "[" else operator.gt
        below = operator.le if self.ends[1] == "]" else operator.lt
        return above(value, self.least) and (self.most is None or below(value, self.most))

    def __str__(self) -> str:
        if self.most is None:
            return f"{'>=' if self.ends[0] == '[' else '>'} {self.least}"
        return f"in {self.ends[0]}{self.least}, {self.most}{self.ends[1]}"


Count = Annotated[int, Range(1)]
Whole = Annotated[int, Range(0)]
Fraction = Annotated[float, Range(0, 1)]
Share = Annotated[float, Range(0, 1, "[)")]
Positive = Annotated[float, Range(0, ends="(]")]
NotNegative = Annotated[float, Range(0)]


@dataclass(frozen=True, kw_only=True)
class Section:
    """One table of the file; checks each field against its annotation."""

    def __post_init__(self) -> None:
        for name, hint in get_type_hints(type(self), include_extras=True).items():
            value = getattr(self, name)
            if not _fits(value, hint):
                key = f"{section_name(type(self))}.{name}"
                raise ConfigError(
                    f"{key} is {value!r}, expected {_words(hint)}; correct it in the file, or give "
                    f"{key}=VALUE on the command line"
                )


@dataclass(frozen=True, kw_only=True)
class DataConfig(Section):
    """What to train on: shard patterns, and how samples are read; per replica.

    ``staging_bandwidth`` is in bytes/s a node, 0: no limit; ``quota`` is a size such as "200GB", or
    empty; see `dataio.Loader` for the others.
    """

    train: str | tuple[str, ...]
    test: str | tuple[str, ...] = ""
    image: str = "jpg"
    label: str = "cls"
    image_size: Count | None = None
    channels: Literal[1, 3] = 3
    batch_size: Count = 64
    cache: str = "auto"
    num_threads: Whole | None = None
    num_processes: Whole = 0
    prefetch: Whole = 2
    drop_last: bool = False
    stage: Literal["before", "overlap"] = "before"
    staging_readers: Count = 2
    staging_bandwidth: NotNegative = 0.0
    quota: str = ""


@dataclass(frozen=True, kw_only=True)
class ShuffleConfig(Section):
    """Which node holds which row; see `shuffle.Partial` and `shuffle.Global`.

    ``exchange``, ``rows`` and ``partners`` are for partial shuffling, ``moves`` for global: true
    gives each node its part, dealt anew every epoch, in place of the whole dataset.
    """

    kind: Literal["local", "partial", "global"] = "partial"
    exchange: Fraction = 0.1
    rows: Literal["uniform", "scores"] = "uniform"
    partners: Literal["uniform", "scores"] = "uniform"
    moves: bool = False

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.by_scores and self.kind != "partial":
            self._refuse("rows and shuffle.partners by scores are", "partial")
        if self.moves and self.kind != "global":
            self._refuse("moves is", "global")

    @property
    def by_scores(self) -> bool:
        """Whether scores decide where rows go."""
        return "scores" in (self.rows, self.partners)

    def _refuse(self, setting: str, kind: str) -> NoReturn:
        raise ConfigError(
            f'shuffle.{setting} for shuffle.kind "{kind}", which is "{self.kind}"; leave it out, '
            f"or give shuffle.kind={kind}"
        )


@dataclass(frozen=True, kw_only=True)
class ImportanceConfig(Section):
    """Which rows an epoch leaves out: one of `importance.POLICIES`, and its own settings.

    What is left out is as the policy has it. ``refresh_every`` 0: never. ``drops`` "lr": where this
    run's learning rate has halved (`importance.lr_drops`).
    """

    kind: Literal["full", "kakurenbo", "infobatch", "selective_backprop", "random"] = "full"
    fraction: Share | None = None
    tau: Fraction | None = None
    drops: tuple[Positive, ...] | Literal["lr"] | None = None
    alphas: tuple[Fraction, ...] | None = None
    threshold: Literal["global", "pool"] | None = None
    rate: Literal["cap", "realised", "none"] | None = None
    refresh_every: Whole | None = None
    delta: Fraction | None = None
    columns: tuple[Column, ...] | None = None

    def __post_init__(self) -> None:
        super().__post_init__()
        takes = [f.name for f in dataclasses.fields(POLICIES[self.kind])]  # type: ignore[arg-type]
        for name in self.settings:
            if name not in takes:
                mine = [f.name for f in dataclasses.fields(self) if f.name in takes]
                raise ConfigError(
                    f'importance.{name} is given, but importance.kind "{self.kind}" takes '
                    f"{', '.join(mine)} only; leave it out, or give another importance.kind"
                )

    @property
    def settings(self) -> dict[str, object]:
        """What was given beside the kind."""
        given = {f.name: getattr(self, f.name) for f in dataclasses.fields(self)}
        return {k: v for k, v in given.items() if k != "kind" and v is not None}

    @property
    def keeps_losses(self) -> bool:
        """Whether each row's last loss is remembered."""
        return "loss" in (*POLICIES[self.kind]().columns, *(self.columns or ()))


@dataclass(frozen=True, kw_only=True)
class ModelConfig(Section):
    """What to train; ``image_size`` is the small CNN's, ``depth`` and ``norm`` are the ResNet's."""

    num_classes: Count
    kind: Literal["small_cnn", "resnet"] = "small_cnn"
    image_size: Count = 32
    depth: Annotated[int, Range(8)] = 20
    norm: Literal["batch", "group"] = "group"

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.depth % 6 != 2:
            raise ConfigError(
                f"model.depth is {self.depth}, expected 6 n + 2 layers; choose 8, 14, 20, 32 or 56"
            )


@dataclass(frozen=True, kw_only=True)
class OptimizerConfig(Section):
    """SGD and its learning rate: warm-up, then a cosine, or steps down at ``milestones``.

    ``schedule_by`` "step" moves it on at every step, by the part of the epoch's steps that is done:
    hidden rows make an epoch shorter, not the schedule.
    """

    lr: Positive = 0.1
    momentum: Share = 0.9
    weight_decay: NotNegative = 5e-4
    schedule: Literal["cosine", "steps"] = "cosine"
    schedule_by: Literal["epoch", "step"] = "epoch"
    warmup_epochs: Whole = 0
    milestones: tuple[Count, ...] = ()
    decay: Annotated[float, Range(0, 1, "(]")] = 0.1


@dataclass(frozen=True, kw_only=True)
class MeshConfig(Section):
    """Ranks along each axis; ``dp_replicate`` left out takes the ranks that remain."""

    pp: Count = 1
    dp_replicate: Count | None = None
    dp_shard: Count = 1
    cp: Count = 1
    tp: Count = 1


@dataclass(frozen=True, kw_only=True)
class RunConfig(Section):
    """How long, and where results go; ``checkpoint_epochs`` 0 writes none but at a SIGTERM."""

    epochs: Count = 10
    seed: Whole = 0
    directory: str = "runs/train"
    checkpoint_epochs: Whole = 1
    keep_checkpoints: Count = 2
    log_steps: Count = 50
    device: Literal["auto", "cpu", "cuda"] = "auto"
    timeout_s: Positive = 300.0


@dataclass(frozen=True, kw_only=True)
class Config:
    """All settings of a run."""

    data: DataConfig
    model: ModelConfig
    shuffle: ShuffleConfig = field(default_factory=ShuffleConfig)
    importance: ImportanceConfig = field(default_factory=ImportanceConfig)
    optimizer: OptimizerConfig = field(default_factory=OptimizerConfig)
    mesh: MeshConfig = field(default_factory=MeshConfig)
    run: RunConfig = field(default_factory=RunConfig)

    def __post_init__(self) -> None:
        if self.shuffle.by_scores and not self.importance.keeps_losses:
            raise ConfigError(
                f'importance.kind is "{self.importance.kind}", which keeps no losses, and the '
                'shuffle goes by them; give importance.kind=full and importance.columns=["loss"], '
                "or a kind that goes by losses, or shuffle.rows=uniform and "
                "shuffle.partners=uniform"
            )


SECTIONS: dict[str, type[Section]] = get_type_hints(Config)


def load_config(path: Path, overrides: Sequence[str] = ()) -> Config:
    """Read a run's settings.

    Args:
        path: TOML file with a table for each section.
        overrides: ``section.key=value``, the value in TOML; what is not TOML is taken as text.

    Raises:
        ConfigError: If the file cannot be read, a key is unknown or missing, or a value is out of
            range.
    """
    try:
        tables = tomllib.loads(path.read_text())
    except (OSError, UnicodeDecodeError, tomllib.TOMLDecodeError) as error:
        raise ConfigError(
            f"{path}: cannot be read as TOML: {error}; give a file like examples/cifar10.toml"
        ) from error
    try:
        for override in overrides:
            apply_override(tables, override)
        return _build(tables)
    except ConfigError as error:
        raise ConfigError(f"{path}: {error}") from error


def section_name(section: type[Section]) -> str:
    """Name the table of a section."""
    return section.__name__.removesuffix("Config").lower()


def apply_override(tables: dict[str, object], override: str) -> None:
    """Set what ``section.key=value`` says in tables as TOML gives them."""
    key, equals, text = override.partition("=")
    section, dot, name = key.partition(".")
    if not (equals and dot and name):
        raise ConfigError(
            f"override {override!r}, expected section.key=value; write for example run.epochs=3"
        )
    try:
        value: object = tomllib.loads(f"value = {text}")["value"]
    except tomllib.TOMLDecodeError:
        value = text
    table = tables.setdefault(section, {})
    if isinstance(table, dict):
        table[name] = value


def _build(tables: Mapping[str, object]) -> Config:
    for section in tables:
        check_known(section, SECTIONS)
    made = {
        name: build_section(made_by, tables.get(name, {})) for name, made_by in SECTIONS.items()
    }
    return Config(**made)  # type: ignore[arg-type]


def build_section(section: type[Section], table: object) -> Section:
    """Make one table's settings; unknown and missing keys are errors."""
    name = section_name(section)
    if not isinstance(table, dict):
        raise ConfigError(f"{name} is {table!r}, expected a table; write [{name}] above its keys")
    known = {f"{name}.{f.name}": f for f in dataclasses.fields(section)}
    for key in table:
        check_known(f"{name}.{key}", known)
    for key, its in known.items():
        missing = its.default is dataclasses.MISSING and its.default_factory is dataclasses.MISSING
        if missing and its.name not in table:
            raise ConfigError(f"{key} is missing; set it in the file or give {key}=VALUE")
    return section(**{k: tuple(v) if isinstance(v, list) else v for k, v in table.items()})


def check_known(key: str, known: Mapping[str, object]) -> None:
    """Refuse a key that is not among the known ones, and guess which was meant."""
    if key not in known:
        nearest = difflib.get_close_matches(key, known, n=1, cutoff=0)
        raise ConfigError(
            f"{key} is unknown; did you mean {nearest[0]}? Known here: {', '.join(known)}"
        )


def _fits(value: object, hint: object) -> bool:
    if get_origin(hint) is Annotated:
        base, bounds = get_args(hint)
        assert isinstance(bounds, Range), "only ranges annotate a setting"
        return _fits(value, base) and isinstance(value, int | float) and bounds.holds(value)
    if get_origin(hint) in (Union, types.UnionType):
        return any(_fits(value, option) for option in get_args(hint))
    if get_origin(hint) is Literal:
        return value in get_args(hint)
    if get_origin(hint) is tuple:
        return isinstance(value, tuple) and all(_fits(v, get_args(hint)[0]) for v in value)
    if hint in (int, float):
        numbers = int if hint is int else int | float
        return isinstance(value, numbers) and type(value) is not bool and math.isfinite(value)
    return isinstance(value, hint) if isinstance(hint, type) else False


def _words(hint: object) -> str:
    plain = {int: "a whole number", float: "a number", str: "text", bool: "true or false"}
    plain |= {type(None): "leaving it out"}
    if get_origin(hint) is Annotated:
        base, bounds = get_args(hint)
        return f"{_words(base)} {bounds}"
    if get_origin(hint) in (Union, types.UnionType):
        return " or ".join(_words(option) for option in get_args(hint))
    if get_origin(hint) is Literal:
        return "one of " + ", ".join(repr(option) for option in get_args(hint))
    if get_origin(hint) is tuple:
        return f"a list, each {_words(get_args(hint)[0])}"
    return next(words for kind, words in plain.items() if hint is kind)
