"""Rows that never become easy are found, listed and shown; what does not fit is said."""

import csv
import io
import json
import tarfile
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from numpy.typing import NDArray
from PIL import Image

import dataio
import importance
from dataio.base.seeding import generator, key
from dataio.plan.history import ScoreColumn, Scores, record, score_dtype, unscored
from dataio.plan.policies import Importance, Selection
from dataio.plan.segment import Position, Segment
from dataio.state.snapshot import NodeSnapshot, save_snapshot
from dataio.world import World, run_threads, single_world, thread_worlds
from tonari import cli
from tonari.hardest.picture import COLUMNS, SIDE, Tile, draw_tiles
from tonari.hardest.rank import hardest_of_each, hardest_rows, hardness

NUM_SAMPLES, NUM_CLASSES, PART = 1000, 4, 0.05
KEPT: tuple[ScoreColumn, ...] = ("loss", "loss_mean", "correct", "confidence", "forgotten")
FEW: list[ScoreColumn] = ["loss", "forgotten"]
ALL: list[ScoreColumn] = [*KEPT]


def png(pixels: NDArray[np.uint8]) -> bytes:
    file = io.BytesIO()
    Image.fromarray(pixels).save(file, "PNG")
    return file.getvalue()


def make_images(num_samples: int) -> tuple[NDArray[np.uint8], NDArray[np.int64]]:
    """One pattern a class under much noise: learnt well, not perfectly."""
    rng = generator(key(0, "hardest"))
    patterns = rng.integers(0, 2, (NUM_CLASSES, 8, 8))
    labels = rng.integers(0, NUM_CLASSES, num_samples)
    pixels = 128 + 40 * (patterns[labels] - 0.5) + rng.normal(0, 40, (num_samples, 8, 8))
    return pixels.clip(0, 255).astype(np.uint8), labels


def write_parquet(path: Path, labels: NDArray[np.int64], images: list[bytes] | None = None) -> Path:
    if images is None:
        images = [png(pixels) for pixels in make_images(len(labels))[0]]
    columns = {
        "key": [f"row {i}" for i in range(len(labels))],
        "png": images,
        "cls": labels,
        "words": [f"class {label}" for label in labels],
    }
    pq.write_table(pa.table(columns), path)
    return path


def write_saved(
    path: Path, nodes: list[tuple[list[int], Scores]], num_samples: int, world: World | None = None
) -> None:
    """Save what each node knows: sample ids and scores."""
    position = Position(3, (Segment((1,) * len(nodes), 4, 0),))
    state = {"num_samples": num_samples, **position.to_json()}

    def save(world: World) -> None:
        ids, scores = nodes[world.node]
        none = np.zeros(len(ids), np.int64)
        node = NodeSnapshot(np.array(ids), scores, Selection(), none, none)
        save_snapshot(path, state, node, world)

    run_threads(thread_worlds([1] * len(nodes)), save)


def make_scores(columns: list[ScoreColumn], **values: object) -> Scores:
    first = next(iter(values.values()))
    scores = unscored(len(first), score_dtype(columns))  # type: ignore[arg-type]
    scores["epoch"] = 2
    for name, value in values.items():
        scores[name] = value
    return scores


def table(directory: Path) -> list[dict[str, str]]:
    with open(directory / "hardest.csv", newline="") as file:
        return list(csv.DictReader(file))


def ids(directory: Path) -> list[int]:
    return [int(row["sample_id"]) for row in table(directory)]


@dataclass(frozen=True)
class Small:
    """Ten samples of classes 0, 0, 1, 1 ..., their saved scores, and where results go."""

    source: Path
    saved: Path
    out: Path

    def run(self, *args: str) -> int:
        argv = [str(self.saved), "--source", str(self.source), "--out", str(self.out), *args]
        return cli.main(["hardest", *argv])


LOSSES = [0.5, 3.0, 9.0, 3.0, 0.25, 1.0, np.inf, 2.0, 3.0, 4.0]


@pytest.fixture
def small(tmp_path: Path) -> Small:
    """Sample 6 was never reported."""
    scores = make_scores(FEW, loss=LOSSES, forgotten=[0, 5, 0, 1, 0, 0, 0, 7, 5, 0])
    scores["epoch"][6] = -1
    scores["correct"] = np.arange(10) > 0
    write_saved(tmp_path / "saved", [([*range(10)], scores)], 10)
    source = write_parquet(tmp_path / "train.parquet", np.arange(10) // 2)
    return Small(source, tmp_path / "saved", tmp_path / "out")


@given(st.lists(st.sampled_from([0.0, 1.0, 2.0, np.inf]), max_size=30), st.integers(1, 40))
def test_the_hardest_rows_are_those_of_the_largest_values_and_ties_go_to_the_earlier(
    values: list[float], top: int
) -> None:
    chosen = hardest_rows(np.array(values, np.float32), top=top).tolist()
    assert chosen == sorted(range(len(values)), key=lambda row: (-values[row], row))[:top]


@given(st.lists(st.tuples(st.integers(0, 3), st.integers(-2, 2)), max_size=30), st.integers(1, 5))
def test_each_label_gets_its_own_hardest_rows(rows: list[tuple[int, int]], top: int) -> None:
    values, labels = (np.array([row[i] for row in rows]) for i in range(2))
    groups = hardest_of_each(values.astype(np.float32), labels, top=top)
    assert [set(labels[group]) for group in groups if len(group)] == [
        {x} for x in np.unique(labels)
    ]
    for group in groups:
        own = [row for row in range(len(rows)) if len(group) and labels[row] == labels[group[0]]]
        assert group.tolist() == sorted(own, key=lambda row: (-values[row], row))[:top]


def test_who_was_surely_something_else_is_harder_than_who_is_unsure() -> None:
    columns: list[ScoreColumn] = ["confidence", "correct"]
    sure = [0.75, 0.25, 0.25, 0.875]
    scores = make_scores(columns, confidence=sure, correct=[False, False, True, True])
    assert np.argsort(-hardness(scores, by="confidence")).tolist() == [0, 1, 2, 3]
    assert hardness(make_scores(["confidence"], confidence=sure), by="confidence").argmax() == 1


def test_who_was_wrong_more_often_is_harder_and_among_equals_who_has_the_higher_loss() -> None:
    columns: list[ScoreColumn] = ["wrong", "loss"]
    loss = [9.0, 0.5, np.inf, 2.0, 0.0]
    scores = make_scores(columns, wrong=[1, 3, 1, 1, 0], loss=loss)
    assert np.argsort(-hardness(scores, by="wrong")).tolist() == [1, 2, 0, 3, 4]
    alone = make_scores(["wrong"], wrong=[1, 3, 2])
    assert np.argsort(-hardness(alone, by="wrong")).tolist() == [1, 2, 0]


def test_who_never_was_right_is_harder_than_who_forgot() -> None:
    columns: list[ScoreColumn] = ["forgotten"]
    right = [False, False, True, True]
    scores = make_scores(columns, forgotten=[2, 0, 3, 0], correct=right)
    assert np.argsort(-hardness(scores, by="forgotten")).tolist() == [1, 2, 0, 3]


def test_rows_are_listed_hardest_first_with_what_the_source_tells(
    small: Small, capsys: pytest.CaptureFixture[str]
) -> None:
    assert small.run("--top", "4", "--classes", "ant,bee,cow,dog,eel") == 0
    rows = table(small.out)
    assert ids(small.out) == [2, 9, 1, 3]
    assert rows[0] == {
        "rank": "1", "sample_id": "2", "key": "row 2", "shard": str(small.source),
        "position": "2", "label": "1", "class": "bee", "loss": "9.0",
        "correct": "True", "forgotten": "0", "epoch": "2",
    }  # fmt: skip
    shown = capsys.readouterr().out
    assert shown.startswith(
        "hardest 4 of 9 rows by loss (median of all 3.00); 1 never reported, left out"
    )
    with Image.open(small.out / "hardest.png") as picture:
        assert 4 * SIDE < picture.width < 6 * SIDE


def test_rows_are_ranked_by_what_is_asked_for(small: Small) -> None:
    assert small.run("--top", "3", "--by", "forgotten") == 0
    assert ids(small.out) == [0, 7, 1]


def test_rows_of_each_label_are_listed_label_by_label(small: Small) -> None:
    assert small.run("--per-class", "1") == 0
    assert ids(small.out) == [1, 2, 5, 7, 9]
    assert {row["rank"] for row in table(small.out)} == {"1"}


def test_rows_may_be_ranked_within_their_class(
    small: Small, capsys: pytest.CaptureFixture[str]
) -> None:
    assert small.run("--within-classes", "--top", "4") == 0
    assert ids(small.out) == [1, 2, 5, 9]
    assert "hardest 4 of 9 rows by loss within classes" in capsys.readouterr().out
    assert small.run("--within-classes", "--per-class", "2") == 2


def test_labels_may_be_text(small: Small) -> None:
    assert small.run("--per-class", "1", "--label", "words") == 0
    assert [row["label"] for row in table(small.out)] == [f"class {i}" for i in range(5)]


def test_one_json_document_says_what_was_found(
    small: Small, capsys: pytest.CaptureFixture[str]
) -> None:
    assert small.run("--top", "2", "--json") == 0
    found = json.loads(capsys.readouterr().out)
    assert found["sample_ids"] == [2, 9]
    assert (found["num_samples"], found["never_reported"], found["median"]) == (10, 1, 3.0)
    assert Path(found["png"]).exists()


def test_without_images_there_is_a_table_alone_and_it_says_so(
    small: Small, capsys: pytest.CaptureFixture[str]
) -> None:
    small.out.mkdir()
    (small.out / "hardest.png").write_bytes(b"of an earlier call")
    pq.write_table(pa.table({"tokens": [b"ab"] * 10}), small.source)
    assert small.run() == 0
    assert "no picture, as the source has no images" in capsys.readouterr().out
    assert not (small.out / "hardest.png").exists()
    assert table(small.out)[0]["label"] == ""


def test_a_sample_that_does_not_decode_is_shown_as_such(small: Small) -> None:
    write_parquet(small.source, np.zeros(10, np.int64), [b"\xff\xd8 no image"] * 10)
    assert small.run() == 0
    assert (small.out / "hardest.png").exists()


def test_tar_samples_are_named_and_found_in_their_shards(small: Small, tmp_path: Path) -> None:
    for shard in range(2):
        with tarfile.open(tmp_path / f"{shard}.tar", "w") as tar:
            for i in range(5):
                member = tarfile.TarInfo(f"s{shard}-{i}.cls")
                member.size = 1
                tar.addfile(member, io.BytesIO(b"%d" % i))
    source = str(tmp_path / "{0..1}.tar")
    argv = [str(small.saved), "--source", source, "--out", str(small.out), "--top", "2"]
    assert cli.main(["hardest", *argv]) == 0
    found = [(row["key"], row["shard"], row["position"]) for row in table(small.out)]
    assert found == [("s0-2", f"{tmp_path}/0.tar", "2"), ("s1-4", f"{tmp_path}/1.tar", "4")]


def test_an_image_folder_names_its_classes(small: Small, tmp_path: Path) -> None:
    for name in ("ant", "bee"):
        (tmp_path / "folder" / name).mkdir(parents=True)
        for i in range(5):
            pixels = np.zeros((4, 6), np.uint8)
            (tmp_path / "folder" / name / f"{i}.png").write_bytes(png(pixels))
    argv = [str(small.saved), "--source", str(tmp_path / "folder"), "--out", str(small.out)]
    assert cli.main(["hardest", *argv, "--top", "2"]) == 0
    found = [(row["key"], row["class"]) for row in table(small.out)]
    assert found == [("ant/2.png", "ant"), ("bee/4.png", "bee")]


def test_of_rows_that_several_nodes_hold_the_newest_report_counts(small: Small) -> None:
    older, newer = make_scores(FEW, loss=LOSSES), make_scores(FEW, loss=[0.0] * 10)
    newer["loss"][4], newer["epoch"] = 8.0, 3
    everyone = [*range(10)]
    for nodes in ([older, newer], [newer, older]):
        write_saved(small.saved, [(everyone, scores) for scores in nodes], 10)
        assert small.run("--top", "1") == 0
        assert ids(small.out) == [4]
        assert table(small.out)[0]["loss"] == "8.0"


def test_rows_of_all_nodes_are_ranked_together(small: Small) -> None:
    nodes = [([9, 7, 5, 3, 1], LOSSES[:5]), ([0, 2, 4, 6, 8], LOSSES[:5])]
    write_saved(small.saved, [(i, make_scores(FEW, loss=losses)) for i, losses in nodes], 10)
    assert small.run("--top", "2") == 0
    assert ids(small.out) == [4, 5]


def test_a_column_kept_since_the_run_went_on_ranks_the_rows_reported_since(small: Small) -> None:
    mean = [np.inf] * 5 + [1.0, 2.0, 3.0, 4.0, 5.0]
    write_saved(
        small.saved, [([*range(10)], make_scores(ALL, loss=[1.0] * 10, loss_mean=mean))], 10
    )
    assert small.run() == 0
    assert ids(small.out) == [9, 8, 7, 6, 5]


def test_the_newest_checkpoint_of_a_run_is_found(small: Small, tmp_path: Path) -> None:
    run = tmp_path / "run"
    for step, worst in ((10, 3), (200, 7)):
        checkpoint = run / "checkpoints" / f"step-{step:08d}"
        checkpoint.mkdir(parents=True)
        scores = make_scores(FEW, loss=np.arange(10) == worst)
        write_saved(checkpoint / "loader", [([*range(10)], scores)], 10)
        write_saved(run / "loop" / f"{step:03}" / "loader", [([*range(10)], scores)], 10)
    older, loop = run / "checkpoints" / "step-00000010", run / "loop"
    for place, worst in ((run, 7), (older.parent, 7), (loop, 7), (older, 3), (older / "loader", 3)):
        assert Small(small.source, place, small.out).run("--top", "1") == 0
        assert ids(small.out) == [worst]


def said(small: Small, capsys: pytest.CaptureFixture[str], *args: str) -> str:
    assert small.run(*args) == 1
    return capsys.readouterr().err


def test_what_was_not_saved_is_said_with_the_cure(
    small: Small, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    nowhere = Small(small.source, tmp_path / "none", small.out)
    assert "found no saved loader state, expected what loader.save wrote" in said(nowhere, capsys)
    message = said(small, capsys, "--by", "confidence")
    assert "saved with the scores loss, forgotten, expected confidence" in message
    assert 'importance.Full(columns=("confidence",))' in message
    write_saved(small.saved, [([*range(10)], make_scores([], epoch=[-1] * 10))], 10)
    assert (
        'no scores, expected loss_mean; train with columns = ["loss_mean"] under [importance]'
        in (said(small, capsys))
    )


def test_a_saved_part_that_is_missing_is_named(
    small: Small, capsys: pytest.CaptureFixture[str]
) -> None:
    (small.saved / "node-0.arrow").unlink()
    message = said(small, capsys)
    assert "node-0.arrow: cannot be read ([Errno 2]" in message
    assert "restore an older save" in message


def test_another_source_is_refused(small: Small, capsys: pytest.CaptureFixture[str]) -> None:
    write_parquet(small.source, np.zeros(7, np.int64))
    message = said(small, capsys)
    assert "holds 7 samples, expected 10" in message
    assert "give the source that was trained on" in message


def test_a_field_that_is_not_there_is_named(
    small: Small, capsys: pytest.CaptureFixture[str]
) -> None:
    assert "found the columns key, png, cls, words, expected 'jpg'" in (
        said(small, capsys, "--image", "jpg")
    )
    pq.write_table(pa.table({"png": [b"ab"] * 10}), small.source)
    assert "--per-class 3: found no label" in said(small, capsys, "--per-class", "3")
    assert "--classes none.txt: cannot be read" in said(small, capsys, "--classes", "none.txt")


def test_a_directory_that_cannot_be_written_is_refused_before_the_work(
    small: Small, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "file").write_text("")
    no_source = Small(tmp_path / "none.parquet", small.saved, tmp_path / "file" / "out")
    assert "file/out: cannot be written into" in said(no_source, capsys)


def test_wrong_counts_exit_2(small: Small, capsys: pytest.CaptureFixture[str]) -> None:
    assert small.run("--top", "0") == 2
    assert "--top is 0, must be >= 1" in capsys.readouterr().err


def test_tiles_stand_in_lines_and_a_group_begins_its_own() -> None:
    image = png(np.full((4, 4, 3), (255, 0, 0), np.uint8))
    tile, first = Tile(image, "name", ()), Tile(image, "name", (), begins=True)
    one, full = (draw_tiles([tile] * n, title="t").height for n in (1, COLUMNS))
    two = draw_tiles([tile] * (COLUMNS + 1), title="t").height
    assert one == full
    assert two == draw_tiles([first, tile, first], title="t").height > one


def train(source: Path, saved: Path, policy: Importance, *, num_epochs: int) -> None:
    """Train a linear model by a real loader."""
    torch.manual_seed(0)
    model = torch.nn.Linear(64, NUM_CLASSES)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    fields: dict[str, dataio.Field] = {
        "image": dataio.Image("png", channels=1),
        "label": dataio.Int("cls"),
    }
    with (
        single_world() as world,
        dataio.Loader(
            str(source), batch_size=32, fields=fields, cache=saved.parent / "cache", world=world,
            importance=policy, workers=dataio.Workers(threads=0),
            reports=dataio.Reports(rows=saved.parent / "rows"),
        ) as loader,
    ):  # fmt: skip
        for _ in loader.epochs(num_epochs):
            for batch in loader:
                logits = model(batch["image"].flatten(1) / 128 - 1)
                losses = torch.nn.functional.cross_entropy(logits, batch["label"], reduction="none")
                optimizer.zero_grad()
                (losses * batch["weight"]).mean().backward()
                optimizer.step()
                loader.report(batch, losses, *importance.outcome(logits, batch["label"]))
        loader.save(saved)


def test_changed_labels_are_the_hardest_rows_of_a_trained_model(tmp_path: Path) -> None:
    _, labels = make_images(NUM_SAMPLES)
    rng = generator(key(0, "changed"))
    changed = rng.choice(NUM_SAMPLES, round(PART * NUM_SAMPLES), replace=False)
    labels[changed] = (labels[changed] + rng.integers(1, NUM_CLASSES, len(changed))) % NUM_CLASSES
    source = write_parquet(tmp_path / "train.parquet", labels)
    train(source, tmp_path / "saved", importance.Full(columns=KEPT), num_epochs=8)
    out = Small(source, tmp_path / "saved", tmp_path / "out")
    for by, least in (("loss_mean", 0.8), ("loss", 0.8), ("confidence", 0.7)):
        assert out.run("--top", str(len(changed)), "--by", by) == 0
        precision = np.isin(ids(out.out), changed).mean()
        assert precision > least, f"{by}: {precision}, by chance {PART}"
    found = ids(out.out)
    argv = ["hardest", str(out.saved), "--out", str(out.out), "--top", str(len(found)), "--by", by]
    assert cli.main(argv) == 0
    assert ids(out.out) == found, "of the source that the log of rows names"


def test_losses_over_epochs_are_drawn_and_listed_where_they_were_kept(
    small: Small, capsys: pytest.CaptureFixture[str]
) -> None:
    scores = unscored(10, score_dtype(["history", "loss_mean"]))
    for epoch in (0, 1, 3):
        rows = np.arange(10 if epoch else 9)
        loss = (rows + 4.0 - epoch).astype(np.float32)
        record(scores, rows, loss=loss, correct=None, confidence=None, epoch=epoch)
    write_saved(small.saved, [([*range(10)], scores)], 10)
    assert small.run("--top", "2") == 0
    assert "#2  sample 8  loss_mean 11.24  █▆·▁" in capsys.readouterr().out
    assert [row["history"] for row in table(small.out)] == ["12 nan 10", "12 11 nan 9"]
    assert json.dumps("█▆·▁")[1:-1] in (small.out / "hardest.html").read_text()
    assert small.run("--top", "2", "--json") == 0
    assert json.loads(capsys.readouterr().out)["losses"] == [[12, None, 10], [12, 11, None, 9]]
