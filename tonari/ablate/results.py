"""A study's cells as its report asks for them: an arm's figures by seed."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from tonari.ablate.measure import ACCURACY, Measure, measure_of
from tonari.ablate.study import Study

CellFile = Mapping[str, object]
"""A cell's results, as its JSON file holds them."""


@dataclass(frozen=True)
class ArmResults:
    """An arm and its cells that are there.

    Attributes:
        name: Of the arm.
        baseline: The arm that it is compared with.
        control: Which honest control it belongs to, see `Arm`.
        settings: As the study has them.
        cells: By seed.
        measure: What it is judged by.
    """

    name: str
    baseline: str
    control: str
    settings: Mapping[str, object]
    cells: Mapping[int, CellFile]
    measure: Measure = ACCURACY

    @property
    def is_policy(self) -> bool:
        """Whether the arm leaves rows out and is to be held against the controls."""
        return self.settings.get("importance.kind", "full") != "full" and not self.control

    @property
    def final(self) -> dict[int, float]:
        """Test result after the last epoch by seed, in points of the measure."""
        found = self.figures(self.measure.figure)
        return {seed: self.measure.points(value) for seed, value in found.items()}

    def figures(self, name: str) -> dict[int, float]:
        """A figure by seed, of the cells that have it: of some nothing is known to be wrong."""
        return {
            seed: number(cell, name)
            for seed, cell in sorted(self.cells.items())
            if cell.get(name) is not None
        }

    def curve(self, seed: int) -> list[tuple[float, float]]:
        """Pairs of seconds of training and test result in points, where it was tested."""
        name, points = self.measure.figure, self.measure.points
        return [
            (number(point, "train_s"), points(number(point, name)))
            for point in _points(self.cells[seed])
            if point.get(name) is not None
        ]

    def seconds_to(self, target_points: float) -> dict[int, float]:
        """Seconds of training until a test first shows the result; seeds that reach it."""
        first = {
            seed: next((s for s, reached in self.curve(seed) if reached >= target_points), None)
            for seed in sorted(self.cells)
        }
        return {seed: seconds for seed, seconds in first.items() if seconds is not None}


def gather_arms(study: Study, found: Mapping[str, Mapping[int, CellFile]]) -> list[ArmResults]:
    """Put each arm's cells beside what the study says of it, in the study's order."""
    return [
        ArmResults(
            arm.name,
            arm.baseline,
            arm.control,
            arm.settings,
            found.get(arm.name, {}),
            measure_of(study),
        )
        for arm in study.arms
    ]


def number(document: Mapping[str, object], name: str) -> float:
    """Take a number out of a document."""
    value = document[name]
    assert isinstance(value, int | float), f"{name} is {value!r}"
    return float(value)


def _points(cell: CellFile) -> Sequence[Mapping[str, object]]:
    points = cell.get("epochs")
    return points if isinstance(points, list) else []
