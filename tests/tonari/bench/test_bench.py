"""`tonari bench loader`: its figures are there, and a loader that is wrong is called wrong."""

import json
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from tonari import cli
from tonari.bench.loader.contenders import CONTENDERS, HEADLINE, Contender
from tonari.bench.loader.environments import interpreter
from tonari.bench.loader.figures import (
    EpochFigures,
    LoaderJob,
    LoaderRecord,
    LoaderSettings,
    compare,
)
from tonari.bench.loader.loader import measure_loaders
from tonari.bench.loader.peers.harness import DeliveredBatch, label_spread, mismatched
from tonari.bench.loader.peers.pixels import decode
from tonari.bench.loader.report import ratios, table
from tonari.bench.loader.sets import SETS, SampleSet, make_set, open_set

pytestmark = pytest.mark.thorough

TINY = SampleSet(name="tiny", num_samples=128, sample_bytes=64, batch_size=16)

FAKE_PEER = '''
"""A loader in order, which {what}."""
import numpy as np
from tonari.bench.loader.peers.harness import DeliveredBatch, PeerFeed, run

def prepare(task):
    (task.open_source(), __import__("pathlib").Path(task.prepared).mkdir())

def open_feed(task):
    packed = task.open_source()
    def epoch(number):
        order = np.arange(packed.spec.num_samples).reshape(-1, task.batch_size)
        for number, ids in enumerate(order):
            payload = packed.rows()[ids]
            {damage}
            yield DeliveredBatch(ids, packed.labels[ids], payload)
    return PeerFeed(epoch)

run(prepare, open_feed)
'''

DAMAGES = {
    "is right": "pass",
    "loses a batch": "if number == 3: continue",
    "repeats a sample": "if number == 3: ids = np.append(ids, 0); payload = packed.rows()[ids]",
    "swaps content": "if number == 3: payload = payload[::-1]",
    "dies": "if number == 3: raise RuntimeError('no more batches')",
}


def make_job(
    tmp_path: Path, contenders: list[Contender], *, spec: SampleSet = TINY, **changes: object
) -> LoaderJob:
    plain: dict[str, object] = {
        "workers": (0,), "repeats": 2, "time_limit_s": 60.0, "round_s": 0.0, "timeout_s": 30.0,
    }  # fmt: skip
    return LoaderJob(
        settings=LoaderSettings(**{**plain, **changes}),  # type: ignore[arg-type]
        sets=[spec], contenders=contenders, directory=tmp_path,
        environments=tmp_path / "environments", keep=True,
    )  # fmt: skip


def fake(tmp_path: Path, what: str) -> Contender:
    program = tmp_path / f"{what.replace(' ', '_')}.py"
    program.write_text(FAKE_PEER.format(what=what, damage=DAMAGES[what]))
    return Contender(name=what, kind="peer", program=program, modules=("numpy",))


def test_a_peer_that_loses_repeats_or_swaps_samples_is_reported_as_wrong(tmp_path: Path) -> None:
    run = make_job(tmp_path, [fake(tmp_path, what) for what in DAMAGES])
    records = {r.contender: r for r in measure_loaders(run, lambda words: None)}

    def first(what: str) -> tuple[int, int, int]:
        seen = records[what].first
        assert seen is not None, records[what].problem
        return seen.lost, seen.repeated, seen.mismatched

    right = records["is right"]
    assert (right.is_exact, right.problem, len(right.epochs)) == (True, "", 2)
    assert first("loses a batch") == (16, 0, 0)
    assert first("repeats a sample")[:2] == (0, 1)
    assert first("swaps content") == (0, 0, 16)
    assert "RuntimeError: no more batches" in records["dies"].problem
    shown = table(list(records.values()))
    assert shown.count("WRONG") == 3
    assert "WRONG: 48 lost, 0 repeated" in shown, "one batch in each of three epochs"
    assert ratios(list(records.values()))["best_peer"] == {"contender": "is right", "workers": 0}


def figures(rate: float, *, lost: int = 0) -> EpochFigures:
    return EpochFigures(
        samples=1000, elapsed_s=1000 / rate, cpu_s=1.0, first_batch_s=0.1, pss_bytes=1,
        label_spread=1.0, lost=lost, repeated=0, mismatched=0,
    )  # fmt: skip


def record(
    name: str, kind: str, rates: list[float], *, workers: int = 0, lost: int = 0
) -> LoaderRecord:
    return LoaderRecord(
        set_name="3k", contender=name, kind=kind, ranks=1, workers=workers, temperature="warm",
        epochs=[figures(rate, lost=lost) for rate in rates],
    )  # fmt: skip


def test_a_ratio_is_the_median_of_ratios_within_a_turn() -> None:
    ours = record(HEADLINE, "ours", [10.0, 100.0, 30.0])
    limit = record("limit-gather", "limit", [20.0, 200.0, 40.0])
    found = ratios([ours, limit])
    assert found["ratio_to_limit"] == pytest.approx(0.5)
    assert found["ratio_to_best_peer"] is None


def test_the_best_peer_is_the_fastest_that_is_exact_at_any_number_of_workers() -> None:
    records = [
        record(HEADLINE, "ours", [50.0]),
        record("quick but wrong", "peer", [1000.0], lost=1),
        record("peer", "peer", [10.0]),
        record("peer", "peer", [100.0], workers=2),
    ]
    found = ratios(records)
    assert found["best_peer"] == {"contender": "peer", "workers": 2}
    assert found["ratio_to_best_peer"] == pytest.approx(0.5)


def test_the_decoder_limit_is_that_of_as_many_threads_as_ours() -> None:
    records = [
        record(HEADLINE, "ours", [50.0], workers=2),
        record("limit-decode", "limit", [40.0]),
        record("limit-decode", "limit", [80.0], workers=2),
    ]
    assert ratios(records)["ratio_to_limit"] == pytest.approx(50 / 80)


def test_an_absent_peer_is_not_installed_and_no_error(tmp_path: Path) -> None:
    absent = [c for c in CONTENDERS if c.name == "grain"]
    assert interpreter(absent[0], tmp_path) is None
    (only,) = measure_loaders(make_job(tmp_path, absent), lambda words: None)
    assert only.problem == "not installed"
    assert "not installed" in table([only])


def test_the_command_measures_ours_and_the_peers_that_are_always_there(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    said = "--json --sets 3k --scale 0.003 --repeats 1 --workers 0 --contenders limit-gather "
    said += "tonari-exchanged torch-packed webdataset"
    files = ["--csv", str(tmp_path / "out.csv"), "--plot", str(tmp_path / "out.png")]
    status = cli.main(
        ["bench", "loader", *said.split(), *files, "--directory", str(tmp_path / "sets")]
    )
    document = json.loads(capsys.readouterr().out)
    assert status == 0
    of_set = document["sets"]["3k"]
    assert of_set["ours"]["contender"] == HEADLINE
    assert of_set["limit"]["contender"] == "limit-gather"
    assert of_set["ratio_to_limit"] > 0
    assert of_set["ratio_to_best_peer"] > 0
    rows = {row["contender"]: row for row in document["records"]}
    assert len(rows) == 4
    for name, row in rows.items():
        assert row["exact"], (name, row["problem"])
        for figure in ("first_batch_s", "pss_bytes", "cpu_s_per_1000_samples", "cache_bytes"):
            assert isinstance(row[figure], int | float), (name, figure)
        assert row["samples_per_s"]["median"] > 0
        assert row["label_spread"] > 0.3
    assert rows[HEADLINE]["label_spread"] > 0.6
    assert rows[HEADLINE]["source_bytes"] > 2 * 128 * 3072
    assert document["machine"]["versions"]["torch"]
    assert document["machine"]["kernel"]
    assert (tmp_path / "out.csv").read_text().count("\n") == 5
    assert (tmp_path / "out.png").stat().st_size > 1000


def test_cold_says_how_the_files_were_dropped(tmp_path: Path) -> None:
    chosen = [c for c in CONTENDERS if c.name == "torch-packed"]
    run = make_job(tmp_path, chosen, temperatures=("cold",), repeats=1)
    (only,) = measure_loaders(run, lambda words: None)
    assert not only.problem
    assert only.is_exact
    assert len(only.epochs) == 1
    assert only.eviction.startswith("posix_fadvise")
    assert only.resident_fraction is not None
    assert 0 <= only.resident_fraction <= 1


def test_a_directory_that_holds_another_size_of_the_set_is_made_anew(tmp_path: Path) -> None:
    chosen = [c for c in CONTENDERS if c.name == "tonari"]
    for num_samples in (256, 128):
        spec = replace(TINY, num_samples=num_samples)
        run = make_job(tmp_path, chosen, spec=spec, repeats=1)
        (only,) = measure_loaders(run, lambda words: None)
        assert (only.problem, only.is_exact) == ("", True)
        assert only.epochs[0].samples == num_samples


def test_several_ranks_share_the_samples(tmp_path: Path) -> None:
    chosen = [c for c in CONTENDERS if c.name in ("torch-packed", "tonari")]
    run = make_job(tmp_path, chosen, ranks=(2,), repeats=1)
    records = list(measure_loaders(run, lambda words: None))
    found = [(r.contender, r.problem, r.is_exact) for r in records]
    assert found == [("tonari", "", True), ("torch-packed", "", True)]


@pytest.mark.parametrize("name", ["3k", "jpeg"])
def test_a_set_is_the_same_for_the_same_seed_and_tells_swapped_samples(
    tmp_path: Path, name: str
) -> None:
    spec = SETS[name].scaled(0.001)
    make_set(spec, tmp_path / "one")
    make_set(spec, tmp_path / "two")
    one, two = open_set(tmp_path / "one"), open_set(tmp_path / "two")
    assert np.array_equal(one.payload, two.payload)
    ids = np.array([0, spec.num_samples - 1])
    samples = [one.sample(i) for i in ids.tolist()]
    payload = decode(samples, spec.shape) if spec.is_jpeg else np.stack(samples)
    assert mismatched(DeliveredBatch(ids, one.labels[ids], payload), spec) == 0
    assert mismatched(DeliveredBatch(ids, one.labels[ids], payload[::-1]), spec) == 2
    assert mismatched(DeliveredBatch(ids, one.labels[ids[::-1]], payload), spec) == 2


def test_label_spread_is_one_for_a_full_shuffle_and_small_in_order() -> None:
    shuffled = np.random.default_rng(0).permutation(10_000).reshape(-1, 100)
    assert label_spread(list(shuffled), 10_000) == pytest.approx(1, abs=0.05)
    assert label_spread(list(np.sort(shuffled.ravel()).reshape(-1, 100)), 10_000) < 0.001


def test_compare_counts_what_is_lost_repeated_and_foreign() -> None:
    assert compare(np.array([0, 1, 2, 3]), 4) == (0, 0)
    assert compare(np.array([0, 1, 1, 9]), 4) == (2, 2)
    assert compare(np.array([0, 3]), 4, np.array([0, 1])) == (1, 1)
