"""`tonari bench exchange`: every way delivers each sample once, and its figures are there."""

import json
import sys
from collections.abc import Iterable
from pathlib import Path

import msgspec
import numpy as np
import pytest

from dataio.base.errors import install_command
from dataio.plan.layout import Layout
from dataio.plan.policies import ExchangeContext, RowStore
from dataio.rows.rows import IdStore
from dataio.world import World, run_threads, thread_worlds
from tonari import cli
from tonari.bench.errors import BenchError
from tonari.bench.exchange.exchange import SETS, MeasuredExchange, lines
from tonari.bench.exchange.report import epochs_csv, goals, rows, table
from tonari.bench.exchange.task import Epoch, ExchangeSettings, ExchangeTask, Step
from tonari.bench.exchange.ways import Gets, OneByOne


def epoch(way: str, fraction: float, repeat: int, epoch_s: float, **changes: object) -> Epoch:
    plain: dict[str, object] = {
        "way": way, "fraction": fraction, "step": "sleep", "repeat": repeat, "epoch_s": epoch_s,
        "epoch_end_s": 0.01, "cpu_s": 1.0, "sent_bytes": 0, "messages": 0, "blocked_s": 0.0,
        "overlap_fraction": 0.0, "exact": True,
    }  # fmt: skip
    return Epoch(**{**plain, **changes})  # type: ignore[arg-type]


def case(epochs: Iterable[Epoch], name: str = "100k") -> MeasuredExchange:
    return MeasuredExchange(SETS[name], 2, epochs=list(epochs))


def median(row: dict[str, object], name: str) -> object:
    found = row[name]
    return found["median"] if isinstance(found, dict) else None


def test_a_ratio_to_local_is_the_median_of_ratios_within_a_repeat() -> None:
    local = [epoch("local", 0.0, n, s) for n, s in enumerate((1.0, 10.0, 100.0))]
    ours = [epoch("exchange", 0.1, n, s) for n, s in enumerate((1.2, 11.0, 150.0))]
    found = rows(case([*local, *ours]))
    assert [row["way"] for row in found] == ["local", "exchange"]
    assert median(found[1], "ratio_to_local") == pytest.approx(1.2)


def test_processor_time_is_what_an_epoch_took_beyond_local_for_each_gigabyte_sent() -> None:
    local = epoch("local", 0.0, 0, 2.0, cpu_s=1.5)
    ours = epoch("exchange", 0.1, 0, 2.0, cpu_s=2.5, sent_bytes=500_000_000)
    row = rows(case([local, ours]))[1]
    assert row["cpu_s_per_gb"] == pytest.approx(2.0)
    assert row["rate_bytes_per_s"] == pytest.approx(500e6 / 2 / 2.0)


def test_a_goal_is_for_two_ranks_and_a_sleeping_step_alone() -> None:
    def at(ratio: float, step: Step, ranks: int) -> list[dict[str, object]]:
        found = case([
            epoch("local", 0.0, 0, 1.0, step=step), epoch("exchange", 0.1, 0, ratio, step=step),
        ])  # fmt: skip
        found.ranks = ranks
        return goals(rows(found))

    assert [goal["reached"] for goal in at(1.02, "sleep", 2)] == [True]
    assert [goal["reached"] for goal in at(1.04, "sleep", 2)] == [False]
    assert at(1.04, "product", 2) == at(1.04, "sleep", 4) == []


def test_an_epoch_that_lost_a_sample_is_called_wrong() -> None:
    found = case([epoch("local", 0.0, 0, 1.0), epoch("get", 0.1, 0, 1.0, exact=False)])
    assert table([found]).count("WRONG") == 1
    assert epochs_csv([found]).count("\n") == 3


class Rows(IdStore):
    """Ids for rows, and what arrived."""

    def __init__(self, ids: np.ndarray) -> None:
        super().__init__(ids)
        self.arrived: dict[int, int] = {}

    def write_arrivals(self, slots, rows) -> None:
        self.arrived |= dict(zip(slots.tolist(), rows.sample_id.tolist(), strict=True))


@pytest.mark.parametrize("num_ranks", [2, 3, 4])
def test_gets_one_by_one_bring_the_rows_that_partial_brings(num_ranks: int) -> None:
    layout, policy = Layout((1,) * num_ranks, 40 * num_ranks + 1), OneByOne(0.4)

    def run(world: World) -> tuple[list[int], list[int]]:
        ids = policy.placement(layout, node=world.node, epoch=0, seed=0)
        store = Rows(ids)
        held: RowStore = store
        gets = policy.begin(ExchangeContext(world, held, layout, 0, 0, range(5), 8, 0))
        assert isinstance(gets, Gets)
        for step in range(5):
            gets.progress(step)
        assert gets.finish(None)["rows"] == len(store.arrived) == 16
        for slot, sample_id in store.arrived.items():
            ids[slot] = sample_id
        expected = policy.placement(layout, node=world.node, epoch=1, seed=0)
        return ids.tolist(), expected.tolist()

    for found, expected in run_threads(thread_worlds(layout.replicas), run):
        assert found == expected


def test_a_task_comes_back_from_its_text() -> None:
    settings = ExchangeSettings(
        exchanges=(0.0, 0.1), get=0.2, shared_rate=1.5, steps=("sleep",), step_s=0.001, repeats=1
    )
    task = ExchangeTask(
        settings=settings, rows_per_rank=64, row_bytes=10, batch_size=32, cache="/a", shared="/b"
    )
    assert msgspec.json.decode(msgspec.json.encode(task), type=ExchangeTask) == task


def test_a_job_that_fails_or_falls_silent_is_an_error_with_its_last_words(tmp_path: Path) -> None:
    fails = [sys.executable, "-c", "print('{}', flush=True); raise OSError('no disk')"]
    with pytest.raises(BenchError, match=r"ended with 1; its last errors: OSError: no disk; try"):
        list(lines(fails, tmp_path / "log", 30.0))
    silent = [sys.executable, "-c", "import sys; sys.stdin.close(); __import__('time').sleep(60)"]
    with pytest.raises(BenchError, match=r"wrote nothing for 0\.5 s"):
        list(lines(silent, tmp_path / "log", 0.5))


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        ("--ranks 1", "one rank has nobody to exchange with"),
        ("--exchanges 1.5", "must be fractions"),
        ("--scale 0", "must be in"),
    ],
)
def test_a_wrong_flag_is_refused_before_anything_runs(
    flags: str, message: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert cli.main(["bench", "exchange", *flags.split()]) == 2
    # Drawn in a box, which may break a line anywhere.
    said = " ".join(word for word in capsys.readouterr().err.split() if word != "│")
    assert message in said


def test_without_mpi_the_command_says_how_to_install_it(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    monkeypatch.setattr(sys, "executable", str(tmp_path / "python"))
    monkeypatch.setenv("PATH", str(tmp_path))
    assert cli.main(["bench", "exchange"]) == 1
    assert install_command("mpi-bundled") in capsys.readouterr().err


@pytest.mark.multirank
def test_the_command_measures_every_way_on_two_ranks(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    pytest.importorskip("mpi4py")
    said = "--json --sets 3k --scale 0.04 --exchanges 0 0.3 --step 0.002 --repeats 1 --no-bandwidth"
    files = ["--csv", str(tmp_path / "out.csv"), "--plot", str(tmp_path / "out.png")]
    work = tmp_path / "work"
    status = cli.main(["bench", "exchange", *said.split(), *files, "--directory", str(work)])
    output = capsys.readouterr()
    assert status == 0, output.err
    document = json.loads(output.out)
    found = {(r["way"], r["fraction"], r["step"]): r for r in document["records"]}
    assert len(found) == 10, "five ways, two kinds of step"
    assert all(row["exact"] for row in found.values())
    sent = 2 * 0.3 * 128 * 3072 / 2
    assert found["exchange", 0.3, "sleep"]["sent_bytes_per_rank"] == pytest.approx(sent, rel=0.1)
    assert found["exchange", 0.0, "sleep"]["sent_bytes_per_rank"] == 0
    assert found["local", 0.0, "sleep"]["epoch_s"]["median"] > 4 * 0.002
    assert found["get", 0.1, "sleep"]["messages_per_rank"] == 2 * 12
    assert document["calibrated"][0]["products_a_step"] >= 1
    assert (tmp_path / "out.csv").read_text().count("\n") == 11
    assert (tmp_path / "out.png").stat().st_size > 1000
    assert not list(work.iterdir()), "nothing is left behind"
