"""`tonari rows` lists what a run of `tonari train` trained, and names what it cannot."""

import json
import re
from collections import Counter
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.parquet as pq
import pytest

from tests.stand_ins import Killed
from tests.trainer.digits import write_config, write_shard
from tonari import cli, rows
from tonari.trainer.config.config import load_config
from tonari.trainer.run import loop
from tonari.trainer.run.loop import train

ACCUMULATE = 3


BATCHES: dict[int, dict[str, Any]] = {}
"""The first batch of each step of ``trained``."""


@pytest.fixture(scope="module")
def trained(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, dict[int, Counter[Any]]]:
    """A run that was killed behind a checkpoint and went on: its directory, and its steps' rows."""
    tmp_path = tmp_path_factory.mktemp("rows")
    config, directory = write_config(tmp_path), tmp_path / "run"
    write_shard(tmp_path / "train-0.tar")
    settings = load_config(
        config,
        (
            f"data.train={tmp_path / 'train-0.tar'}", f"run.directory={directory}",
            "run.epochs=2", "run.checkpoint_steps=2",
            f"optimizer.accumulate={ACCUMULATE}", "data.batch_size=8",
            "augment.crop=random", "augment.size=8", "augment.padding=2", "augment.flip=0.5",
            "importance.kind=random", "importance.fraction=0.2",
        ),
    )  # fmt: skip
    seen: dict[int, Counter[Any]] = {}
    first: dict[int, dict[str, Any]] = {}
    last = [3]

    def noted(pipeline: Any, optimizer: Any, loader: Any, batches: Any, **how: Any) -> Any:
        first[how["step"] + 1] = {k: v.numpy().copy() for k, v in batches[0].items()}
        seen[how["step"] + 1] = Counter(
            (sample_id, weight)
            for batch in batches
            for slot, sample_id, weight in zip(
                *(batch[name].tolist() for name in ("slot", "sample_id", "weight")), strict=True
            )
            if slot >= 0
        )
        if how["step"] + 1 == last[0]:
            raise Killed
        return step(pipeline, optimizer, loader, batches, **how)

    step: Any = vars(loop)["train_step"]
    with pytest.MonkeyPatch.context() as patched:
        patched.setattr(loop, "train_step", noted)
        with pytest.raises(Killed):
            train(settings, quiet=True)
        last[0] = -1
        train(settings, quiet=True)
    BATCHES.update(first)
    return directory, seen


def test_the_rows_of_every_step_are_those_that_were_trained(trained) -> None:
    directory, seen = trained
    run = rows.open(directory)
    assert run.is_whole
    assert run.num_steps == max(seen)
    for step, expected in seen.items():
        table = run.at(step=step)
        found = zip(table["sample_id"].to_pylist(), table["weight"].to_pylist(), strict=True)
        assert Counter(found) == expected
        assert set(table["run_step"].to_pylist()) == {step}
    whole = run.at(epoch=0, discarded=True)
    thrown = whole.filter(pc.invert(whole["kept"]))
    assert set(thrown["run_step"].to_pylist()) == {3}, "killed before its checkpoint"


def test_every_time_a_sample_was_trained_is_listed_and_every_epoch_that_hid_it(trained) -> None:
    run = rows.open(trained[0])
    whole = pa.concat_tables([run.at(epoch=epoch, discarded=True) for epoch in (0, 1)])
    for sample_id in range(0, run.setup.num_samples, 9):
        found = run.of(sample_id=sample_id)
        mine = found.filter(pc.equal(found["what"], "trained"))
        expected = whole.filter(pc.equal(whole["sample_id"], sample_id))
        order = [("attempt", "ascending"), ("step", "ascending")]
        assert mine.sort_by(order).equals(expected.sort_by(order))
        kept = found.filter(found["kept"])
        assert sorted(kept["epoch"].to_pylist()) == [0, 1], "trained or hidden, once an epoch"
    assert "hidden" in run.of(sample_id=range(100))["what"].to_pylist()


def test_the_samples_that_an_epoch_hid_are_listed(trained, capsys) -> None:
    run = rows.open(trained[0])
    hidden = set(range(run.num_samples)) - set(run.at(epoch=1)["sample_id"].to_pylist())
    asked = ("--epoch", 1, "--what", "hidden", "--json")
    listed = json.loads(printed(capsys, trained[0], *asked))["rows"]
    assert {row["sample_id"] for row in listed} == hidden
    assert {(row["epoch"], row["what"]) for row in listed} == {(1, "hidden")}


def test_a_checkpoint_has_what_was_trained_up_to_it(trained) -> None:
    checkpoints = sorted((trained[0] / "checkpoints").glob("step-*"))
    run = rows.open(checkpoints[0])
    assert f"step-{run.num_steps:08d}" == checkpoints[0].name
    with pytest.raises(ValueError, match=r"step 99 was never reached, expected one in \[1, "):
        run.at(step=99)


def printed(capsys: pytest.CaptureFixture[str], *argv: object, status: int = 0) -> str:
    assert cli.main(["rows", *map(str, argv)]) == status
    shown = capsys.readouterr()
    return shown.err if status else shown.out


def test_the_command_lists_names_and_writes(trained, tmp_path, capsys) -> None:
    directory, seen = trained
    document = json.loads(printed(capsys, directory, "--step", "1", "--json"))
    assert Counter((r["sample_id"], r["weight"]) for r in document["rows"]) == seen[1]
    assert all(row["key"] == f"{row['sample_id']:06d}" for row in document["rows"])
    shown = printed(
        capsys, directory, "--epoch", 0, "--steps", "0:2", "--parquet", tmp_path / "a.pq"
    )
    table = pq.read_table(tmp_path / "a.pq")
    assert set(table["step"].to_pylist()) == {0, 1}
    assert f"{len(table)} rows trained" in shown
    by_key = printed(capsys, directory, "--key", "000042", "--json")
    assert by_key == printed(capsys, directory, "--sample", "42", "--json")
    shard = json.loads(printed(capsys, directory, "--shard", "train-0.tar", "--json"))
    assert {row["sample_id"] for row in shard["rows"]} == set(range(100))
    (path,) = {row["shard"] for row in shard["rows"]}
    assert json.loads(printed(capsys, directory, "--shard", path, "--json")) == shard


def test_the_command_makes_a_batch_again_and_shows_its_pictures(trained, tmp_path, capsys) -> None:
    for step in (1, 4, 7):
        out = tmp_path / "batch.npz"
        printed(capsys, trained[0], "--step", step, "--replay", out)
        with np.load(out) as again:
            assert set(again) == set(BATCHES[step])
            for name, value in BATCHES[step].items():
                np.testing.assert_array_equal(again[name], value)
    page = tmp_path / "page.html"
    printed(capsys, trained[0], "--epoch", 0, "--steps", "0", "--show", page)
    shown = page.read_text()
    assert shown.count("data:image/png") == 8
    assert len(re.findall(r'"label": \d, "class"', shown)) == 8


@pytest.mark.parametrize(
    ("argv", "message"),
    [
        (["--step", "4000"], r"optimizer step 4000 was never reached, expected one in \[1, "),
        (["--epoch", "7"], r"epoch 7 was never begun, expected one in \[0, 1\]"),
        (["--epoch", "0", "--steps", "90:99"], r"steps .* of epoch 0 were never reached, expected"),
        (["--sample", "100"], r"found sample_id 100, expected one in \[0, 100\)"),
        (["--key", "nobody"], r"the key 'nobody' is of no sample of .*; correct it"),
        (["--shard", "other.tar"], r"found no shard 'other.tar' in .*; give its path"),
        (["--step", "1", "--source", "OTHER"], r"was trained on .* found .*OTHER.*; give the data"),
    ],
)
def test_what_is_not_there_is_one_message(trained, tmp_path, capsys, argv, message) -> None:
    write_shard(tmp_path / "OTHER-0.tar", num_samples=30)
    argv = [str(tmp_path / "OTHER-0.tar") if word == "OTHER" else word for word in argv]
    found = printed(capsys, trained[0], *argv, status=1)
    assert re.search(message, found)
    assert found.count("\n") == 1


def test_steps_have_open_ends_and_ids_come_as_arrays(trained, capsys) -> None:
    run = rows.open(trained[0])
    whole = run.at(epoch=0)
    for steps, wanted in (
        ("4:", whole["step"].to_numpy() >= 4),
        (":4", whole["step"].to_numpy() < 4),
    ):
        printed_rows = printed(capsys, trained[0], "--epoch", 0, "--steps", steps, "--json")
        expected = whole.filter(pa.array(wanted))["sample_id"].to_pylist()
        assert [row["sample_id"] for row in json.loads(printed_rows)["rows"]] == expected
    assert "--steps -2:4: expected A:B" in printed(
        capsys, trained[0], "--epoch", 0, "--steps=-2:4", status=1
    )
    assert run.at(epoch=0, steps=np.int64(2)) == run.at(epoch=0, steps=2)
    assert run.of(sample_id=np.array([3, 5])) == run.of(sample_id=[3, 5])
    assert run.of(sample_id=np.int64(3)) == run.of(sample_id=3)
    with pytest.raises(TypeError, match=r"steps is 2.5, expected a number, a range"):
        run.at(epoch=0, steps=2.5)  # type: ignore[arg-type]


def test_a_run_on_a_list_of_shards_knows_its_keys(tmp_path, capsys) -> None:
    names = [str(tmp_path / f"{number}.tar") for number in range(2)]
    for name in names:
        write_shard(Path(name), num_samples=20)
    train(
        load_config(
            write_config(tmp_path),
            (
                f"data.train={json.dumps(names)}", f"run.directory={tmp_path / 'run'}",
                "run.epochs=1", "run.max_steps=1",
            ),
        ),
        quiet=True,
    )  # fmt: skip
    found = printed(capsys, tmp_path / "run", "--shard", "1.tar", "--json")
    assert {row["sample_id"] for row in json.loads(found)["rows"]} == set(range(20, 40))
    run = rows.open(tmp_path / "run")
    with pytest.raises(ValueError, match=r"0.tar and 1 more, .* cannot be opened by its name .*"):
        run.source()
    for name in names:
        Path(name).unlink()
    found = printed(capsys, tmp_path / "run", "--step", 1)
    assert "rows trained" in found, "without the dataset"
    assert "without shards and keys: " in found


def test_joined_shards_are_opened_as_the_run_opened_them(tmp_path, capsys) -> None:
    whole = tmp_path / "whole.tar"
    write_shard(whole, num_samples=20)
    joined = tmp_path / "joined.tar"
    joined.write_bytes(2 * whole.read_bytes())
    given = [
        f"data.train={joined}", f"data.test={joined}", f"run.directory={tmp_path / 'run'}",
        "run.epochs=1", "data.joined=true",
    ]  # fmt: skip
    config = write_config(tmp_path)
    assert cli.main(["train", str(config), *given[:-1]]) == 1
    assert "data.joined" in capsys.readouterr().err
    train(load_config(config, given), quiet=True)
    for sources in ([], ["--source", str(joined)]):
        found = printed(capsys, tmp_path / "run", "--shard", "joined.tar", "--json", *sources)
        assert {row["sample_id"] for row in json.loads(found)["rows"]} == set(range(40))
    assert cli.main(["verify", str(config), *given, "--timeout", "100", "one"]) == 0
    assert "one process: equal" in capsys.readouterr().out


def test_no_log_is_one_message(tmp_path, capsys) -> None:
    assert "found no log of rows, expected" in printed(capsys, tmp_path, "--step", 1, status=1)
