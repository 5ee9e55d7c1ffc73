"""A study of text: junk is as much as was asked for, and arms are judged by the loss."""

import json
from pathlib import Path

import numpy as np
import pytest
import torch
import torch.nn.functional as F

from tests.tonari.ablate.text_study import STUDY, make_text_study
from tonari import cli
from tonari.ablate.cells import read_cells, train_missing
from tonari.ablate.equal_loss import equal_loss
from tonari.ablate.measure import LOSS
from tonari.ablate.results import ArmResults, number
from tonari.ablate.study.config import SettingsConfig, load_study
from tonari.ablate.study.corrupt import as_found, spoil_text
from tonari.ablate.study.data import LabelledText, load_text
from tonari.ablate.study.replicas import OneModel
from tonari.ablate.study.run import train_cell
from tonari.ablate.study.tasks import NextByte, row_outcome
from tonari.trainer.config.settings import build_section
from tonari.trainer.errors import ConfigError

EXAMPLE = Path(__file__).parents[3] / "examples" / "text_study.toml"
PLAYS = Path(__file__).parents[4] / "shared" / "data" / "tinyshakespeare.txt"
IMAGES = """
[study]
baseline = "a"
seeds = 1
[data]
train = "absent-train.parquet"
test = "absent-test.parquet"
image_size = 32
junk = 0.1
[settings]
shuffle = "global"
epochs = 3
[arms.a]
[arms.b]
norm = "batch"
"""


def sequences(num_samples: int = 200, *, seed: int = 0) -> LabelledText:
    """Text of two files; a sequence counts up from a letter of its own."""
    starts = np.random.default_rng(seed).integers(97, 110, num_samples)
    text = (starts[:, None] + np.arange(13)).astype(np.uint8)
    return LabelledText(text, np.arange(num_samples) % 2)


def small(**changed: object) -> SettingsConfig:
    settings = {
        "replicas": 2, "batch_size": 10, "width": 8, "heads": 2, "epochs": 6, "lr": 0.02,
        "optimizer": "adamw", "partition": "random", "shuffle": "global", **changed,
    }  # fmt: skip
    return build_section(SettingsConfig, settings)


def test_files_are_cut_into_sequences_that_know_their_file(tmp_path):
    (tmp_path / "a.txt").write_bytes(bytes(range(40, 70)))
    (tmp_path / "b.txt").write_bytes(bytes(range(100, 111)))
    found = load_text(str(tmp_path / "*.txt"), sequence_length=10, key="data.train")
    assert found.text.shape == (3, 11)
    assert found.text[0].tolist() == list(range(40, 51))
    assert found.text[1].tolist() == list(range(50, 61)), "the last byte begins the next"
    assert found.text[2].tolist() == list(range(100, 111)), "none lies in two files"
    assert found.labels.tolist() == [0, 0, 1]


def test_text_that_is_missing_or_too_short_is_refused(tmp_path):
    with pytest.raises(ConfigError, match=r"data.test: .*absent.txt"):
        load_text(str(tmp_path / "absent.txt"), sequence_length=10, key="data.test")
    (tmp_path / "short.txt").write_bytes(b"short")
    with pytest.raises(ConfigError, match=r"data.test: .* has 5 bytes, expected more than"):
        load_text(str(tmp_path / "short.txt"), sequence_length=10, key="data.test")


@pytest.mark.parametrize("junk", [0.0, 0.45, 1.0])
def test_junk_is_half_shuffled_and_half_random_and_the_rest_stays(junk):
    data = sequences()
    before = data.text.copy()
    found = spoil_text(data, seed=3, junk=junk)
    assert np.array_equal(data.text, before), "the caller's are left as they are"
    shuffled, random = found.kinds["shuffled"], found.kinds["random"]
    assert (shuffled.sum(), random.sum()) == (round(junk * 200) // 2, round(junk * 200) // 2)
    assert np.array_equal(found.is_wrong, shuffled | random)
    assert isinstance(found.data, LabelledText)
    text = found.data.text
    assert np.array_equal(text[~found.is_wrong], before[~found.is_wrong])
    assert np.array_equal(np.sort(text[shuffled]), np.sort(before[shuffled])), "the same bytes"
    assert (text[shuffled] != before[shuffled]).any(axis=1).all(), "in another order"
    if junk:
        assert len(np.unique(text[random])) > 200, "any byte"
    # Every sample is of one kind
    assert np.array_equal(np.sum(list(found.kinds.values()), axis=0), np.ones(200))


def test_junk_follows_from_the_seed():
    one, again, other = (spoil_text(sequences(), seed=s, junk=0.4) for s in (3, 3, 4))
    assert np.array_equal(one.data.labels, again.data.labels)
    assert isinstance(one.data, LabelledText)
    assert isinstance(again.data, LabelledText)
    assert np.array_equal(one.data.text, again.data.text)
    assert not np.array_equal(one.is_wrong, other.is_wrong)


def test_cells_of_images_are_those_of_before_and_those_of_text_follow_its_content(tmp_path):
    path = tmp_path / "images.toml"
    path.write_text(IMAGES)
    # As computed before there were studies of text
    assert [cell.digest for cell in load_study(path).cells()] == ["5260f15df62d", "1afb2e81cf17"]
    named = load_study(path, ("data.kind=images",))
    assert [cell.digest for cell in named.cells()] == ["5260f15df62d", "1afb2e81cf17"]


def test_other_text_makes_other_cells(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    path = make_text_study(tmp_path)
    before = [cell.digest for cell in load_study(path).cells()]
    assert [cell.digest for cell in load_study(path).cells()] == before
    text = tmp_path / "train-hard.txt"
    text.write_bytes(text.read_bytes()[::-1])
    assert not set(before) & {cell.digest for cell in load_study(path).cells()}


@pytest.mark.parametrize(
    ("found", "replaced", "message"),
    [
        ("junk = 0.5", "noise = 0.5", "data.noise is 0.5, which are for images; leave them out"),
        ("junk = 0.5", "duplicates = 0.5", "data.duplicates is 0.5"),
        ("lr = 0.01", 'lr = 0.01\nupdate = "average"', "or an optimizer other than sgd"),
        ("heads = 2", "haeds = 2", "settings.haeds is unknown; did you mean settings.heads"),
    ],
)
def test_what_text_does_not_take_is_refused(tmp_path, found, replaced, message):
    path = make_text_study(tmp_path)
    path.write_text(STUDY.replace(found, replaced))
    with pytest.raises(ConfigError, match=message):
        load_study(path)


def test_the_loss_of_a_sequence_is_the_mean_over_its_bytes_and_it_is_right_if_most_are():
    task, torch_rows = NextByte(12), torch.from_numpy(sequences(6).text)
    torch.manual_seed(0)
    model = task.build(small())
    inputs, target = task.input(torch_rows, torch.zeros(6)), task.target(torch_rows, torch.zeros(6))
    assert torch.equal(inputs[:, 1:], target[:, :-1]), "each byte is told the one after it"
    trained = OneModel(model, lr=0.0, momentum=0.0, weight_decay=0.0, adamw=True)
    mean, losses, logits = trained.step_rows(inputs[None], target[None], torch.ones(1, 6))
    wanted = F.cross_entropy(logits.transpose(1, 2), target, reduction="none").mean(dim=1)
    assert torch.allclose(losses, wanted)
    assert mean == pytest.approx(float(wanted.mean()))
    assert torch.allclose(trained.pass_rows(inputs, target)[0], wanted)
    sure = F.one_hot(target, 256).float() * 50
    sure[0, :7], sure[1, :5] = 0.0, 0.0
    correct, confidence = row_outcome(sure, target)
    assert correct.tolist() == [False] + [True] * 5, "7 of the first row's 12 are wrong"
    assert confidence[2:] == pytest.approx(1.0)


def test_a_cell_of_text_learns_and_depends_on_its_seed_alone():
    train, test = as_found(sequences()), sequences(60, seed=1)
    first, again, other = (
        train_cell(small(), train, test, num_classes=1, seed=seed) for seed in (0, 0, 1)
    )
    assert first.points == again.points
    assert first.points != other.points
    assert first.test_loss < 3 < np.log(256)
    assert first.accuracy > 0.1


def test_the_report_judges_by_the_loss_and_says_what_less_training_reaches_it(
    tmp_path, monkeypatch, capsys
):
    monkeypatch.chdir(tmp_path)
    make_text_study(tmp_path)
    assert cli.main(["ablate", "study.toml", "--out", "out", "--json"]) == 0
    document = json.loads(capsys.readouterr().out)
    arms = {arm["arm"]: arm for arm in document["arms"]}
    cells = read_cells(load_study(tmp_path / "study.toml"), tmp_path / "out")
    for name, cell in cells["oracle"].items():
        gap = number(cell, "test_loss") - number(cells["full"][name], "test_loss")
        assert (gap > 0) == (arms["oracle"]["difference"]["mean"] < 0)
        assert number(cell, "hidden_precision") == number(cell, "hidden_recall") == 1.0
        last = cell["epochs"][-1]  # type: ignore[index]
        assert last["hidden_kinds"] == {"text 0": 0, "text 1": 0, "shuffled": 24, "random": 24}
    losses = [number(cell, "test_loss") for cell in cells["full"].values()]
    assert arms["full"]["test_loss"]["mean"] == pytest.approx(np.mean(losses))
    assert [one["lengths"] for one in document["equal_loss"]] == [2, 1, 1, 1, 2]
    table = Path("out/report/table.md").read_text()
    assert "| arm | test loss, nats a byte | test accuracy, % | lower by, 0.01 nats |" in table
    assert "times fewer rows to the loss of full" in table
    assert "dropping the highest losses" in table
    page = Path("out/report/report.html").read_text()
    assert "How much less training for the same loss" in page
    assert "Loss by arm" in page


def test_validation_text_has_no_junk(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    seen: list[LabelledText] = []

    def watched(settings, train, test, **rest):
        seen.append(test)
        return train_cell(settings, train, test, **rest)

    monkeypatch.setattr("tonari.ablate.cells.train_cell", watched)
    study = load_study(make_text_study(tmp_path), ("data.validation_samples=40", "study.seeds=1"))
    cells = [cell for cell in study.cells() if cell.arm.name == "full"]
    train_missing(study, cells, tmp_path / "out", command="", call="", tell=lambda event: None)
    clean = load_text("train-*.txt", sequence_length=12, key="")
    rows = {row.tobytes() for row in clean.text}
    assert len(seen[0].labels) == 40
    assert all(row.tobytes() in rows for row in seen[0].text)


def run(fraction: float, losses: list[float], costs: list[float], **settings: object) -> ArmResults:
    """An arm of some length, with one cell a seed."""
    own = {"epochs_fraction": fraction, **settings}
    cells = {
        seed: {"test_loss": loss, "cost_rows": cost}
        for seed, (loss, cost) in enumerate(zip(losses, costs, strict=True))
    }
    return ArmResults(f"{settings} {fraction}", "base", own, cells, LOSS)


def test_times_fewer_rows_are_read_off_the_line_of_lengths():
    base = ArmResults(
        "base", "base", {"epochs_fraction": 1.0},
        {seed: {"test_loss": 2.0, "cost_rows": 800.0} for seed in range(2)}, LOSS,
    )  # fmt: skip
    arms = [
        base,
        # Reaches 2.0 half way between 100 and 400 rows on a logarithmic scale; then from the start
        run(0.25, [2.5, 2.0], [100, 200], importance="good"),
        run(0.5, [1.5, 1.9], [400, 400], importance="good"),
        run(0.5, [2.1, 2.1], [400, 400], importance="bad"),
    ]
    found = {one.way: one for one in equal_loss(arms, cost="cost_rows")}
    good, bad = found[arms[2].name], found[arms[3].name]
    assert good.times_fewer is not None
    assert good.times_fewer.mean == pytest.approx(4.0)
    assert (good.lengths, good.num_reached, good.num_seeds, good.num_at_least) == (2, 2, 2, 1)
    assert (bad.times_fewer, bad.num_reached) == (None, 0)
    assert found["base"].times_fewer is not None
    assert found["base"].times_fewer.mean == 1


def test_the_example_holds_every_control_that_text_needs():
    study = load_study(EXAMPLE)
    settings = [arm.settings for arm in study.arms]
    controls = {one.control for one in settings}
    assert {"", "epochs", "random", "highest", "oracle"} <= controls
    assert study.study.cost == "cost_rows"
    assert study.data.validation_samples == 0, "knobs are chosen with other seeds"
    assert {cell.seed for cell in study.cells()} & {100, 101} == set()


def test_junk_of_real_text_is_what_the_study_calls_so():
    if not PLAYS.exists():
        pytest.skip(f"tiny Shakespeare is not at {PLAYS}")
    text = load_text(str(PLAYS), sequence_length=64, key="data.train")
    found = spoil_text(text, seed=0, junk=0.45)
    assert found.is_wrong.mean() == pytest.approx(0.45, abs=1e-4)
