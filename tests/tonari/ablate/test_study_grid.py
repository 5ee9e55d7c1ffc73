"""Grids of a study's file."""

from pathlib import Path

import pytest

from tests.tonari.ablate.study import STUDY
from tonari.ablate.study import load_study
from tonari.trainer.errors import ConfigError

BEGIN = STUDY[: STUDY.index("[arms.")].replace('"plain"', '"a"') + "[arms.a]\n"


def write(tmp_path: Path, text: str) -> Path:
    path = tmp_path / "study.toml"
    path.write_text(BEGIN + text)
    return path


def test_a_grid_makes_an_arm_of_each_combination(tmp_path):
    path = write(
        tmp_path,
        """
        [grid.policies]
        importance.kind = ["kakurenbo", "infobatch"]
        importance.fraction = [0.2, 0.3]
        shuffle.exchange = 0.2
        [grid.schedules]
        importance.kind = "kakurenbo"
        importance.alphas = [[1.0], [1.0, 0.5]]
        importance.drops = [[1]]
        name = "{{alphas}} {importance.alphas}"
        """.replace("importance.drops = [[1]]", ""),
    )
    found = {arm.name: arm.settings for arm in load_study(path).arms}
    assert list(found) == [
        "a",
        "policies, kakurenbo, 0.2", "policies, kakurenbo, 0.3",
        "policies, infobatch, 0.2", "policies, infobatch, 0.3",
        "{alphas} [1.0]", "{alphas} [1.0, 0.5]",
    ]  # fmt: skip
    chosen = found["policies, infobatch, 0.2"]
    assert {name: its for name, its in chosen.items() if name not in found["a"]} == {
        "importance.kind": "infobatch", "importance.fraction": 0.2, "shuffle.exchange": 0.2,
    }  # fmt: skip
    assert found["{alphas} [1.0, 0.5]"]["importance.alphas"] == [1.0, 0.5]


def test_each_arm_of_a_grid_may_be_compared_with_one_of_its_own_values(tmp_path):
    path = write(
        tmp_path,
        """
        [grid.uniform]
        shuffle.exchange = [0.1, 0.2]
        name = "uniform {shuffle.exchange}"
        [grid.chosen]
        shuffle.exchange = [0.1, 0.2]
        run.epochs = 3
        name = "chosen {shuffle.exchange}"
        against = "uniform {shuffle.exchange}"
        control = "epochs"
        """,
    )
    arms = {arm.name: arm for arm in load_study(path).arms}
    assert arms["chosen 0.1"].baseline == "uniform 0.1"
    assert arms["chosen 0.2"].baseline == "uniform 0.2"
    assert [arm.control for arm in arms.values()] == ["", "", "", "epochs", "epochs"]


@pytest.mark.parametrize(
    ("grid", "message"),
    [
        ("run.epochs = []", r"grid.g.run.epochs is an empty list, .* add some"),
        ("runn.epochs = [1]", r"grid.g.runn is unknown; did you mean grid.g.run\?"),
        ("run.epohcs = [1, 2]", r"arm 'g, 1': run.epohcs is unknown; did you mean run.epochs\?"),
        ("seed = [1, 2]", r"grid.g.seed is unknown"),
        ('name = "b"\nrun.epochs = [4, 8]', r"arm 'b' is there 2 times, .* \{section.key\} that"),
        ('name = "{lr}"\nrun.epochs = [4]', r"grid.g.name is '\{lr\}', expected in braces what"),
        ('name = "{}"\nrun.epochs = [4, 8]', r"grid.g.name is '\{\}', expected .*run.epochs"),
        ("name = 3\nrun.epochs = [4, 8]", r"grid.g.name is 3, expected text such as"),
        ('run.epochs = [4]\nagainst = "{lr}"', r"grid.g.against is '\{lr\}', expected in braces"),
        ("run.epochs = [4, 0]", r"arm 'g, 0': run.epochs is 0, expected"),
    ],
)
def test_a_grid_that_makes_no_sense_is_refused(tmp_path, grid, message):
    with pytest.raises(ConfigError, match=message):
        load_study(write(tmp_path, f"[grid.g]\n{grid}"))
