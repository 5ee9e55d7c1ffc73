"""A run's settings: a TOML file, then ``key=value`` overrides, into checked dataclasses.

Relative paths count from the directory the command runs in, in the file as in an override, so that
one line can be moved between the two.
"""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Literal, get_type_hints

from dataio import NodeCache, Staging, Workers
from dataio.base import toml
from dataio.base.checked import Count, NotNegative, Positive, Share, Whole
from dataio.base.filesystem import check_path
from dataio.source.classes import Classes
from tonari.names import EXAMPLES
from tonari.trainer.config.augment import AugmentConfig, check_augment, check_rescoring
from tonari.trainer.config.importance import NAMED as POLICY
from tonari.trainer.config.importance import ImportanceConfig
from tonari.trainer.config.model import GIVEN, TEXT_MODELS, ModelConfig
from tonari.trainer.config.model import NAMED as MODEL
from tonari.trainer.config.optimizer import OptimizerConfig
from tonari.trainer.config.recipe import RecipeConfig
from tonari.trainer.config.settings import (
    Section,
    apply_override,
    build_section,
    check_known,
    parse_override,
)
from tonari.trainer.config.shuffle import NAMED as SHUFFLE
from tonari.trainer.config.shuffle import ShuffleConfig
from tonari.trainer.config.text import TextConfig, check_text
from tonari.trainer.errors import ConfigError
from tonari.trainer.mesh.place import SPLIT, Schedule, Targets


@dataclass(frozen=True, kw_only=True)
class DataConfig(Section):
    """What to train on, and how samples are read.

    Of text, a sample is ``sequence_length`` bytes and the one after them. ``cache``, ``staging``
    and ``workers`` are tables of their own.

    Attributes:
        train: Images in shards, or text files, to train on: a path, a pattern, or a list of these.
        test: What to evaluate on; none: nothing is evaluated, but for ``test_fraction``.
        kind: What samples are.
        sequence_length: Tokens of a sample of text.
        test_classes: `dataio.Loader.evaluation` takes it as ``classes``: ``"same"`` refuses a
            ``test`` whose classes have other names than those of ``train``, ``"training"`` numbers
            an image folder as training does, and ``"own"`` leaves it its own numbers.
        test_fraction: Of text without ``test``: the share at its end that is left for evaluations.
        joined: As of `dataio.Shards`: tar shards may be archives that ``cat`` joined.
        image: The extension or column of the images; left out: ``jpg``, or the only one of
            ``jpeg``, ``png``, ``webp``, ``image`` and ``img`` that samples have.
        label: The extension or column of the classes; left out: ``cls``, or ``label``.
        image_size: Height and width that images are resized to; left out: as they are.
        channels: 3 for colours, 1 for grey.
        decoded: Keep pixels in the cache, not compressed pictures; "auto": where they are few,
            as of CIFAR. See docs/images.md.
        batch_size: Samples of one step on one replica.
        drop_last: Leaves out the rows at an epoch's end that fill no batch.
        exclude: A CSV or Parquet list, or some, of samples that are never trained on.
        cache: Where the node keeps its rows: a path, or the table [data.cache].
        staging: How rows come into the cache: the table [data.staging].
        workers: Who decodes samples: the table [data.workers].
    """

    train: str | tuple[str, ...]
    test: str | tuple[str, ...] = ""
    kind: Literal["images", "text"] = "images"
    sequence_length: Count = 128
    test_classes: Classes = "same"
    test_fraction: Share = 0.0
    joined: bool = False
    image: str = ""
    label: str = ""
    image_size: Count | None = None
    channels: Literal[1, 3] = 3
    decoded: bool | Literal["auto"] = False
    batch_size: Count = 64
    drop_last: bool = False
    exclude: str | tuple[str, ...] = ""
    cache: NodeCache = field(default_factory=NodeCache)
    staging: Staging = field(default_factory=Staging)
    workers: Workers = field(default_factory=Workers)

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.test_fraction and (self.test or self.kind != "text"):
            raise ConfigError(
                f"data.test_fraction is {self.test_fraction}, expected 0 where data.kind is "
                f'"images" or data.test is given; leave one of them out'
            )
        if self.joined and self.kind == "text":
            raise ConfigError(
                'data.joined is true, expected false where data.kind is "text": it is for tar '
                "shards of images; leave it out"
            )


@dataclass(frozen=True, kw_only=True)
class MeshConfig(Section):
    """Ranks along each axis, and how the model is spread over them.

    Attributes:
        pp: Stages of the pipeline: each rank along this axis has some layers of the model.
        dp_replicate: Copies of the model; left out: as many as the ranks that remain.
        dp_shard: Ranks that share the weights of one copy (FSDP).
        cp: Ranks that share each sequence (context parallel).
        tp: Ranks that share each matrix (tensor parallel).
        tiles: Parts of each sample along the last axes of the model's input, such as [2, 2] of
            height and width: each of these ranks has one (spatial parallel).
        schedule: The order in which a stage takes its microbatches.
        virtual: Stages a rank has with the schedules that give it several: interleaved and
            zero_bubble.
        microbatches: Parts that a batch is cut into; left out: as few as keep the pipeline busy.
        targets: How the last stage gets its columns where it is on another node than the first:
            the reader sends them, or it reads them itself and nothing else.
        sequence_parallel: Splits the activations between matrices over ``tp`` too.
        loss_parallel: Splits the logits over ``tp``.
        checkpointing: Which activations are computed again in the backward pass, not kept.
        checkpointing_blocks: Blocks of each stage for which that is done; 0: all.
        swap_blocks: Blocks of each stage, chosen before these, whose activations wait in the host's
            memory.
        dtype: The number format of the forward and backward pass.
        compile: Compiles the blocks by ``torch.compile``.
        offload: Keeps the weights and the optimizer in the host's memory.
        channels_last: Lays the weights of convolutions as batches of images lie, which GPUs
            compute with fastest in bfloat16; for one process.
    """

    pp: Count = 1
    dp_replicate: Count | None = None
    dp_shard: Count = 1
    cp: Count = 1
    tp: Count = 1
    tiles: tuple[Count, ...] = ()
    schedule: Schedule = "1f1b"
    virtual: Count = 2
    microbatches: Count | None = None
    targets: Targets = "send"
    sequence_parallel: bool = False
    loss_parallel: bool = False
    checkpointing: Literal["none", "full", "selective"] = "none"
    checkpointing_blocks: Whole = 0
    swap_blocks: Whole = 0
    dtype: Literal["float32", "bfloat16", "float64"] = "float32"
    compile: bool = False
    offload: bool = False
    channels_last: bool = False

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.tiles and self.cp > 1:
            raise ConfigError(
                f"mesh.tiles is {list(self.tiles)} and mesh.cp is {self.cp}, expected one of them: "
                "ranks share a sequence, or they have a tile of each sample; leave mesh.cp out"
            )
        if self.tiles and (self.tp > 1 or self.compile or (self.pp > 1 and self.schedule in SPLIT)):
            raise ConfigError(
                f"mesh.tiles is {list(self.tiles)} with mesh.tp {self.tp}, mesh.compile "
                f'{str(self.compile).lower()} and mesh.schedule "{self.schedule}", expected 1, '
                "false and a schedule that goes back over a stage once: between tiles, layers "
                "exchange what parts of matrices and compiled blocks do not have; leave these "
                "out, and use mesh.dp_shard or mesh.pp"
            )
        if self.checkpointing_blocks and self.checkpointing == "none":
            raise ConfigError(
                f"mesh.checkpointing_blocks is {self.checkpointing_blocks}, but "
                'mesh.checkpointing is "none", so that no block computes anything again; leave it '
                "out, or give mesh.checkpointing=full"
            )
        if self.checkpointing == "selective" and self.schedule in SPLIT:
            raise ConfigError(
                f'mesh.checkpointing is "selective" with mesh.schedule "{self.schedule}", which '
                "goes back over a stage twice, and what was kept is there once; choose "
                "mesh.checkpointing=full, or mesh.schedule=interleaved"
            )
        if self.swap_blocks and self.schedule in SPLIT:
            raise ConfigError(
                f'mesh.swap_blocks is {self.swap_blocks} with mesh.schedule "{self.schedule}", '
                "which goes back over a stage twice, so that what came back would stay until the "
                "second time; leave mesh.swap_blocks out, or choose mesh.schedule=interleaved"
            )
        if self.checkpointing == "selective" and self.compile:
            raise ConfigError(
                'mesh.checkpointing is "selective" with mesh.compile=true, but nobody sees the '
                "products within a compiled block, so that all would be computed again; give "
                "mesh.checkpointing=full, or leave it out: a compiler chooses what to keep"
            )
        if self.swap_blocks and self.compile:
            raise ConfigError(
                f"mesh.swap_blocks is {self.swap_blocks} with mesh.compile=true, but a compiled "
                "block keeps what its compiler chose, where copies cannot see it; leave one of "
                "them out"
            )

    @property
    def sharing(self) -> int:
        """Ranks that share a sample: each has a part of a sequence, or a tile."""
        return math.prod(self.tiles) if self.tiles else self.cp


@dataclass(frozen=True, kw_only=True)
class RunConfig(Section):
    """How long a run is, what it writes, and where.

    Attributes:
        epochs: Length of the run.
        max_steps: Ends the run earlier, after so many steps, amid an epoch too; 0: it does not.
        max_tokens: The same of text: at the step that reaches so many tokens.
        evaluate_epochs: Evaluates at the end of every so many epochs, and of the last.
        evaluate_steps: Evaluates every so many steps, too; 0: it does not.
        evaluate_tokens: The same of text, counted in tokens.
        evaluation: Who evaluates: the training ranks, which wait (``"inline"``); a process of rank
            0's node, while they train on (``"beside"``); ``tonari evaluate --follow``, which you
            start, on another node too (``"elsewhere"``).
        seed: Of every random choice.
        deterministic: Takes only kernels of torch that give the same bits each time, and refuses
            operations that have none.
        directory: Where everything goes that the run writes; all nodes must see it.
        checkpoint_epochs: Writes a checkpoint every so many epochs; 0: only at a signal.
        checkpoint_steps: Writes one every so many steps, too, for long epochs; 0: it does not.
        checkpoint_tokens: The same of text, counted in tokens.
        checkpoint_async: Writes checkpoints while training goes on.
        keep_checkpoints: Checkpoints that stay; older ones are removed.
        trust_checkpoints: Reads also what is more than tensors, numbers and text, which may run
            code.
        log_steps: Writes a line of the log every so many steps.
        tensorboard: Writes curves for TensorBoard.
        prometheus: A file that each rank writes for node_exporter, under its own number.
        otel: Sends the same figures by OpenTelemetry.
        wandb: Sends the same figures to this project of Weights & Biases.
        mlflow: Sends the same figures to the MLflow at this URI: a server, a database or a
            directory.
        profile_steps: The first and the last step, of this start of the run, that torch's profiler
            traces.
        peak_tflops: Of a device, for the MFU; 0: as known of it.
        device: Where to compute; ``"auto"``: on GPUs, where there are some.
        timeout_s: Longest wait for another rank.
        live: Trains on when ranks are lost, with the replicas that are left, or what is left of one
            over dp_shard, in the same processes: on CPUs, by a launcher that ends none with the
            first. See docs/live.md.
        verify: Compares the first step of a model of your own with one process of plain torch,
            once: on several ranks, or with ``mesh.checkpointing``. See docs/models.md.
    """

    epochs: Count = 10
    max_steps: Whole = 0
    max_tokens: Whole = 0
    evaluate_epochs: Count = 1
    evaluate_steps: Whole = 0
    evaluate_tokens: Whole = 0
    evaluation: Literal["inline", "beside", "elsewhere"] = "inline"
    seed: Whole = 0
    deterministic: bool = False
    directory: str = "runs/train"
    checkpoint_epochs: Whole = 1
    checkpoint_steps: Whole = 0
    checkpoint_tokens: Whole = 0
    checkpoint_async: bool = False
    keep_checkpoints: Count = 2
    trust_checkpoints: bool = False
    log_steps: Count = 50
    tensorboard: bool = False
    prometheus: str = ""
    otel: bool = False
    wandb: str = ""
    mlflow: str = ""
    profile_steps: tuple[Count, ...] = ()
    peak_tflops: NotNegative = 0.0
    device: Literal["auto", "cpu", "cuda"] = "auto"
    timeout_s: Positive = 300.0
    live: bool = False
    verify: bool = True

    def __post_init__(self) -> None:
        super().__post_init__()
        for name in ("max", "evaluate", "checkpoint"):
            steps, tokens = getattr(self, f"{name}_steps"), getattr(self, f"{name}_tokens")
            if steps and tokens:
                raise ConfigError(
                    f"run.{name}_steps is {steps} and run.{name}_tokens is {tokens}, "
                    "expected one of them; leave the other out"
                )
        try:
            check_path(self.directory, "run.directory")
        except ValueError as error:
            raise ConfigError(error) from error
        traced = self.profile_steps
        if traced and (len(traced) != 2 or traced[0] > traced[1]):
            raise ConfigError(
                f"run.profile_steps is {traced!r}, expected a first and a last step; give for "
                "example [10, 15]"
            )


@dataclass(frozen=True, kw_only=True)
class Config:
    """All settings of a run."""

    data: DataConfig
    model: ModelConfig = field(default_factory=lambda: ModelConfig(kind=GIVEN))
    text: TextConfig = field(default_factory=TextConfig)
    augment: AugmentConfig = field(default_factory=AugmentConfig)
    shuffle: ShuffleConfig = field(default_factory=ShuffleConfig)
    importance: ImportanceConfig = field(default_factory=ImportanceConfig)
    optimizer: OptimizerConfig = field(default_factory=OptimizerConfig)
    mesh: MeshConfig = field(default_factory=MeshConfig)
    recipe: RecipeConfig = field(default_factory=RecipeConfig)
    run: RunConfig = field(default_factory=RunConfig)

    def __post_init__(self) -> None:
        self._check_length()
        if self.mesh.swap_blocks and self.run.device == "cpu":
            raise ConfigError(NO_SWAP.format(self.mesh.swap_blocks, 'run.device is "cpu"'))
        data = self.data
        check_augment(
            self.augment, is_text=data.kind == "text", channels=data.channels,
            image_size=data.image_size, decoded=data.decoded, drop_last=data.drop_last,
        )  # fmt: skip
        check_rescoring(self.augment, rescores=self.importance.rescores)
        self._check_compression()
        is_text = self.data.kind == "text"
        if is_text and self.mesh.tiles:
            raise ConfigError(
                f'mesh.tiles is {list(self.mesh.tiles)} and data.kind is "text", expected none: '
                "text has no tiles; leave it out, and share sequences by mesh.cp"
            )
        check_text(self.text, is_text=is_text, test_fraction=data.test_fraction, cp=self.mesh.cp)
        if not self.model.is_own and (self.model.kind in TEXT_MODELS) != is_text:
            raise ConfigError(
                f'model.kind is "{self.model.kind}" and data.kind is "{self.data.kind}", expected '
                'a gpt or llama for text and another model for images; give data.kind="text" with '
                'model.kind="gpt"'
            )

    def _check_compression(self) -> None:
        kind, mesh = self.optimizer.compress_gradients, self.mesh
        refused = {
            "mesh.pp": mesh.pp > 1, "mesh.cp": mesh.cp > 1, "mesh.tp": mesh.tp > 1,
            "mesh.tiles": mesh.tiles, "mesh.offload": mesh.offload,
            'mesh.dtype="float64"': mesh.dtype == "float64", "run.live": self.run.live,
        }  # fmt: skip
        named = [name for name, given in refused.items() if given]
        if kind != "none" and named:
            raise ConfigError(
                f'optimizer.compress_gradients is "{kind}" with {" and ".join(named)}, but it goes '
                "with mesh.dp_replicate and mesh.dp_shard, in float32 or bfloat16, alone; leave "
                "one of them out"
            )

    def _check_length(self) -> None:
        run, optimizer = self.run, self.optimizer
        for name, tokens in {
            "run.max": run.max_tokens, "run.evaluate": run.evaluate_tokens,
            "run.checkpoint": run.checkpoint_tokens, "optimizer.warmup": optimizer.warmup_tokens,
        }.items():  # fmt: skip
            if tokens and self.data.kind != "text":
                raise ConfigError(
                    f'{name}_tokens is {tokens}, expected 0 where data.kind is "images"; give '
                    f"{name}_steps"
                )
        every = run.evaluate_steps or run.evaluate_tokens
        unit = "steps" if run.evaluate_steps else "tokens"
        if every and not (self.data.test or self.data.test_fraction):
            raise ConfigError(
                f"run.evaluate_{unit} is {every}, but there is nothing to evaluate on; give "
                "data.test, or for text data.test_fraction"
            )
        if run.max_steps or run.max_tokens:
            if optimizer.warmup_epochs:
                raise ConfigError(
                    f"optimizer.warmup_epochs is {optimizer.warmup_epochs}, but the length of the "
                    "run is in steps; give optimizer.warmup_steps"
                )
            if self.importance.drops_by_rate:
                raise ConfigError(
                    'importance.drops is "lr", which goes by epochs, but the length of the run is '
                    "in steps; give the epochs of the drops, or run.epochs alone"
                )
        elif optimizer.warms_up_by_step and optimizer.schedule_by == "epoch":
            raise ConfigError(
                'optimizer.schedule_by is "epoch", but the warm-up ends within one; give '
                "optimizer.schedule_by=step"
            )


NO_SWAP = (
    "mesh.swap_blocks is {}, but {}, where activations are in the host's memory already; leave "
    "mesh.swap_blocks out, or train on a GPU with run.device=cuda"
)

SECTIONS: dict[str, type[Section]] = get_type_hints(Config)


def load_config(path: Path, overrides: Sequence[str] = ()) -> Config:
    """Read a run's settings.

    Args:
        path: TOML file with a table for each section.
        overrides: ``section.key=value``, the value in TOML; what is not TOML is taken as text. A
            kind in place of the file's leaves out the settings that it does not take.

    Raises:
        ConfigError: If the file cannot be read, a key is unknown or missing, or a value is out of
            range.
    """
    tables = read_tables(path)
    try:
        change(tables, [parse_override(override) for override in overrides])
        return build_config(tables)
    except ConfigError as error:
        raise ConfigError(f"{path}: {error}") from error


def read_tables(path: Path, *, example: Path = EXAMPLES / "cifar10.toml") -> dict[str, object]:
    """Read a file's tables, unchecked.

    Args:
        path: Where it lies.
        example: A file like it, for the message.

    Raises:
        ConfigError: If it cannot be read.
    """
    try:
        return toml.loads(path.read_text())
    except (OSError, UnicodeDecodeError, toml.TOMLDecodeError) as error:
        raise ConfigError(
            f"{path}: cannot be read as TOML: {error}; give a file like {example}"
        ) from error


Change = tuple[Sequence[str], object]
"""The keys of a setting, such as ``("data", "cache", "quota")``, and its value."""


def change(tables: dict[str, object], changes: Sequence[Change]) -> None:
    """Set what is to be another than in a file's tables.

    A kind in place of the file's leaves out the settings that it does not take.
    """
    for path, value in changes:
        _leave_out_others(tables, path, value)
    for path, value in changes:
        apply_override(tables, path, value)


def _leave_out_others(tables: Mapping[str, object], path: Sequence[str], kind: object) -> None:
    """Leave out of a file's table what only other kinds than the new one take."""
    named = {"shuffle": SHUFFLE, "importance": POLICY, "model": MODEL}.get(path[0])
    table = tables.get(path[0])
    if not (named and isinstance(table, dict) and list(path[1:]) == ["kind"]):
        return
    if table.get("kind") != kind:
        # They are those of a class of the user's.
        table.pop("args", None)
    if kind in named.kinds or ":" in str(kind):
        takes = named.takes(str(kind)) if kind in named.kinds else ()
        for name in named.all_settings().difference(takes):
            table.pop(name, None)


OF_GIVEN = {"weights", "layers", "args"}
"""Keys of [model] that say nothing of a kind: alone they are of the model that the caller gives."""


def build_config(tables: Mapping[str, object]) -> Config:
    """Check the tables of a file, one for each section.

    Raises:
        ConfigError: If a key is unknown or missing, or a value out of range.
    """
    for section in tables:
        check_known(section, SECTIONS)
    model = tables.get("model")
    if isinstance(model, Mapping) and model and set(model) <= OF_GIVEN:
        tables = {**tables, "model": {"kind": GIVEN, **model}}
    made = {
        name: build_section(made_by, tables.get(name, {}))
        for name, made_by in SECTIONS.items()
        if name != "model" or name in tables
    }
    return Config(**made)  # type: ignore[arg-type]
