"""A study's page in a real browser: the plots are there, in light and dark, wide and narrow."""

import re
from collections.abc import Mapping

import numpy as np
import pytest
from PIL import Image, ImageColor

from benchmarks.pictures import COLOURS, DARK, LIGHT
from tests.browser import browse, needs_browser
from tests.tonari.ablate.study_cells import (
    EPOCHS_CONTROL,
    POLICY,
    RANDOM_CONTROL,
    make_cell,
    make_study,
)
from tonari.ablate.plots import CONTROL_STYLES
from tonari.ablate.report import write_report

ARMS: dict[str, tuple[Mapping[str, object], int, int]] = {
    "Full": ({}, 100, 90),
    "Policy": (POLICY, 75, 88),
    "Epochs": (EPOCHS_CONTROL, 50, 80),
    "Random": (RANDOM_CONTROL, 55, 83),
    "Highest": ({"epochs_fraction": 0.65, "control": "highest"}, 65, 81),
    "Averaged": ({"ema": 0.99, "epochs_fraction": 0.4, "control": "ema"}, 45, 79),
    "Robust": ({"loss": "generalised", "epochs_fraction": 0.6, "control": "robust"}, 60, 84),
}

pytestmark = needs_browser


@pytest.fixture(scope="module")
def report(tmp_path_factory):
    """A report's page."""
    found = {
        name: {
            seed: make_cell(settings, accuracy=points + seed / 10, train_s=seconds, seed=seed)
            for seed in range(5)
        }
        for name, (settings, seconds, points) in ARMS.items()
    }
    study = make_study({name: settings for name, (settings, _, _) in ARMS.items()})
    directory = tmp_path_factory.mktemp("report")
    write_report(directory, study, found, "tonari ablate s.toml")
    return directory / "report.html"


def pixels_of(picture, colour):
    """How many pixels of a picture have a colour, to what antialiasing does."""
    wanted = np.array(ImageColor.getrgb(colour))
    return int((np.abs(np.asarray(picture).astype(int) - wanted).max(axis=2) <= 6).sum())


def shot(report, *flags, size="1000,1300"):
    path = report.parent / "shot.png"
    browse(report, f"--screenshot={path}", f"--window-size={size}", *flags)
    with Image.open(path) as picture:
        return picture.convert("RGB")


def test_a_browser_loads_every_plot(report):
    # A script in a copy, which says what the browser made of the images; the page itself has none
    probe = report.with_name("probe.html")
    script = (
        "<script>addEventListener('load', () => document.body.setAttribute('data-sizes', "
        "[...document.images].map(i => i.naturalWidth + 'x' + i.naturalHeight).join(' ')))</script>"
    )
    probe.write_text(report.read_text().replace("</body>", f"{script}</body>"))
    sizes = re.search(r'data-sizes="([^"]*)"', browse(probe, "--dump-dom"))
    assert sizes is not None
    widths = [[int(side) for side in size.split("x")] for size in sizes[1].split()]
    assert len(widths) == 3
    assert all(min(size) > 100 for size in widths)


def test_the_plot_is_drawn_with_its_policy_and_every_control(report):
    picture = shot(report)
    for colour in (COLOURS[0], *(style[0] for style in CONTROL_STYLES.values())):
        assert pixels_of(picture, colour) > 30, colour
    without = report.with_name("without.html")
    without.write_text(report.read_text().replace("data:image/svg+xml", "data:image/none"))
    assert pixels_of(shot(without), CONTROL_STYLES["epochs"][0]) == 0, "what is counted is the plot"


def test_a_dark_page_has_a_dark_plot(report):
    light = shot(report)
    dark = shot(report, "--blink-settings=preferredColorScheme=0")
    assert pixels_of(light, LIGHT["paper"]) > light.width * light.height / 2
    assert pixels_of(dark, DARK["paper"]) > dark.width * dark.height / 2
    assert pixels_of(dark, LIGHT["paper"]) < 1000
    assert pixels_of(dark, COLOURS[0]) > 30


def test_a_narrow_page_scrolls_its_table_and_not_itself(report):
    probe = report.with_name("probe.html")
    script = (
        "<script>addEventListener('load', () => document.body.setAttribute('data-wide', "
        "document.documentElement.scrollWidth - innerWidth))</script>"
    )
    probe.write_text(report.read_text().replace("</body>", f"{script}</body>"))
    wide = re.search(r'data-wide="(-?\d+)"', browse(probe, "--dump-dom", "--window-size=500,800"))
    assert wide is not None
    assert int(wide[1]) <= 0
