"""A storage report in a real browser: what was found is there to be seen, in light and dark."""

import numpy as np
import pytest
from msgspec.structs import replace
from PIL import Image, ImageColor

from tests.browser import browse, needs_browser
from tests.tonari.bench.storage.fabricated import NODES, make_results
from tonari.bench.storage.report.drawing import COMPUTE, LOCAL, STATES, WAIT, WAYS
from tonari.bench.storage.report.epoch_plots import compute_s
from tonari.bench.storage.report.report import (
    findings,
    page,
    plots_of,
    strip,
    write_html,
    write_png,
)
from tonari.bench.storage.report.summary import summary
from tonari.bench.storage.site.evidence import CacheVerdict
from tonari.report.pictures import DARK, LIGHT
from tonari.report.units import duration, rate

KEYS = [
    "patterns", "scaling", "latencies", "fairness", "links", "epochs", "sums", "predictions",
]  # fmt: skip


@pytest.fixture(scope="module")
def report(tmp_path_factory):
    """A report's page."""
    path = tmp_path_factory.mktemp("report") / "report.html"
    write_html(make_results(), path)
    return path


def shot(path, *flags):
    picture = path.parent / "shot.png"
    browse(path, f"--screenshot={picture}", "--window-size=1100,5600", *flags)
    with Image.open(picture) as opened:
        return opened.convert("RGB")


def pixels_of(picture, colour):
    """How many pixels of a picture have a colour, to what antialiasing does."""
    found = np.ones((picture.height, picture.width), bool)
    for channel, wanted in zip(picture.split(), ImageColor.getrgb(colour), strict=True):
        shades = np.asarray(channel)
        found &= (shades >= max(wanted - 6, 0)) & (shades <= min(wanted + 6, 255))
    return int(found.sum())


MARKS = {"DataLoader": WAYS["dataloader"], "local": LOCAL, "compute": COMPUTE, "wait": WAIT,
         "unknown": STATES["unknown"], "cold": STATES["cold"]}  # fmt: skip


@needs_browser
def test_every_mark_is_seen_in_light_and_in_dark(report):
    light, dark = shot(report), shot(report, "--blink-settings=preferredColorScheme=0")
    for picture, paper in ((light, LIGHT["paper"]), (dark, DARK["paper"])):
        assert pixels_of(picture, paper) > picture.width * picture.height / 2
        for name, colour in MARKS.items():
            assert pixels_of(picture, colour) > 100, name
    assert pixels_of(dark, LIGHT["paper"]) < 2000
    without = report.with_name("without.html")
    without.write_text(report.read_text().replace("data:image/svg+xml", "data:image/none"))
    plain = shot(without)
    assert pixels_of(plain, COMPUTE) == pixels_of(plain, WAIT) == 0, "what is counted is the plots"
    assert pixels_of(plain, STATES["cold"]) > 1000, "the strip of verdicts is the page's own"


def test_the_page_says_where_it_lies_and_what_was_not_measured(report):
    text = report.read_text()
    for said in (
        "/scratch/project/imagenet", "lustre (statfs 0x0bd00bd0)", "10.0.0.1@o2ib",
        "stripes of 1,048,576 bytes over 4 of 24 OSTs", "the first 65,536 bytes on the MDT",
        "metadata storm on 4 nodes left out", "0123456789ab", "srun",
    ):  # fmt: skip
        assert said in text, said


def test_what_results_hold_is_text_and_no_markup():
    results = make_results(clients=(1,), repeats=1)
    site = replace(results.site, path="/data/<b>$x^2$</b>")
    assert "<b>$x" not in page(replace(results, site=site))


def test_each_plot_is_left_out_where_there_is_nothing_of_it():
    results = make_results(clients=(1, 4), repeats=2)
    assert [plot.key for plot in plots_of(results)] == KEYS
    bare = replace(results, phases=(), scalings=(), links=(), end_to_end=None, problems=())
    assert plots_of(bare) == []
    assert "Not complete" in page(bare)
    alone = make_results(clients=(1,), repeats=1)
    keys = [plot.key for plot in plots_of(replace(alone, links=(), end_to_end=None))]
    assert keys == ["patterns", "scaling", "latencies", "fairness"][: len(keys)]
    page(alone)


def test_figures_that_were_not_measured_are_drawn_around():
    results = make_results(clients=(1, 4), repeats=1)
    unfitted = [
        replace(one, fitted_most_bytes_per_s=None, fitted_half=None, fit_error_fraction=None)
        for one in results.scalings
    ]
    run = results.end_to_end
    assert run is not None
    ways = [
        replace(way, utilisation_fraction=None, predicted_epoch_s=None, predicted_staging_s=None,
                paid_after=None, epoch_s=way.epoch_s[:1], samples_of_epoch=way.samples_of_epoch[:1])
        for way in run.ways
    ]  # fmt: skip
    text = page(replace(results, scalings=unfitted, end_to_end=replace(run, ways=ways)))
    assert "Predicted beside measured" not in text


def test_the_picture_holds_every_plot(tmp_path):
    results = make_results(clients=(1, 4), repeats=2)
    write_png(results, tmp_path / "a.png")
    write_png(replace(results, end_to_end=None), tmp_path / "b.png")
    with Image.open(tmp_path / "a.png") as whole, Image.open(tmp_path / "b.png") as less:
        assert whole.height > 1.4 * less.height
        assert pixels_of(whole.convert("RGB"), WAIT) > 1000
        assert pixels_of(less.convert("RGB"), WAIT) == 0


def test_compute_and_waiting_are_the_whole_epoch_and_hidden_samples_are_not_computed():
    run = make_results().end_to_end
    assert run is not None
    ways = {way.name: way for way in run.ways}
    for way in run.ways:
        parts = zip(compute_s(run, way), way.epoch_s, strict=True)
        assert all(0 < compute <= took for compute, took in parts)
    assert compute_s(run, ways["null"]) == list(ways["null"].epoch_s)
    hiding, staged = compute_s(run, ways["hiding"])[-1], compute_s(run, ways["staged"])[-1]
    assert hiding == pytest.approx(0.72 * staged, rel=1e-3)


def test_a_phase_that_was_not_as_wanted_raises_the_alarm():
    results = make_results(clients=(1, 4), repeats=2)
    cold = results.phases[0]
    assert strip(cold, NODES).cells == [["cold"] * 2, [], [], []]
    assert strip(cold, NODES).is_as_wanted
    for state in ("warm", "unknown"):
        verdict = CacheVerdict(state, "planted")
        repeats = [replace(cold.repeats[0], verdict_of_node={"node0": verdict}), cold.repeats[1]]
        phase = replace(cold, repeats=repeats if state == "warm" else repeats[:1])
        assert not strip(phase, NODES).is_as_wanted
        changed = replace(results, phases=[phase, *results.phases[1:]])
        assert any("1 of 16 phases are not proved" in one for one in findings(changed))
        assert f"{state}: planted" in strip(phase, NODES).why


def test_dir_is_not_blamed_where_something_else_may_be_why():
    results = make_results(noise=0, clients=(1, 4))
    run = results.end_to_end
    assert run is not None
    assert "pay? Yes, after 3 epochs: an epoch takes 47 s with a DataLoader" in findings(results)[0]

    def first(results=results, name="dataloader", **changed):
        ways = [replace(way, **changed) if way.name == name else way for way in run.ways]
        return findings(replace(results, end_to_end=replace(run, ways=ways)))[0]

    cold, warm = CacheVerdict("cold", ""), CacheVerdict("warm", "")
    assert "Yes, after" in first(verdict_of_epoch=[cold, warm, cold])
    assert "its files were in memory. To know, train" in first(verdict_of_epoch=[cold, warm, warm])
    assert "its speed an epoch takes 9 s. To know" in first(predicted_epoch_s=9.0)
    same = replace(results, local=results.site)
    assert "the same filesystem; its files" in first(same, verdict_of_epoch=[cold, warm])
    assert "pay? No: an epoch takes 47 s" in first(name="staged", paid_after=None)
    assert "Cannot tell: the time limit" in first(name="staged", epoch_s=[1.0])
    rates = [
        replace(phase, repeats=results.phases[6].repeats) if phase.tier == "local" else phase
        for phase in results.phases
    ]
    assert "it is as fast as" in first(replace(results, phases=rates))


def test_without_training_the_verdict_is_how_dir_stands_beside_the_node():
    results = replace(make_results(noise=0, clients=(1, 4)), end_to_end=None)
    assert findings(results)[0].startswith(
        "Cold, in random order, the node's directory is 9.7 times as fast as DIR: 112 MB/s from DIR"
    )
    swapped = [
        replace(phase, tier="local" if phase.tier == "shared" else "shared")
        for phase in results.phases
    ]
    found = findings(replace(results, phases=swapped))
    assert "DIR is 9.7 times as fast as the node's directory" in found[0]
    alone = [phase for phase in swapped if phase.tier == "local"]
    assert "Cannot tell: random_record" in findings(replace(results, phases=alone))[0]


def test_a_terminal_has_a_line_for_each_number_of_readers(monkeypatch):
    monkeypatch.setattr("sys.stdout.isatty", lambda: True)
    monkeypatch.setenv("COLUMNS", "80")
    lines = summary(make_results(noise=0, clients=(1, 4)))
    assert lines[0].startswith("Does staging pay? Yes")
    found = {" ".join(line.split()) for line in lines}
    assert "random record DIR 4 2 112 MB/s 1.23 GB/s 15 ms read" in found
    assert sum(line.startswith("random record") for line in lines) == 3


def test_amounts_have_three_digits_and_the_right_unit():
    assert [rate(x) for x in (1e9, 999.7e6, 1.5e5, 12, 0)] == [
        "1 GB/s", "1 GB/s", "150 kB/s", "12 B/s", "0 B/s",
    ]  # fmt: skip
    assert [duration(x) for x in (1234.5, 0.0125, 2.5e-5)] == ["1,234 s", "12.5 ms", "25 \u00b5s"]
