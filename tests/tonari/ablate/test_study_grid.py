"""Grids of a study's file."""

import pytest

from tests.tonari.ablate.test_study_importance import write
from tonari.ablate.study.config import load_study
from tonari.trainer.errors import ConfigError


def test_a_grid_makes_an_arm_of_each_combination(tmp_path):
    path = write(
        tmp_path,
        """
        [arms.a]
        [grid.policies]
        importance = ["kakurenbo", "infobatch"]
        fraction = [0.2, 0.3]
        shuffle = "partial"
        [grid.schedules]
        importance = "kakurenbo"
        alphas = [[1.0], [1.0, 0.5]]
        name = "alphas {alphas}"
        """,
    )
    found = {arm.name: arm.settings for arm in load_study(path).arms}
    assert list(found) == [
        "a",
        "policies, kakurenbo, 0.2", "policies, kakurenbo, 0.3",
        "policies, infobatch, 0.2", "policies, infobatch, 0.3",
        "alphas [1.0]", "alphas [1.0, 0.5]",
    ]  # fmt: skip
    chosen = found["policies, infobatch, 0.2"]
    assert (chosen.importance, chosen.knobs, chosen.shuffle) == (
        "infobatch", {"fraction": 0.2}, "partial",
    )  # fmt: skip
    assert found["alphas [1.0, 0.5]"].knobs == {"alphas": [1.0, 0.5]}


def test_each_arm_of_a_grid_may_be_compared_with_one_of_its_own_values(tmp_path):
    path = write(
        tmp_path,
        """
        [arms.a]
        [grid.uniform]
        shuffle = "partial"
        exchange = [0.1, 0.2]
        name = "uniform {exchange}"
        [grid.chosen]
        shuffle = "partial"
        exchange = [0.1, 0.2]
        epochs = 3
        name = "chosen {exchange}"
        against = "uniform {exchange}"
        """,
    )
    against = {arm.name: arm.baseline for arm in load_study(path).arms}
    assert against["chosen 0.1"] == "uniform 0.1"
    assert against["chosen 0.2"] == "uniform 0.2"


@pytest.mark.parametrize(
    ("grid", "message"),
    [
        ("fraction = []", r"grid.g.fraction is an empty list, .* add some"),
        ("fractoin = [0.1]", r"grid.g.fractoin is unknown; did you mean grid.g.fraction\?"),
        ('name = "b"\nseed = [1, 2]', r"grid.g.seed is unknown"),
        ('name = "b"\nwidth = [4, 8]', r"arm 'b' is there 2 times, .* \{setting\} that varies"),
        ('name = "{lr}"\nwidth = [4, 8]', r"grid.g.name is '\{lr\}': lr is unknown; .* braces"),
        ('name = "{}"\nwidth = [4, 8]', r"grid.g.name is '\{\}': .* braces"),
        ('width = [4, 8]\nagainst = "{lr}"', r"grid.g.against is '\{lr\}': lr is unknown"),
        ("width = [4, 7]", r"arm 'g, 7': settings.width is 7, expected a multiple of 4"),
    ],
)
def test_a_grid_that_makes_no_sense_is_refused(tmp_path, grid, message):
    with pytest.raises(ConfigError, match=message):
        load_study(write(tmp_path, f"[arms.a]\n[grid.g]\n{grid}"))
