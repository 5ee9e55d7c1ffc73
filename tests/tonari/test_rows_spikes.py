"""Wrong rows are found from a run's metrics and its log: they spoil each step that they are in."""

import json
import math
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from dataio.base.errors import DamagedFileError
from dataio.base.lines import checked_line
from tests.trainer.digits import write_config
from tonari import cli
from tonari.rows.spike_words import spike_document, spike_words, suspect_words
from tonari.rows.spikes import SCHEMA, read_losses
from tonari.trainer.config.config import load_config
from tonari.trainer.run.loop import train
from tonari.trainer.watch.spikes import NEAR, Logged, Spike, find_spikes

EPOCHS = 4


@dataclass(frozen=True)
class SpikedRun:
    """A run, and the samples with the other's label."""

    config: Path
    wrong: set[int]

    @property
    def directory(self) -> Path:
        return self.config.parent / "runs"


def write_lines(run: Path, *lines: dict[str, object]) -> None:
    run.mkdir(exist_ok=True)
    text = "".join(checked_line(line) + "\n" for line in lines)
    (run / "metrics.jsonl").write_text(text)


def at(step: int, kind: str = "step", epoch: int = 0, loss: float = 1.0) -> dict[str, object]:
    return {"kind": kind, "epoch": epoch, "step": step, "loss": loss}


def test_a_line_s_loss_is_of_the_steps_since_the_last_one_or_the_epoch_s_end(tmp_path) -> None:
    write_lines(
        tmp_path / "run", at(4), at(6, "evaluation"), at(8), at(10, "epoch"), at(12, epoch=1),
        at(16, epoch=1), at(12, "checkpoint", epoch=1), at(16, epoch=1, loss=math.nan),
    )  # fmt: skip
    assert [(line.epoch, line.steps) for line in read_losses(tmp_path / "run")] == [
        (0, range(1, 5)), (0, range(5, 9)), (1, range(11, 13)), (1, range(13, 17)),
    ]  # fmt: skip
    assert read_losses(tmp_path / "run" / "checkpoints" / "step-12")[-1].loss == math.inf


def test_a_run_without_metrics_or_steps_in_them_is_named(tmp_path) -> None:
    with pytest.raises(ValueError, match=r"found no metrics\.jsonl, expected the run"):
        read_losses(tmp_path)
    write_lines(tmp_path, at(10, "epoch"))
    with pytest.raises(ValueError, match=r"expected one every run\.log_steps"):
        read_losses(tmp_path)
    write_lines(tmp_path, at(4), at(8, loss=2.0))
    metrics = tmp_path / "metrics.jsonl"
    metrics.write_text(metrics.read_text().replace('"loss": 2.0', '"loss": 9.0'))
    with pytest.raises(DamagedFileError, match=r"line 2 does not match its checksum"):
        read_losses(tmp_path)


def test_a_spike_is_far_above_what_is_around_it_and_a_fall_is_none() -> None:
    rng = np.random.default_rng(0)
    falling = 5 * np.exp(-np.arange(400) / 100) + 0.02 * rng.normal(size=400)
    falling[300] += 1.0
    falling[350] = math.inf
    falling[200] -= 1.0
    lines = [Logged(0, range(n + 1, n + 2), float(loss)) for n, loss in enumerate(falling)]
    spikes, _ = find_spikes(lines, times=10)
    assert [spike.logged.steps[0] for spike in spikes] == [301, 351]
    assert spikes[0].excess == pytest.approx(1.0, abs=0.2)
    assert find_spikes(lines[300 - NEAR // 2 : 300], times=10) == ([], [])


def test_the_start_of_training_is_counted_apart() -> None:
    losses = [9 / n + 0.1 * (n % 2) + 5 * (n == 90) for n in range(1, 199)]
    lines = [Logged(0, range(n, n + 1), loss) for n, loss in enumerate(losses, 1)]
    spikes, at_start = find_spikes(lines, times=4)
    assert [spike.logged.steps[0] for spike in spikes] == [90]
    assert 5 < len(at_start) < NEAR
    assert f"not counted: {len(at_start)} until step" in spike_words([], at_start)[0]


@pytest.fixture(
    scope="module",
    params=[(400, 3, 16), pytest.param(
        (50_000, 20, 64), marks=[pytest.mark.slow, pytest.mark.timeout(1200)]
    )], ids=["400 rows", "50,000 rows"],
)  # fmt: skip
def trained(request, tmp_path_factory: pytest.TempPathFactory) -> SpikedRun:
    """Train on pictures of which some have the other's label."""
    num_samples, num_wrong, batch_size = request.param
    tmp_path = tmp_path_factory.mktemp("spikes")
    config = write_config(tmp_path, num_samples=num_samples)
    table = pq.read_table(tmp_path / "train.parquet")
    labels = table["cls"].to_numpy().copy()
    wrong = np.random.default_rng(1).permutation(num_samples)[:num_wrong]
    labels[wrong] = 1 - labels[wrong]
    pq.write_table(table.set_column(1, "cls", pa.array(labels)), tmp_path / "train.parquet")
    given = (f"run.epochs={EPOCHS}", "run.checkpoint_epochs=1", f"data.batch_size={batch_size}")
    train(load_config(config, given), quiet=True)
    return SpikedRun(config, set(wrong.tolist()))


def test_two_commands_find_wrong_rows_and_go_on_without_them(trained, tmp_path, capsys) -> None:
    found = tmp_path / "found.parquet"
    given = ["rows", str(trained.directory), "--spikes", "10", "--parquet", str(found)]
    assert cli.main(given) == 0
    assert f"{len(trained.wrong)} rows that were in one each time" in capsys.readouterr().out
    assert set(pq.read_table(found)["sample_id"].to_pylist()) == trained.wrong
    assert cli.main([*given, "--json"]) == 0
    document = json.loads(capsys.readouterr().out)
    assert {row["sample_id"] for row in document["rows"]} == trained.wrong
    epochs = {spike["epoch"] for spike in document["spikes"]}
    assert all(len(epochs) >= row["spikes"] == row["trained"] >= 3 for row in document["rows"])
    checkpoints = sorted((trained.directory / "checkpoints").glob("step-*"))
    more = (f"run.epochs={EPOCHS + 2}", f"data.exclude={found}")
    train(load_config(trained.config, more), resume=str(checkpoints[-1]), quiet=True)
    one = str(min(trained.wrong))
    assert cli.main(["rows", str(trained.directory), "--sample", one, "--json"]) == 0
    rows = json.loads(capsys.readouterr().out)["rows"]
    assert {row["epoch"] for row in rows if row["what"] == "excluded"} >= {EPOCHS, EPOCHS + 1}


def test_losses_that_are_no_numbers_are_null_in_json() -> None:
    spikes, _ = find_spikes([Logged(0, range(1, 2), math.inf)], times=10)
    table = pa.table({"sample_id": [3], "excess": [math.inf]})
    document = spike_document(spikes, table)
    assert json.loads(json.dumps(document, allow_nan=False))["rows"] == [
        {"sample_id": 3, "excess": None}
    ]


def test_a_quiet_run_has_no_suspects(trained, capsys) -> None:
    assert cli.main(["rows", str(trained.directory), "--spikes", "1e9"]) == 0
    assert "`tonari hardest` names single samples" in capsys.readouterr().out


@pytest.mark.parametrize(("listed", "said"), [(2, "At least 3 of the spikes hold none"), (3, "")])
def test_spikes_that_no_listed_row_explains_are_counted(listed: int, said: str) -> None:
    spikes = [Spike(Logged(n, range(n, n + 1), 9.0), 1.0) for n in range(5)]
    row = {"sample_id": 7, "spikes": listed, "trained": listed, "excess": 8.0, "share": None}
    words = suspect_words(spikes, pa.Table.from_pylist([row], schema=SCHEMA))
    assert words.startswith("5 spikes in 5 epochs, 1 rows that were in one each time")
    assert ("At least" in words) == bool(said)
    assert said in words
