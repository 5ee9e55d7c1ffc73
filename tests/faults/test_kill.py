"""Jobs that are ended anywhere and started again, as if nothing had been: see `tests/faults/kill`.

``python -m tests.faults.kill --seeds 0:300`` runs more of the same, ``--what train`` the trainer's.
"""

import os
import shutil
import subprocess
import tempfile
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pyarrow as pa
import pytest

from dataio.base.atomic import read_record, read_table, write_record, write_table
from tests.faults.kill import compare
from tests.faults.kill.compare import Start
from tests.faults.kill.harness import Harness, quick_directory
from tests.faults.kill.job import Options
from tests.faults.kill.points import Kill
from tests.faults.kill.schedule import Configuration, Interruption, parts

# Several starts of several ranks each; every wait within them has its own limit.
pytestmark = [pytest.mark.timeout(600), pytest.mark.thorough]

LONG = bool(os.environ.get("TONARI_LONG"))
LOADER_SEEDS = [
    *range(8),
    *(pytest.param(seed, marks=pytest.mark.nightly) for seed in range(8, 100 if LONG else 24)),
]
TRAIN_SEEDS = range(50) if LONG else range(1)
NODES = 2
"""Of one rank each, in the schedules that are not drawn."""


@pytest.fixture(scope="module")
def harness() -> Iterator[Harness]:
    with (
        tempfile.TemporaryDirectory(dir=quick_directory(), prefix="kill-") as directory,
        Harness(Path(directory)) as opened,
    ):
        yield opened


@pytest.mark.parametrize("seed", LOADER_SEEDS)
def test_kill_anywhere_restart_at_once_and_nothing_is_lost_or_doubled(harness, seed):
    result = harness.run(seed)
    assert result.faults == [], f"{result.configuration}: {'; '.join(map(str, result.done))}"


@pytest.mark.smoke
@pytest.mark.multirank
def test_kill_one_rank_under_mpiexec_and_the_same_command_goes_on(harness):
    chosen = Configuration(Options(importance="kakurenbo", saves="own"), 4, 2)
    kill = Kill(rank=2, name="report", number=8, after=False, how="one", part="train")
    result = harness.follow(chosen, [Interruption(kill=kill)], launcher="mpiexec")
    assert result.done
    assert result.faults == []


@pytest.mark.parametrize("seed", TRAIN_SEEDS)
def test_kill_the_trainer_anywhere_and_the_same_command_goes_on(harness, seed):
    result = harness.run(seed, what="train")
    assert result.faults == [], f"{result.configuration}: {'; '.join(map(str, result.done))}"


@pytest.mark.parametrize("stage", ["before", "overlap"])
def test_rows_sealed_but_not_committed_stay_where_they_were_when_others_have_moved(harness, stage):
    """Ended before the fill is committed; then stopped past an exchange; then started again."""
    chosen = Configuration(Options(stage=stage), NODES, 1)
    steps = Counter(
        record["epoch"] for record in harness.whole(chosen).start.logs[0] if "ids" in record
    )
    if stage == "overlap":
        # With its last batch all rows are sealed; they are committed when the epoch ends.
        first, second = Interruption(stop=steps[0], saves=True), Interruption(stop=3, saves=True)
    else:
        first = Interruption(kill=_before_the_fill_is_committed(harness, chosen))
        second = Interruption(stop=steps[0] + 3, saves=True)
    result = harness.follow(chosen, [first, second])
    assert result.done == [first, second]
    assert result.faults == []


def _before_the_fill_is_committed(harness: Harness, chosen: Configuration) -> Kill:
    """The moment before the base of all rows is durable."""
    seen = 0
    for name, part in parts(harness.whole(chosen).first[0]):
        seen += name == "fsync base"
        if (name, part) == ("fsync base", "fill"):
            return Kill(rank=0, name=name, number=seen, after=False, how="all", part=part)
    raise LookupError("the fill is committed otherwise: name the moment in this test")


SEALED = "world make arrivals durable"
"""Where all ranks agree that an epoch's arrivals are durable."""


@pytest.mark.parametrize(
    ("rank", "name", "after"),
    [
        (1, "step", False),
        (3, "fsync delta", False),
        pytest.param(0, SEALED, False, marks=pytest.mark.nightly),
        (0, SEALED, True),
        (2, "replace manifest.json", False),
        pytest.param(2, "replace manifest.json", True, marks=pytest.mark.nightly),
    ],
)
def test_rows_that_are_dealt_anew_survive_a_kill_at_each_stage_of_an_epoch_end(
    harness, rank, name, after
):
    """While rows travel; before, when and after they are sealed, and as one node commits them."""
    chosen = Configuration(Options(shuffle="dealt"), 4, 2)
    trace = [moment for moment, _ in harness.whole(chosen).first[rank]]
    # Staging has replaced the manifest before; rows travel from the first step on.
    begin = trace.index({"step": "report", "replace manifest.json": SEALED}.get(name, trace[0]))
    number = trace[: trace.index(name, begin) + 1].count(name)
    kill = Kill(rank=rank, name=name, number=number, after=after, how="all", part="epoch end")
    result = harness.follow(chosen, [Interruption(kill=kill)])
    assert result.done
    assert result.faults == []


def test_the_moments_of_a_run_are_those_that_a_kill_is_drawn_from(harness):
    """What is renamed in the code would else be missed in silence."""
    chosen = Configuration(Options(stage="before", importance="kakurenbo"), NODES, 1)
    whole = harness.whole(chosen)
    assert whole.faults == []
    found = {(part, name) for trace in whole.first for name, part in parts(trace)}
    found_later = {(part, name) for trace in whole.later for name, part in parts(trace)}
    assert {part for part, _ in found} >= {
        "staging", "fill", "train", "refresh", "save", "epoch end", "close"
    }  # fmt: skip
    assert {part for part, _ in found_later} >= {"restore"}
    # What decides of a cache and of a save gets its name.
    decides = ("staged", "base", "manifest.json", "delta", "node", "state.json")
    assert {name for _, name in found} >= {f"replace {kind}" for kind in decides}


def test_a_schedule_in_which_nothing_was_interrupted_does_not_count(harness):
    chosen = Configuration(Options(), NODES, 1)
    never = Kill(rank=0, name="step", number=10_000, after=False, how="one", part="train")
    assert harness.follow(chosen, [Interruption(kill=never)]).done == []


def spoilt(start: Start, **changed: Any) -> Start:
    """The same start, but for one step of rank 1."""
    logs = [list(log) for log in start.logs]
    place = next(n for n, record in enumerate(logs[1]) if record["kind"] == "step") + 4
    logs[1][place : place + 1] = [logs[1][place] | changed] if changed else []
    return Start(logs, start.statuses)


def test_what_is_wrong_is_noticed(harness, tmp_path):
    """Of the comparison itself: of a sound run it says nothing, and each fault it names."""
    options = Options(importance="kakurenbo")
    whole = harness.whole(Configuration(options, NODES, 1))
    sound = whole.start
    assert list(compare.faults_of_batches(sound, [sound])) == []
    wrong = (("ids", [1, 2, 3, 4, 5]), ("weights", [2.0] * 5), ("wrong", [7]), ("step", 50))
    for name, value in wrong:
        assert list(compare.faults_of_batches(sound, [spoilt(sound, **{name: value})])), name
    assert list(compare.faults_of_batches(sound, [spoilt(sound)])), "a batch was left out"
    late = Start([log[len(log) // 2 :] for log in sound.logs], sound.statuses)
    assert list(compare.faults_of_batches(sound, [late])), "the first half was never trained"
    doubled = spoilt(sound, ids=compare.batches(sound.logs[1])[0]["ids"])
    assert list(compare.faults_of_whole(doubled, shows_all=False)), "a sample was trained twice"
    greedy = spoilt(sound, source_bytes=1 << 40)
    assert list(compare.faults_of_source(options, whole.coda, [sound, greedy]))
    other = tmp_path / "other"
    shutil.copytree(whole.place, other)
    assert list(compare.faults_of_scores(options, whole.place, other)) == []
    _exchange_two_scores(compare.newest(other))
    assert len(list(compare.faults_of_scores(options, whole.place, other))) > 1
    (other / "saves/last.partial").mkdir()
    assert list(compare.litter(options, other, [sound]))


def _exchange_two_scores(save: Path) -> None:
    """Write a save that is sound, of other scores."""
    path = save / "node-0.arrow"
    table = read_table(path)
    losses = table.column("loss").to_pylist()
    place = next(n for n in range(len(losses)) if losses[n] != losses[0])
    losses[0], losses[place] = losses[place], losses[0]
    number = table.column_names.index("loss")
    column = pa.array(losses, table.schema.field("loss").type)
    write_table(path, table.set_column(number, table.schema.field("loss"), column))
    data, state = path.read_bytes(), read_record(save / "state.json")
    state["nodes"][0] = [len(data), data[-8:].hex()]
    write_record(save / "state.json", state)


def test_a_process_that_is_left_behind_is_noticed(harness, monkeypatch):
    monkeypatch.setattr("tests.faults.kill.harness.GONE_S", 0.0)
    pipe = subprocess.PIPE
    with subprocess.Popen(["cat"], stdin=pipe, stdout=pipe, env=harness.environment) as left:
        assert left.stdin is not None
        assert left.stdout is not None
        left.stdin.write(b"\n")
        left.stdin.flush()
        assert left.stdout.read(1), "its environment can be read once it runs"
        assert [line.split()[0] for line in harness.left_over()] == [str(left.pid)]
    assert harness.left_over() == []
