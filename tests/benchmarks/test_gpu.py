"""The rows of what a GPU is asked: each runs tiny on a CPU, and what they measure is kept."""

import subprocess
import sys
import threading
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import simplejpeg

from benchmarks.gpu import pack, ranks, report, row, study
from benchmarks.gpu.__main__ import ROWS, main, run_for
from benchmarks.gpu.begin import join_parts
from benchmarks.gpu.row import Case, Goal, RowFile, Setting, Ways, read_cases, run_row
from tonari.ablate.call import TERMINATED
from tonari.ablate.call import _sigterm_raises as sigterm_raises
from tonari.ablate.training import Stopped
from tonari.bench.errors import BenchError

LEFT_OUT = {
    "images": {"resnet50 beside DALI on the card", "resnet50 beside DALI on the CPU"},
    "ranks": {f"{mesh.name}, {backend}" for mesh in ranks.MESHES for backend in ("gloo", "nccl")}
    - {"fsdp 2, gloo"},
}
"""Cases that need what a small machine has not."""


@pytest.fixture(scope="module")
def data(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Files of the names and the form of CIFAR-10's."""
    directory = tmp_path_factory.mktemp("data")
    pixels = np.random.default_rng(0).integers(0, 256, (64, 32, 32, 3), np.uint8)
    table = pa.table({
        "jpg": [simplejpeg.encode_jpeg(each) for each in pixels], "cls": np.arange(64) % 10,
    })  # fmt: skip
    for name in ("train", "test"):
        pq.write_table(table, directory / f"cifar10-{name}.parquet")
    return directory


@pytest.mark.thorough
@pytest.mark.parametrize(
    "name",
    [pytest.param(n, marks=[pytest.mark.nightly] * (n not in ("images", "ranks"))) for n in ROWS],
)
def test_every_row_runs_tiny(tmp_path: Path, data: Path, name: str) -> None:
    main([name, "--tiny", "--seconds", "600", "--out", str(tmp_path), "--data", str(data)])
    found = read_cases(tmp_path / "tiny" / f"{name}.json")
    left_out = {each["case"] for each in found.values() if each["problem"].startswith("left out")}
    assert left_out == LEFT_OUT.get(name, set())
    for case in found.values():
        if case["case"] in left_out:
            continue
        assert not case["problem"]
        assert case["ways"]
        assert all(np.isfinite(value) for way in case["ways"].values() for value in way.values())
        assert {"card", "driver", "torch", "commit"} <= case.keys()
    if name == "ranks":
        assert [goal["reached"] for goal in case_named(found, "fsdp 2, gloo")["goals"]] == [True]


def case_named(found: dict[str, dict[str, Any]], name: str) -> dict[str, Any]:
    return next(each for each in found.values() if each["case"] == name)


class Asked:
    """A row of two cases that counts how often each is measured."""

    QUESTION = "Is it kept?"

    def __init__(self, *answers: Ways | Exception) -> None:
        self.answers = list(answers)
        self.lacks = ""

    def cases(self, setting: Setting) -> Sequence[Case]:
        goals = (Goal("way", "step_ratio", most=1.01), Goal("other", "step_ratio", least=1.0))
        return [Case("first", self.measure, goals), Case("second", self.measure, (), self.lacks)]

    def measure(self) -> Ways:
        answer = self.answers.pop(0)
        if isinstance(answer, Exception):
            raise answer
        return answer


def way(**figures: float) -> Ways:
    return {"way": figures}


def setting(tmp_path: Path, *, ends: float = float("inf")) -> Setting:
    return Setting(device="cpu", tiny=True, work=tmp_path, data=tmp_path, ends=ends)


def test_what_is_measured_is_not_measured_again_and_what_failed_or_is_unfinished_is(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = tmp_path / "kept.json"
    unfinished = way(step_ratio=2.0, cells_missing=1)
    failed = BenchError("a\nb")
    asked = Asked(unfinished, failed, failed, failed, way(step_ratio=1.0), way(step_ratio=3.0))
    for _ in range(2):
        run_row(asked, setting(tmp_path), RowFile(path))
    assert case_named(read_cases(path), "first")["ways"] == unfinished
    assert case_named(read_cases(path), "second")["problem"] == "BenchError: b"
    for _ in range(2):  # the second time no answer is left
        run_row(asked, setting(tmp_path), RowFile(path))
    found = read_cases(path)
    assert case_named(found, "first")["ways"] == way(step_ratio=1.0)
    assert case_named(found, "second")["ways"] == way(step_ratio=3.0)
    where = row.describe_card() | {"card": "another"}
    monkeypatch.setattr(row, "describe_card", lambda: where)
    run_row(Asked(way(step_ratio=5.0), way(step_ratio=6.0)), setting(tmp_path), RowFile(path))
    assert len(read_cases(path)) == 4


def test_nothing_is_begun_without_time_and_what_is_lacked_is_said(tmp_path: Path) -> None:
    path, asked = tmp_path / "kept.json", Asked(way(step_ratio=1.0))
    run_row(asked, setting(tmp_path, ends=0.0), RowFile(path))
    assert not path.exists()
    asked.lacks = "a second card"
    run_row(asked, setting(tmp_path), RowFile(path))
    assert case_named(read_cases(path), "second")["problem"] == "left out: a second card"


def test_a_page_has_each_figure_beside_its_goal_and_the_rest_of_it_stays(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    kept, page = tmp_path / "images.json", tmp_path / "page.md"
    asked = Asked(way(step_ratio=1.02), BenchError("no such luck"))
    run_row(asked, setting(tmp_path), RowFile(kept, commit="abc"))
    page.write_text(f"before\n{report.BEGINS}\nold\n{report.ENDS}\nafter\n")
    for _ in range(2):
        report.write_page(page, {"images": kept, "blocks": tmp_path / "absent.json"})
    text = page.read_text()
    assert text.startswith("before\n")
    assert text.endswith("\nafter\n")
    assert "old" not in text
    assert "| first | way | 1.020 | step ratio at most 1.010: **not reached** |" in text
    assert "- first: other has no figures: step ratio at least 1.000: not measured" in text
    assert "- second: BenchError: no such luck" in text
    assert "commit abc" in text
    page.write_text("no lines")
    with pytest.raises(BenchError, match="write them where tables go"):
        report.write_page(page, {})


def test_a_goal_is_reached_at_its_bound_and_not_beyond() -> None:
    assert Goal("way", "x", most=1.0).reached(way(x=1.0))
    assert Goal("way", "x", most=1.0).reached(way(x=1.1)) is False
    assert Goal("way", "x", least=1.0).reached(way(x=0.9)) is False
    assert Goal("way", "y", least=1.0).reached(way(x=0.9)) is None


def test_loads_stay_below_their_limit_and_are_joined_where_all_parts_are_there(
    tmp_path: Path,
) -> None:
    contents = {name: name.encode() * size for name, size in {"a": 70, "b": 250, "c": 30}.items()}
    for name, content in contents.items():
        (tmp_path / name).write_bytes(content)
    loads, work = tmp_path / "loads", tmp_path / "work"
    work.mkdir()
    sizes = pack.write_loads(loads, [tmp_path / name for name in contents], limit_bytes=100)
    assert max(sizes) <= 100
    assert sum(sizes) == 350
    assert len(sizes) == len(list(loads.iterdir())) == 4
    hidden = (loads / "load-3").rename(tmp_path / "load-3")
    assert {path.name for path in join_parts(loads, work)} == {"a", "c"}
    hidden.rename(loads / "load-3")
    assert [path.name for path in join_parts(loads, work)] == ["b"]
    assert join_parts(loads, work) == []
    assert {name: (work / name).read_bytes() for name in contents} == contents


@pytest.mark.thorough
def test_a_packed_checkout_begins_to_run_the_list(
    tmp_path: Path, data: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(pack, "download", lambda *_: [])
    files = [str(path) for path in data.iterdir()]
    main(["pack", str(tmp_path / "packed"), "--data", *files])
    begin = [
        sys.executable,
        str(tmp_path / "packed" / "load-1" / "begin.py"),
        str(tmp_path / "work"),
    ]
    ended = subprocess.run(
        [*begin, "--tiny", "--minutes", "0"], capture_output=True, text=True, check=True
    )
    assert ended.stdout.splitlines() == [f"{name}: no time was left" for name in ROWS]
    assert (tmp_path / "work" / "checkout" / "benchmarks").is_dir()
    assert (tmp_path / "work" / "cifar10-test.parquet").exists()
    with pytest.raises(BenchError, match="name another"):
        main(["pack", str(tmp_path / "packed")])


def test_a_study_whose_time_is_over_reports_what_is_there(
    tmp_path: Path, data: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    calls: list[list[str]] = []

    def ablate(arguments: list[str]) -> int:
        calls.append(arguments)
        if "--report-only" in arguments:
            return 0
        try:
            with sigterm_raises():
                threading.Event().wait()
        except Stopped:
            return TERMINATED
        return 0

    monkeypatch.setattr(study, "ablate", ablate)
    monkeypatch.setattr(study, "read_report", lambda *_: way(accuracy_points=1.0))
    monkeypatch.setattr(study, "LEAST_S", 0.0)
    ends = time.monotonic() + study.GRACE_S
    its = Setting(device="cpu", tiny=True, work=tmp_path, data=data, ends=ends)
    assert study.cases(its)[0].measure() == way(accuracy_points=1.0)
    assert [call[-1] == "--report-only" for call in calls] == [False, True]


def test_a_row_that_is_over_its_time_is_ended_with_what_it_started() -> None:
    run_for(["sh", "-c", "sleep 600 & wait"], 0.1)


def test_the_list_is_refused_where_there_is_no_gpu(capsys: pytest.CaptureFixture[str]) -> None:
    for given, words in {"all": "give --tiny", "nothing": "expected all, pack, report or"}.items():
        with pytest.raises(SystemExit):
            main([given])
        assert words in capsys.readouterr().err
