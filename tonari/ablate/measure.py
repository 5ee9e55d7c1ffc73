"""What the arms of a study are judged by: the accuracy, or the loss."""

from dataclasses import dataclass

from tonari.ablate.study import Study

POINTS = 100.0
"""Points (hundredths) of an accuracy of 1, or of a nat."""


@dataclass(frozen=True)
class Measure:
    """A figure of cells and of their epochs, in points, of which more is better.

    Attributes:
        figure: Its name in a cell's file and in each of its ``epochs``.
        noun: What sentences call it.
        column: The table's heading; ``difference`` is that of differences.
        points_of_one: Points of a figure of 1; below 0 where less of the figure is better.
        shown_of_point: What the table shows of a point.
        axis: The plots' label.
    """

    figure: str
    noun: str
    column: str
    difference: str
    points_of_one: float
    shown_of_point: float
    axis: str

    def points(self, value: float) -> float:
        """Turn a cell's figure into points."""
        return self.points_of_one * value

    def shown(self, points: float) -> float:
        """Turn points into what tables and plots show."""
        return self.shown_of_point * points


ACCURACY = Measure(
    "accuracy", "accuracy", "test accuracy, %", "difference, points", POINTS, 1.0,
    "test accuracy, %",
)  # fmt: skip
LOSS = Measure(
    "test_loss", "loss", "test loss, nats", "lower by, 0.01 nats", -POINTS, -1 / POINTS,
    "test loss, nats (lower is better)",
)  # fmt: skip
MEASURES = (ACCURACY, LOSS)


def measure_of(study: Study) -> Measure:
    """Choose what a study is judged by."""
    of_text = any(
        isinstance(data := arm.tables.get("data"), dict) and data.get("kind") == "text"
        for arm in study.arms
    )
    return LOSS if (study.study.measure or ("loss" if of_text else "")) == "loss" else ACCURACY
