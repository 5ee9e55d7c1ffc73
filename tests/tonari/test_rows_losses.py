"""Losses beside rows are those that were reported, through kills and on other ranks."""

import json
import math
from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
import pytest

import shuffle
from dataio import Loader, Reports, Workers
from dataio.world import World, run_threads, thread_worlds
from importance import Full
from tests.memory_source import FIELDS, MemorySource
from tonari import cli, rows
from tonari.rows.losses import loss_words, read_history
from tonari.rows.spikes import find_suspects, shares_of
from tonari.sparkline import sparkline
from tonari.trainer.watch.spikes import Logged, Spike

NUM_SAMPLES = 41
Recorded = dict[tuple[int, int], float]
"""The loss of a sample in an epoch, as it was last reported of kept steps."""


def make(root: Path, world: World, policy: shuffle.Partial | shuffle.Global) -> Loader:
    return Loader(
        MemorySource(NUM_SAMPLES), batch_size=3, fields=FIELDS, cache=root / "cache", seed=3,
        shuffle=policy, importance=Full(columns=("history",)), world=world,
        workers=Workers(threads=0), reports=Reports(progress=False, rows=root / "rows"),
    )  # fmt: skip


def train(
    root: Path, layout: list[int], policy: shuffle.Partial | shuffle.Global, *, steps: int, leg: int
) -> Recorded:
    """Go on from what was saved, save after some steps, and train two more that a kill loses.

    Returns:
        What all ranks reported up to the save.
    """

    def job(world: World) -> Recorded:
        seen: Recorded = {}
        with make(root, world, policy) as loader:
            if leg:
                loader.restore(root / f"saved{leg - 1}")
            step = 0
            for epoch in loader.epochs(99):
                for batch in loader:
                    step += 1
                    loss = (batch["sample_id"] * 7 + epoch * 5 + step) % 64 / 8
                    loader.report(batch, loss)
                    if step <= steps:
                        seen |= {
                            (sample, epoch): value
                            for sample, value, slot in zip(
                                batch["sample_id"].tolist(), loss.tolist(), batch["slot"].tolist(),
                                strict=True,
                            )
                            if slot >= 0
                        }  # fmt: skip
                    if step == steps:
                        loader.save(root / f"saved{leg}")
                    elif step == steps + 2:
                        return seen
        raise AssertionError("the run is longer")

    recorded: Recorded = {}
    for part in run_threads(thread_worlds(layout), job):
        recorded |= part
    return recorded


@pytest.mark.parametrize("policy", [shuffle.Partial(0.4), shuffle.Global(moves=True)])
def test_each_time_that_a_row_was_trained_has_its_loss_through_kills_on_other_ranks(
    tmp_path: Path, policy
) -> None:
    recorded: Recorded = {}
    for leg, (layout, steps) in enumerate((([1], 20), ([1, 1], 12), ([2, 1], 9), ([1], 33))):
        recorded |= train(tmp_path, layout, policy, steps=steps, leg=leg)
    run = rows.open(tmp_path / "saved3")
    table = run.losses(run.of(sample_id=range(NUM_SAMPLES)))
    found = {
        (row["sample_id"], row["epoch"]): row["loss"]
        for row in table.to_pylist()
        if row["kept"] and row["what"] == "trained"
    }
    assert found == recorded
    assert len({epoch for _, epoch in recorded}) > 4
    thrown = table.filter(pc.invert(table["kept"]))
    assert len(thrown) > 0, "steps were thrown away"
    assert thrown["loss"].null_count == len(thrown)
    at = run.losses(run.at(epoch=1))
    assert {(row["sample_id"], 1): row["loss"] for row in at.to_pylist()} == {
        place: loss for place, loss in recorded.items() if place[1] == 1
    }


def test_a_save_of_steps_that_were_thrown_away_is_not_read(tmp_path: Path) -> None:
    train(tmp_path, [1], shuffle.Partial(0.4), steps=20, leg=0)
    train(tmp_path, [1], shuffle.Partial(0.4), steps=12, leg=1)
    (tmp_path / "saved1").rename(tmp_path / "thrown")
    train(tmp_path, [1], shuffle.Partial(0.4), steps=9, leg=1)
    course, ids = rows.open(tmp_path / "saved1").answers.course, np.arange(3)
    assert read_history(tmp_path / "saved1", course, ids) is not None
    assert read_history(tmp_path / "thrown", course, ids) is None


def test_without_the_column_no_loss_is_listed(tmp_path: Path) -> None:
    train(tmp_path, [1], shuffle.Partial(0.4), steps=3, leg=0)
    (tmp_path / "saved0" / "state.json").unlink()
    run = rows.open(tmp_path / "rows")
    table = run.of(sample_id=[0, 1])
    assert run.losses(table) is table


def test_the_command_draws_the_losses_of_a_sample_and_prints_numbers(tmp_path, capsys) -> None:
    recorded = train(tmp_path, [1], shuffle.Partial(0.4), steps=42, leg=0)
    assert cli.main(["rows", str(tmp_path / "saved0"), "--sample", "5"]) == 0
    mine = [recorded[5, epoch] for epoch in range(3)]
    shown = capsys.readouterr().out
    assert f"sample 5: loss {sparkline(mine)} in epochs 0 to 2" in shown
    assert cli.main(["rows", str(tmp_path / "saved0"), "--sample", "5", "--json"]) == 0
    listed = json.loads(capsys.readouterr().out)["rows"]
    assert [row["loss"] for row in listed if row["what"] == "trained"] == mine


def test_a_line_has_a_bar_an_epoch() -> None:
    assert sparkline([0.0, 7.0, math.nan, math.inf, 3.5]) == "▁█·∞▅"
    assert sparkline([2.0, 2.0]) == "▁▁"
    assert sparkline([]) == ""
    table = pa.table({"sample_id": [4, 4], "epoch": [1, 3], "loss": [2.0, 1.0]})
    assert loss_words(table) == ["sample 4: loss █·▁ in epochs 1 to 3, from 1 to 2"]


def test_a_rise_is_divided_by_how_far_rows_are_above_the_usual() -> None:
    def shares(*losses: float | None) -> list[float]:
        return shares_of(pa.table({"loss": pa.array(losses, pa.float32())}), usual=1.0)

    assert shares(0.5, 4.0, 2.0, None) == [0.0, 0.75, 0.25, 0.0]
    assert shares(math.inf, 9.0, math.inf) == [0.5, 0.0, 0.5]
    assert shares(None, None) == shares(0.5, 1.0) == []
    assert shares_of(pa.table({"sample_id": [1]}), usual=1.0) == []


def test_a_spike_of_one_epoch_names_the_rows_that_have_more_than_their_part(tmp_path) -> None:
    recorded = train(tmp_path, [1], shuffle.Partial(0.4), steps=30, leg=0)
    run = rows.open(tmp_path / "saved0")
    of_step = run.at(step=9)["sample_id"].to_pylist()
    losses = {sample: recorded[sample, 0] for sample in of_step}
    usual = min(losses.values())
    found = find_suspects(run, [Spike(Logged(0, range(9, 10), 9.0), usual)], ()).to_pylist()
    rise = {sample: loss - usual for sample, loss in losses.items()}
    more = {sample for sample in of_step if rise[sample] > np.mean([*rise.values()])}
    assert 0 < len(more) < len(of_step)
    assert {row["sample_id"] for row in found} == more
    assert [row["share"] for row in found] == sorted((row["share"] for row in found), reverse=True)
