"""Robust losses, averaged weights, an oracle, a validation split, and policies of one's own."""

import inspect
from pathlib import Path

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import importance.keep_agreed
from importance import Auto, KeepAgreed, RandomPrune
from tests.tonari.ablate.study import make_study
from tests.tonari.ablate.test_study import blobs, drawn, small_model
from tonari.ablate.cells import read_cells, train_missing
from tonari.ablate.controls import CONTROLS
from tonari.ablate.progress import Event
from tonari.ablate.results import number
from tonari.ablate.study.config import SettingsConfig, load_study
from tonari.ablate.study.corrupt import corrupt
from tonari.ablate.study.data import draw_subsets
from tonari.ablate.study.identity import code_key
from tonari.ablate.study.replicas import OneModel
from tonari.ablate.study.run import CellResult, train_cell
from tonari.trainer.config.settings import build_section
from tonari.trainer.errors import ConfigError

EXAMPLE = Path(__file__).parents[3] / "examples" / "selection_study.toml"
OWN = """
from dataclasses import dataclass

import numpy as np

from dataio.plan.policies import Selection


@dataclass(frozen=True)
class FirstClass:
    fraction: float = 0.5
    columns = ("loss",)
    by_fields = ("{field}",)

    def select(self, rows, *, epoch, num_epochs):
        labels = rows.by_field("{field}")[rows.sample_id]
        mine = np.flatnonzero(labels == 0)
        return Selection(hidden=mine[: int(self.fraction * len(mine))])

    def due(self, hidden, *, epoch):
        return hidden[:0]
"""


def cell(*, noise: float = 0.0, **changed: object) -> CellResult:
    settings = {
        "replicas": 4,
        "batch_size": 5,
        "width": 4,
        "epochs": 8,
        "lr": 0.05,
        "shuffle": "global",
    }
    settings |= changed
    found = corrupt(blobs(200), num_classes=4, seed=0, noise=noise)
    return train_cell(
        build_section(SettingsConfig, settings),
        found, blobs(90, seed=1), num_classes=4, seed=0,
    )  # fmt: skip


def test_the_generalised_loss_is_the_one_published_and_its_losses_of_rows_are_cross_entropy():
    images, labels, weight = drawn(2, 3)
    model, plain = small_model(), small_model()
    trained = OneModel(model, lr=0.1, momentum=0.0, weight_decay=0.0, gce_q=0.7)
    _, losses, logits = trained.step_rows(images, labels, weight)
    found = plain(images.flatten(0, 1))
    p = found.softmax(dim=1).gather(1, labels.flatten()[:, None])[:, 0]
    (((1 - p**0.7) / 0.7) * weight.flatten()).mean().backward()
    for after, before in zip(model.parameters(), plain.parameters(), strict=True):
        assert torch.allclose(after, before - 0.1 * gradient(before))
    assert torch.allclose(losses, F.cross_entropy(found, labels.flatten(), reduction="none"))
    assert torch.allclose(logits, found)


def head(model: nn.Module) -> Tensor:
    """Copy the last layer's weights."""
    return model.get_parameter("head.weight").detach().clone()


def gradient(parameter: nn.Parameter) -> Tensor:
    assert parameter.grad is not None
    return parameter.grad


def test_averaged_weights_are_tested_and_leave_the_training_alone():
    images, labels, weight = drawn(2, 3)
    plain, averaged = (
        OneModel(small_model(), lr=0.1, momentum=0.0, weight_decay=0.0, ema=ema)
        for ema in (0.0, 0.5)
    )
    seen = [head(plain.model)]
    for _ in range(3):
        for replicas in (plain, averaged):
            replicas.step(images, labels, weight)
        seen.append(head(plain.model))
    assert torch.equal(head(plain.model), head(averaged.model))
    wanted = seen[0]
    for steps, weights in enumerate(seen[1:], start=1):
        kept = min(0.5, (1 + steps) / (10 + steps))
        wanted = kept * wanted + (1 - kept) * weights
    assert torch.allclose(head(averaged.tested_model()), wanted)
    assert torch.equal(head(plain.tested_model()), seen[-1])


def test_an_arm_of_averaged_weights_and_one_of_a_robust_loss_learn():
    assert cell(ema=0.9, min_lr=0.005, norm="batch").accuracy > 0.5
    assert cell(loss="generalised").accuracy > 0.5


def test_the_rate_ends_where_it_was_set_to_and_not_above_where_it_begins():
    ended = [cell(min_lr=last, epochs=8, momentum=0.0).points[-1].loss for last in (0.0, 0.045)]
    assert ended[0] != ended[1]
    with pytest.raises(ConfigError, match=r"min_lr is 0.1, expected at most settings.lr = 0.05"):
        cell(min_lr=0.1)


def test_the_oracle_hides_what_is_wrong_and_nothing_else():
    found = cell(noise=0.3, importance="tonari.ablate.study.oracle:Oracle", control="oracle")
    assert (found.hidden_precision, found.hidden_recall) == (1.0, 1.0)
    assert found.hidden_fraction == pytest.approx(0.3)


def test_what_the_model_calls_wrong_is_mostly_what_is_wrong():
    found = cell(noise=0.3, importance="keep_agreed", begins=4, epochs=12)
    assert found.hidden_precision is not None
    assert found.hidden_precision > 0.6
    assert [point.hidden_fraction > 0 for point in found.points] == [False] * 4 + [True] * 8


def test_the_cost_in_rows_is_that_of_the_rows_and_of_all_else():
    full, hiding = cell(), cell(importance="kakurenbo", fraction=0.5, tau=0.2)
    never = cell(importance="kakurenbo", fraction=0.5, tau=0.2, refresh_every=0)
    for result in (full, hiding, never):
        assert result.cost_rows > result.rows_trained
    # What a row is passed forward for costs more than nothing, and less than training it
    assert hiding.cost_rows < hiding.rows_trained + hiding.rows_refreshed + 400


def test_validation_images_are_none_that_train_and_follow_from_the_seed():
    data = blobs(60)
    train, validation = draw_subsets(data, 40, 15, seed=3)
    assert (len(train.labels), len(validation.labels)) == (40, 15)
    told = {image.tobytes() for image in train.images}
    assert not told & {image.tobytes() for image in validation.images}
    again = draw_subsets(data, 40, 15, seed=3)[1]
    assert np.array_equal(validation.images, again.images)
    # The same are trained on with and without
    assert np.array_equal(train.images, draw_subsets(data, 40, 0, seed=3)[0].images)
    rest, _ = draw_subsets(data, 0, 15, seed=3)
    assert len(rest.labels) == 45


@pytest.mark.parametrize(("train", "validation"), [(50, 11), (0, 60), (0, 61)])
def test_a_split_that_leaves_nothing_is_refused(train, validation):
    with pytest.raises(ConfigError, match=rf"validation_samples {validation}, but there are 60"):
        draw_subsets(blobs(60), train, validation, seed=0)


def test_with_a_validation_split_the_test_images_are_not_looked_at(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    seen: list[int] = []
    real = train_cell

    def watched(settings, train, test, **rest):
        seen.append(len(test.labels))
        return real(settings, train, test, **rest)

    monkeypatch.setattr("tonari.ablate.cells.train_cell", watched)
    overrides = ("data.validation_samples=16", "data.noise=0.2", "study.seeds=1")
    study = load_study(make_study(tmp_path), overrides)
    train_missing(
        study, study.cells(), tmp_path / "out", command="", call="", tell=lambda event: None
    )
    assert seen == [16, 16]
    assert len(read_cells(study, tmp_path / "out")) == 2
    plain = load_study(tmp_path / "study.toml")
    assert not {c.digest for c in plain.cells()} & {c.digest for c in study.cells()}


def own_study(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, arm: str, field: str) -> Path:
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend(str(tmp_path))
    (tmp_path / f"own_{field}.py").write_text(OWN.format(field=field))
    path = make_study(tmp_path)
    path.write_text(path.read_text() + f"[arms.own]\n{arm}\n")
    return path


def test_a_policy_of_ones_own_is_an_arm_with_keys_of_its_own(tmp_path, monkeypatch):
    arm = 'importance = "own_label:FirstClass"\nargs = {fraction = 1.0}'
    study = load_study(own_study(tmp_path, monkeypatch, arm, "label"), ("study.seeds=1",))
    (mine,) = [one for one in study.cells() if one.arm.name == "own"]
    train_missing(study, [mine], tmp_path / "out", command="", call="", tell=lambda event: None)
    (found,) = read_cells(study, tmp_path / "out")["own"].values()
    assert 0 < number(found, "hidden_fraction") == pytest.approx(0.25, abs=0.1)


@pytest.mark.parametrize(
    ("arm", "message"),
    [
        ('importance = "nowhere:Policy"', "arm 'own': settings.importance: .*cannot be imported"),
        (
            'importance = "random"\nargs = {a = 1}',
            'settings.args is given, but settings.importance "random" takes fraction, delta only',
        ),
        (
            'importance = "own_label:FirstClass"\nargs = {a = 1}',
            "settings.args.a is unknown; did y",
        ),
        ('importance = "own_label:FirstClass"\nfraction = 0.5', "give settings.args.fraction"),
        ('loss = "generalised"\nupdate = "average"', "settings.loss or settings.ema is set with"),
        ('ema = 0.9\nnorm = "batch"\nrunning = "first"', "with the batch statistics of one"),
    ],
)
def test_an_arm_that_cannot_be_made_is_named(tmp_path, monkeypatch, arm, message):
    with pytest.raises(ConfigError, match=message):
        load_study(own_study(tmp_path, monkeypatch, arm, "label"))


def test_a_field_that_a_study_does_not_have_is_named(tmp_path, monkeypatch):
    arm = 'importance = "own_colour:FirstClass"'
    study = load_study(own_study(tmp_path, monkeypatch, arm, "colour"), ("study.seeds=1",))
    mine = [one for one in study.cells() if one.arm.name == "own"]
    told: list[Event] = []
    train_missing(study, mine, tmp_path / "out", command="", call="", tell=told.append)
    (error,) = [event.error for event in told if event.error]
    assert "goes by the field 'colour', expected one of label, is_wrong, is_copy" in error


def test_a_policy_that_hands_on_to_another_has_cells_of_both_codes(monkeypatch):
    before = code_key(Auto()), code_key(KeepAgreed()), code_key(RandomPrune())
    source = inspect.getsource

    def changed(module: object) -> str:
        edited = "\nCHANGED = 1\n" if module is importance.keep_agreed else ""
        return source(module) + edited  # type: ignore[arg-type]

    monkeypatch.setattr(inspect, "getsource", changed)
    now = code_key(Auto()), code_key(KeepAgreed()), code_key(RandomPrune())
    assert [one != other for one, other in zip(before, now, strict=True)] == [True, True, False]


def test_the_example_holds_every_control_and_freezes_what_its_claim_is_of():
    for full in (False, True):
        study = load_study(EXAMPLE, full=full)
        settings = {arm.name: arm.settings for arm in study.arms}
        assert {one.control for one in settings.values()} == {"", "oracle", *CONTROLS} - {"highest"}
        claimed = settings["keep agreed, half"]
        policy = claimed.make_importance()
        assert isinstance(policy, KeepAgreed)
        assert (policy.fraction, policy.begins, claimed.num_epochs) == (0.5, 8, 20)
        assert study.study.cost == "cost_rows"
        assert study.data.validation_samples == 0, "knobs are chosen with other seeds"
