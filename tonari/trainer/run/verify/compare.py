"""What a mesh and one process have that differs: pure, tensors in, findings out."""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor

from tonari.trainer.run.verify.plain import Key
from tonari.trainer.run.verify.recording import RankState

FIGURES = (
    "losses", "gradient norms", "weights", "buffers", "optimizer", "average", "evaluation",
    "resume", "whole batch", "draws",
)  # fmt: skip
"""What is compared, in the order in which a difference is looked for."""

NARROW = 1e-6
"""Tolerance at least of numbers that are kept in less than double precision, as some optimizers
keep products of their settings."""

WHOLE = 1e-3
"""Least scale of a tensor's differences, of the largest number among all tensors of its kind."""


@dataclass(frozen=True)
class TensorDifference:
    """Something that a mesh has otherwise than one process.

    Attributes:
        figure: Which of ``FIGURES``.
        when: After which step, or as what.
        name: Of the tensor, or of the figure.
        where: Where it belongs: the kind of module, stage, parts, and who holds it.
        apart: Of the largest number of the tensor.
        found, expected: The values that are furthest apart: the mesh's, and one process's.
    """

    figure: str
    when: str
    name: str
    where: str
    apart: float
    found: float
    expected: float

    @property
    def words(self) -> str:
        """Say it in one line."""
        lies = f" ({self.where})" if self.where else ""
        if self.found != self.found and self.expected != self.expected:
            return f"{self.when}: {self.name}{lies}"
        return (
            f"{self.when}: {self.name}{lies} is {self.found:.10g}, in one process "
            f"{self.expected:.10g}, {self.apart:.2g} of the largest apart"
        )


@dataclass
class Compared:
    """What was compared so far.

    Attributes:
        tolerance: Differences up to this share of the largest number are rounding.
        apart: By figure, the largest difference seen.
        differences: Those beyond the tolerance, in the order of time, then of the module.
        count: How many tensors and figures were compared.
        left_out: By figure, why nothing was compared.
    """

    tolerance: float
    apart: dict[str, float] = field(default_factory=dict)
    differences: list[TensorDifference] = field(default_factory=list)
    count: int = 0
    left_out: dict[str, str] = field(default_factory=dict)

    def value(
        self, figure: str, when: str, name: str, found: float, expected: float, *,
        where: str = "", scale: float = 0.0,
    ) -> None:  # fmt: skip
        """Compare two numbers."""
        self.tensor(
            figure, when, name, torch.tensor(found, dtype=torch.float64),
            torch.tensor(expected, dtype=torch.float64), where=where, scale=scale,
        )  # fmt: skip

    def tensor(
        self, figure: str, when: str, name: str, found: Tensor, expected: Tensor, *,
        where: str = "", scale: float = 0.0,
    ) -> None:  # fmt: skip
        """Compare two tensors.

        Args:
            figure, when, name, where: See `TensorDifference`.
            found: Of the mesh.
            expected: Of one process.
            scale: Least number of which differences are shares.
        """
        self.count += 1
        if found.shape != expected.shape:
            shapes = f"{list(found.shape)} in place of {list(expected.shape)}"
            self._differ(
                TensorDifference(figure, when, f"{name} is {shapes}", where, *3 * [math.nan])
            )
            return
        if not expected.numel():
            return
        wide = torch.complex128 if expected.is_complex() else torch.float64
        own, other = found.to(wide).flatten(), expected.to(wide).flatten()
        gaps = (own - other).abs()
        # Where both are the same infinity, or both are no number, they are equal.
        same = (own == other) | (own.isnan() & other.isnan())
        gaps = gaps.masked_fill(same, 0).nan_to_num(math.inf)
        worst = int(gaps.argmax())
        largest = max(float(other.abs().nan_to_num(0, 0).max()), scale, 1e-30)
        apart = float(gaps[worst]) / largest
        self.apart[figure] = max(self.apart.get(figure, 0.0), apart)
        narrow = any(
            each.is_floating_point() and each.dtype != torch.float64 for each in (found, expected)
        )
        if not apart <= (max(self.tolerance, NARROW) if narrow else self.tolerance):
            values = [float(each[worst].real) for each in (own, other)]
            self._differ(TensorDifference(figure, when, name, where, apart, *values))

    def state(
        self, when: str, ranks: Sequence[RankState], expected: Sequence[Mapping[Key, Tensor]],
        *, figure: str = "",
    ) -> None:  # fmt: skip
        """Compare what ranks hold.

        Args:
            when: After which step.
            ranks: What each held.
            expected: What each replica has in one process.
            figure: Of all of it; optional, defaults to that of each kind.
        """
        scales: dict[str, float] = {}
        for (kind, _), value in expected[0].items():
            if value.numel() and value.dtype.is_floating_point:
                scales[kind] = max(scales.get(kind, 0.0), float(value.abs().max()))
        seen: set[Key] = set()
        # In the order of the module, whichever rank has it.
        order = {key: number for number, key in enumerate(expected[0])}
        rows = [(rank, replica, each) for rank, replica, its in ranks for each in its]
        rows.sort(key=lambda row: order.get((row[2].kind, row[2].name), len(order)))
        for rank, replica, each in rows:
            key = each.kind, each.name
            seen.add(key)
            where = f"{each.module}, {each.shown}, {rank}"
            named = (
                each.name if each.kind in ("weight", "buffer") else f"{each.kind} of {each.name}"
            )
            its = figure or _figure(each.kind)
            whole = expected[replica].get(key)
            if whole is None:
                words = f"{named}: the mesh has it, one process has none"
                self._differ(TensorDifference(its, when, words, where, *3 * [math.nan]))
                continue
            self.tensor(
                its, when, named, each.value, each.part_of(whole), where=where,
                scale=WHOLE * scales.get(each.kind, 0.0),
            )  # fmt: skip
        for key in expected[0].keys() - seen:
            words = f"{' of '.join(key) if key[0] not in ('weight', 'buffer') else key[1]}: no rank"
            its = figure or _figure(key[0])
            self._differ(TensorDifference(its, when, f"{words} has it", "", *3 * [math.nan]))

    def leave_out(self, figure: str, why: str) -> None:
        """Say why something is not compared; what differs in it says nothing."""
        self.left_out[figure] = why
        self.differences = [each for each in self.differences if each.figure != figure]

    def differs(self, *figures: str) -> bool:
        """Say whether any of these differs so far."""
        return any(each.figure in figures for each in self.differences)

    def verdicts(self) -> dict[str, str]:
        """Say of each figure what came out: equal, how many differ, or why it was left out."""
        found: dict[str, str] = {}
        for figure in FIGURES:
            number = sum(each.figure == figure for each in self.differences)
            if number:
                found[figure] = f"{number} differ"
            elif figure in self.left_out:
                found[figure] = "-"
            else:
                apart = self.apart.get(figure, 0.0)
                found[figure] = f"equal ({apart:.0e})" if apart > 1e-12 else "equal"
        return found

    def _differ(self, difference: TensorDifference) -> None:
        self.apart[difference.figure] = max(
            self.apart.get(difference.figure, 0.0), abs(difference.apart) or 0.0
        )
        self.differences.append(difference)


def _figure(kind: str) -> str:
    return {"weight": "weights", "buffer": "buffers", "average": "average"}.get(kind, "optimizer")
