"""Reports in a real browser: one design, any width, light and dark, nothing from outside."""

import re
from collections.abc import Callable, Mapping
from pathlib import Path

import numpy as np
import pytest
from PIL import Image

from tests.browser import browse, look, needs_browser
from tests.tonari.ablate.study_cells import POLICY, RANDOM_CONTROL, make_cell, make_study
from tests.tonari.bench.storage.fabricated import make_results
from tonari.ablate.report import write_report
from tonari.bench.storage.report.report import write_html
from tonari.demo.report import write_page
from tonari.oracle.search.search import Candidate, Plans
from tonari.plan.report import search_page
from tonari.report.pictures import DARK, LIGHT
from tonari.trainer.config.config import Config, DataConfig
from tonari.trainer.watch.history import History
from tonari.trainer.watch.page import page_of
from tonari.trainer.watch.record import Record, Settings, Start


def write_storage(path: Path) -> None:
    write_html(make_results(), path)


def write_study(path: Path) -> None:
    arms: dict[str, Mapping[str, object]] = {
        "Full": {}, "Policy": POLICY, "Random": RANDOM_CONTROL
    }  # fmt: skip
    found = {
        name: {
            seed: make_cell(settings, accuracy=80 + seed / 10, train_s=60, seed=seed)
            for seed in range(3)
        }
        for name, settings in arms.items()
    }
    write_report(path.parent, make_study(arms), found, "tonari ablate s.toml")
    (path.parent / "report.html").rename(path)


def write_demo(path: Path) -> None:
    def run(epoch_s: float, **others: float) -> dict[str, list[float] | float]:
        return {
            "staging_s": 1.0, **others,
            **{
                name: [value] * 4
                for name, value in (
                    ("epoch_s", epoch_s), ("wait_s", epoch_s / 2), ("test_accuracy", 0.9),
                    ("source_bytes", 1e6), ("exchanged_rows", 10.0), ("hidden_fraction", 0.1),
                    ("hidden_wrong_fraction", 0.9),
                )
            },
        }  # fmt: skip

    runs = {
        "dataloader": run(3.0, num_workers=2), "tonari": run(1.0),
        "tonari_hiding": run(0.8, fewer_epochs=0.85),
    }  # fmt: skip
    write_page(path, [runs, runs], {1.0: runs, 0.0: runs}, "digits", [("ranks", "4" * 300)])


def write_search(path: Path) -> None:
    settings = (
        "mesh.pp=4", "mesh.dp_replicate=2", "mesh.dp_shard=1", "mesh.cp=1", "mesh.tp=8",
        "mesh.microbatches=16", "mesh.schedule=1f1b", "mesh.checkpointing=full",
        "mesh.sequence_parallel=true", "mesh.checkpointing_blocks=0",
        "mesh.swap_blocks=0", "mesh.offload=false",
        "data.batch_size=16",
    )  # fmt: skip
    candidates = tuple(
        Candidate(
            settings=settings, step_s=1.0 + number, memory_bytes=10**9, samples_per_s=8.0,
            parts_s={"computing": 0.7 + number, "bubble": 0.3}, node_hours=9.0,
            why_slower="Its bubble is longer." if number else "",
        )
        for number in range(10)
    )  # fmt: skip
    plans = Plans(
        candidates=candidates, global_batch_size=16, legal=10, unfit=0, pruned=0, priced=10
    )
    path.write_text(
        search_page(plans, Config(data=DataConfig(train="a.tar")), "tonari search c.toml")
    )


def write_run(path: Path) -> None:
    history = History()
    for step in range(1, 2001):
        line: dict[str, str | int | float] = {
            "kind": "step", "epoch": step // 1000, "step": step, "loss": 3 / step, "lr": 0.1
        }  # fmt: skip
        history.add(line | ({"loss": 9.0} if step == 1500 else {}))
    history.add({
        "kind": "epoch", "epoch": 1, "step": 2000, "loss": 0.1, "evaluation_loss": 0.2,
        "accuracy": 0.9, "train_s": 8.0, "wait_s": 1.0, "evaluation_s": 1.0, "source_bytes": 4e6,
    })  # fmt: skip
    start = Start(0.0, 4096, 0, 60.0, "ConfigError: " + "long/" * 40)
    settings: Settings = {
        "model": {"kind": "gpt"}, "data": {"train": "x" * 300}, "run": {"epochs": 2}
    }  # fmt: skip
    record = Record([start], 4000)
    path.write_text(page_of(path.parent, record, settings, history, state="running"))


REPORTS: dict[str, tuple[Callable[[Path], None], int, str]] = {
    "storage": (write_storage, 8, "Does staging pay? Yes, after 3 epochs: an epoch takes"),
    "study": (write_study, 3, "every control at its own cost"),
    "demo": (write_demo, 3, "Gained: later epochs are 3.0 times shorter"),
    "search": (write_search, 1, "The fastest step takes 1.00 s"),
    "run": (write_run, 5, "Running: step 2,000 of 4,000 (50%), 2 of 2 epochs done."),
}
"""Each with how many plots it has, and what its first sentence has in it."""


@pytest.fixture(scope="module", params=REPORTS)
def report(request, tmp_path_factory):
    """A report's name and page."""
    path = tmp_path_factory.mktemp(request.param) / "page.html"
    REPORTS[request.param][0](path)
    return request.param, path


@needs_browser
@pytest.mark.parametrize("width", [1200, 400])
def test_nothing_is_cut_and_every_plot_is_there(report, width):
    name, path = report
    assert look(path, width=width) == ([], REPORTS[name][1])


@needs_browser
@pytest.mark.parametrize(
    "report",
    [pytest.param(name, marks=[pytest.mark.nightly] * (name != "run")) for name in REPORTS],
    indirect=True,
)
def test_a_dark_screen_has_a_dark_page(report):
    _, path = report
    papers: list[tuple[int, int, int]] = []
    for flags in ((), ("--blink-settings=preferredColorScheme=0",)):
        shot = path.with_suffix(".png")
        browse(path, f"--screenshot={shot}", "--window-size=1000,1200", *flags)
        with Image.open(shot) as picture:
            pixels = np.asarray(picture.convert("RGB")).reshape(-1, 3)
        colours, counts = np.unique(pixels, axis=0, return_counts=True)
        papers.append(tuple(colours[counts.argmax()].tolist()))
    assert [f"#{red:02x}{green:02x}{blue:02x}" for red, green, blue in papers] == [
        LIGHT["paper"], DARK["paper"]
    ]  # fmt: skip


def test_the_answer_comes_first_and_nothing_is_fetched(report):
    name, path = report
    text = path.read_text()
    first = re.search(r'<div class="findings">\s*<p>(.*?)</p>', text)
    assert first is not None
    assert REPORTS[name][2] in first[1]
    assert text.index("<h1>") < first.start() < text.index("<h2>")
    assert "<script" not in text
    assert not re.search(r"(src|href|srcset)=\"(?!data:)", text)
    assert not re.search(r"url\(|@import", text)
