"""The first step of an own model on a mesh, or that computes layers again, beside plain torch.

It takes seconds, once. The step is the run's own: its rows, its losses and the norm of its
gradients are kept as it passes, and rank 0 does the same in plain torch. A difference ends the
run before its second step.
"""

import hashlib
import inspect
import json
import logging
import math
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import torch
import torch.distributed as dist
from torch import Tensor

from dataio.base.cgroup import memory_room
from dataio.rows.samples import Batch
from tonari.trainer.checkpoint.agree import file_group, from_rank_0
from tonari.trainer.checkpoint.export import read_checkpoint
from tonari.trainer.config.config import Config
from tonari.trainer.errors import ConfigError
from tonari.trainer.mesh.mesh import AXES
from tonari.trainer.models import Adapted, StagedModel
from tonari.trainer.run.observed import Begun, Observer
from tonari.trainer.run.step import Step, TakesReports
from tonari.trainer.run.verify.plain import Plain, plain_of
from tonari.trainer.run.verify.recording import Columns, Noting, tensors_of

logger = logging.getLogger(__name__)

MARKER = "verified.json"
"""In a run's directory: what was verified, so that it is not done again."""

LONGEST_S = 15.0
"""Of the plain step; what it did not come to is not compared."""

ROOM = 0.25
"""Of the memory that is free, for the weights, the gradients and a copy of them."""

TOLERANCES = {"float64": (1e-6, 1e-6), "float32": (1e-3, 2e-3), "bfloat16": (0.05, 0.2)}
"""By precision: of the loss, and of the norm of the gradients."""


@dataclass(frozen=True)
class _ComparedStep:
    """A rank's part of the first step."""

    replica: int
    reads: bool
    scores: bool
    batches: list[Columns]
    losses: list[Tensor]


def is_due(config: Config, *, world_size: int) -> bool:
    """Say whether a run's settings ask for the check: an own model, spread or computed again."""
    mesh = config.mesh
    # A block that draws or counts in its own way does otherwise when it is computed again.
    other = world_size > 1 or mesh.checkpointing != "none"
    # What draws there for parts of a sequence, one process cannot draw.
    whole = mesh.sharing == 1 and not mesh.sequence_parallel
    return config.run.verify and config.model.is_own and other and whole


class FirstStep(Observer):
    """Compares the first step of this start with plain torch, unless that was done before."""

    def __init__(self) -> None:
        self._run: Begun | None = None
        self._key = ""
        self._batches: list[Columns] = []
        self._losses: list[Tensor] = []

    def begin(self, run: Begun) -> None:
        """Decide whether to compare. Collective."""
        if not is_due(run.config, world_size=run.job.world.world_size):
            return
        self._group = file_group()
        pipeline = run.pipeline
        number = sum(each.numel() for part in pipeline.parts for each in part.parameters())
        counts: list[tuple[int, int]] = [(0, 0)] * dist.get_world_size()
        dist.all_gather_object(
            counts, (pipeline.mesh.get_local_rank(AXES[0]), number), group=self._group
        )
        # The ranks at one coordinate of pp have the same parameters, or parts of them.
        num_bytes = sum(dict(counts).values()) * 4
        self._key = _key(run, pipeline.parts[0])
        reason = ""
        if run.job.world.rank == 0:
            reason = "done" if self._key in _verified(run.config) else _no_room(run, num_bytes)
            if run.config.optimizer.compress_gradients == "powersgd":
                reason = "PowerSGD changes gradients"
        reason = from_rank_0(reason, self._group)
        if not reason:
            self._run = run
        elif reason != "done" and run.job.world.rank == 0:
            logger.info("[rank 0] the first step is not verified: %s; run `tonari verify`", reason)

    @property
    def wants_norm(self) -> bool:
        return self._run is not None

    def reports(self, loader: TakesReports) -> TakesReports:
        """Note the losses of the first step."""
        return loader if self._run is None else Noting(loader, self._losses)

    def stepping(self, batches: Sequence[Batch]) -> None:
        """Copy what the first step is given."""
        if self._run is not None:
            place = self._run.pipeline.place
            own = place.reads or place.rank == place.scorer
            self._batches = [tensors_of(batch) if own else {} for batch in batches]

    def step(self, batches: Sequence[Batch], step: Step, *, number: int, lr: float) -> None:
        """Compare the first step, then nothing. Collective."""
        run, self._run = self._run, None
        if run is None:
            return
        assert step.norm is not None, "asked for"
        place, world = run.pipeline.place, run.job.world
        seen = _ComparedStep(
            place.replica, place.reads, place.rank == place.scorer, self._batches, self._losses
        )
        everyone: list[_ComparedStep | None] | None = None
        if world.rank == 0:
            everyone = [None] * world.world_size
        run.job.watchdog.rest()
        dist.gather_object(seen, everyone, group=self._group)
        words = ""
        if everyone is not None:
            words = _compare(run, [each for each in everyone if each], float(step.norm), number)
        words = from_rank_0(words, self._group)
        if words:
            raise ConfigError(words)
        if world.rank == 0:
            _note(run.config, self._key)


def _compare(run: Begun, ranks: Sequence[_ComparedStep], norm: float, number: int) -> str:
    """Do the step in plain torch; say what differs, nothing where nothing does."""
    started = time.monotonic()
    place = run.pipeline.place
    try:
        with torch.random.fork_rng(devices=[]):
            weights = None if run.checkpoint is None else _weights(run.checkpoint)
            plain = Plain(
                run.config, run.own, replicas=place.num_replicas,
                microbatches=run.pipeline.num_microbatches, weights=weights, device=run.job.device,
            )  # fmt: skip
            batches = [
                [_joined(ranks, replica, position) for replica in range(place.num_replicas)]
                for position in range(len(ranks[0].batches))
            ]
            losses, expected = plain.gradients(batches, number=number, limit_s=LONGEST_S)
    except Exception as error:
        logger.warning(
            "[rank 0] the first step cannot be verified, as the model does not run in one process "
            "(%s: %s); run `tonari verify`, or set run.verify=false",
            type(error).__name__, error,
        )  # fmt: skip
        return ""
    found: list[Tensor] = []
    wanted: list[Tensor] = []
    for position, each in enumerate(losses):
        for replica, its in enumerate(each):
            (scorer,) = [rank for rank in ranks if rank.scores and rank.replica == replica]
            valid = batches[position][replica]["sample_id"][: len(its)] >= 0
            wanted.append(its.cpu()[valid].double())
            found.append(scorer.losses[position][: len(its)][valid].double())
    pairs = {"loss": (float(torch.cat(found).mean()), float(torch.cat(wanted).mean()))}
    if math.isfinite(expected):
        pairs["gradient norm"] = (norm, expected)
    rounds = run.config.optimizer.compress_gradients == "bfloat16"
    precision = "bfloat16" if rounds else run.config.mesh.dtype
    off = [
        f"its {name} is {here:.8g}, in one process {there:.8g}"
        for (name, (here, there)), most in zip(
            pairs.items(), TOLERANCES[precision], strict=False
        )
        if abs(here - there) > most * max(abs(there), 1e-12)
    ]  # fmt: skip
    took = time.monotonic() - started
    if not off:
        logger.info(
            "[rank 0] the first step is what plain torch trains in one process: %s (%.1f s)",
            " and ".join(pairs), took,
        )  # fmt: skip
        return ""
    named = [
        f"mesh.{axis}={size}" for axis, size in zip(AXES, place.sizes, strict=True) if size > 1
    ]
    again, hint = run.config.mesh.checkpointing, ""
    if again != "none":
        named.append(f"mesh.checkpointing={again}")
        hint = (
            "; a layer that is computed again has to do the same twice, whatever it counts, and "
            "draw by torch's own generators alone"
        )
    settings = " ".join(named)
    return (
        f"the first step on this mesh ({settings}) is not what one process of plain torch trains: "
        f"{'; '.join(off)}; expected the same but for rounding{hint}. "
        f"`tonari verify CONFIG {settings}` names the first tensor that differs and where it "
        "belongs; choose another mesh, or change the model. To train "
        "all the same, set run.verify=false"
    )


def _joined(ranks: Sequence[_ComparedStep], replica: int, position: int) -> Columns:
    found: Columns = {}
    for rank in ranks:
        if rank.replica == replica and (rank.reads or rank.scores):
            found |= rank.batches[position]
    return found


def _weights(checkpoint: Path) -> dict[str, Tensor]:
    read = read_checkpoint(checkpoint)["model"]
    return {name: value for name, value in read.items() if isinstance(value, Tensor)}


def _no_room(run: Begun, num_bytes: int) -> str:
    """Say why the model does not fit into rank 0's memory a second time; nothing where it does."""
    device = run.job.device
    room = torch.cuda.mem_get_info(device)[0] if device.type == "cuda" else memory_room()
    if room is None or 3 * num_bytes <= ROOM * room:
        return ""
    return f"3 times its {num_bytes:,} bytes of weights take more than {ROOM:.0%} of what is free"


def _key(run: Begun, part: torch.nn.Module) -> str:
    """Name what is verified: the model's source and settings, and the mesh."""
    model = plain_of(part) if isinstance(part, StagedModel) else part
    kind = type(model)
    try:
        source = Path(inspect.getfile(kind)).read_bytes()
    except (OSError, TypeError):
        source = b""
    plan = sorted(part._plan) if isinstance(part, Adapted) else ()
    batch = run.config.data.batch_size, run.config.optimizer.accumulate
    marks = [kind.__qualname__, run.config.model, run.config.mesh, plan, batch]
    marks.append(run.pipeline.place.sizes)
    return hashlib.sha256(source + repr(marks).encode()).hexdigest()[:32]


def _verified(config: Config) -> list[str]:
    try:
        found = json.loads((Path(config.run.directory) / MARKER).read_text())
    except (OSError, ValueError):
        return []
    return found if isinstance(found, list) else []


def _note(config: Config, key: str) -> None:
    keys = [*_verified(config), key]
    (Path(config.run.directory) / MARKER).write_text(json.dumps(keys))
