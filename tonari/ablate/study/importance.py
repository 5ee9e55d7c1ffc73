"""What an arm's importance policy is, and the scores it goes by: of all replicas in one process."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from dataio.base.seeding import key
from dataio.plan.history import Candidates, Scores, record, score_dtype, unscored
from dataio.plan.policies import Importance, Selection
from dataio.world import World, run_threads, thread_worlds
from tonari.trainer.errors import ConfigError

GROUPS_TIMEOUT_S = 600.0
"""Longest that one sampling group's choice waits for another's."""


@dataclass
class Memory:
    """A policy, and what is remembered of all samples.

    Attributes:
        policy: Which rows an epoch leaves out.
        num_samples: Of all replicas.
        num_epochs: Length of the run.
        fields: dtype[num_samples] each, by sample id: what the policy may ask for by name.
        scores: scores[num_samples], by sample id.
        figures: Of what each sampling group's choice was last.
    """

    policy: Importance
    num_samples: int
    num_epochs: int
    fields: Mapping[str, NDArray[np.generic]] = field(default_factory=dict)
    scores: Scores = field(init=False)
    figures: list[Mapping[str, float]] = field(init=False, default_factory=list)

    def __post_init__(self) -> None:
        self.scores = unscored(self.num_samples, score_dtype(self.policy.columns))

    def _field(self, name: str) -> NDArray[np.generic]:
        if name not in self.fields:
            raise ConfigError(
                f"settings.importance: the policy goes by the field {name!r}, expected one of "
                f"{', '.join(self.fields)}, which a study has; name one of these"
            )
        return self.fields[name]

    @property
    def keeps_scores(self) -> bool:
        """Whether reports change what is selected."""
        return bool(self.policy.columns)

    def select(
        self, groups: Sequence[NDArray[np.int64]], *, seed: int, epoch: int
    ) -> list[Selection]:
        """Select every sampling group's rows of an epoch, as their loaders would, each in a thread.

        Args:
            groups: int64[rows of the group], for each sampling group: The samples in its slots.
            seed: The loaders' seed.
            epoch: Which one.
        """
        before = self.figures or [{} for _ in groups]

        def select_one(held: NDArray[np.int64], world: World) -> Selection:
            rows = Candidates(
                self.scores[held], held, self.num_samples, key(seed, "importance", epoch=epoch),
                lambda values: world.allreduce(values, op="sum", doing="agree on rows to hide"),
                self._field, before[world.rank],
            )  # fmt: skip
            return self.policy.select(rows, epoch=epoch, num_epochs=self.num_epochs)

        worlds = thread_worlds([1] * len(groups), timeout_s=GROUPS_TIMEOUT_S)
        if len(groups) == 1:
            chosen = [select_one(groups[0], worlds[0])]
        else:
            chosen = run_threads(worlds, lambda world: select_one(groups[world.rank], world))
        self.figures = [selection.figures for selection in chosen]
        return chosen


@dataclass
class EpochReports:
    """Takes an epoch's reports on the device, and writes all of them at its end.

    A row is reported once an epoch, so later is as good as at once; nothing waits for the device.
    """

    _parts: list[tuple[NDArray[np.int64], Tensor]] = field(default_factory=list)

    def add(
        self,
        sample_id: NDArray[np.int64],
        valid: NDArray[np.bool_],
        loss: Tensor,
        correct: Tensor,
        confidence: Tensor,
    ) -> None:
        """Take in a step's rows, in any shape; padding is not ``valid``."""
        kept = valid.ravel()
        told = torch.stack([loss.detach().float().ravel(), correct.float(), confidence])
        # float32[3, n]
        values = told if kept.all() else told[:, torch.from_numpy(kept).to(told.device)]
        self._parts.append((sample_id.ravel()[kept], values))

    def write(self, scores: Scores, *, epoch: int) -> None:
        """Record them by sample id; a loss of nan is as inf. Blocks until they are computed."""
        if not self._parts:
            return
        loss, correct, confidence = torch.cat([v for _, v in self._parts], dim=1).cpu().numpy()
        record(
            scores,
            np.concatenate([ids for ids, _ in self._parts]),
            loss=np.nan_to_num(loss, nan=np.inf, posinf=np.inf),
            correct=correct > 0,
            confidence=confidence,
            epoch=epoch,
        )
        self._parts.clear()
