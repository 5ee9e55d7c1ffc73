"""A study's page in a real browser: its plot has every arm."""

from collections.abc import Mapping

import numpy as np
import pytest
from PIL import Image, ImageColor

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
from tonari.report.pictures import COLOURS

ARMS: dict[str, tuple[Mapping[str, object], int, int]] = {
    "Full": ({}, 100, 90),
    "Policy": (POLICY, 75, 88),
    "Epochs": (EPOCHS_CONTROL, 50, 80),
    "Random": (RANDOM_CONTROL, 55, 83),
    "Highest": ({"control": "highest"}, 65, 81),
    "Averaged": ({"control": "ema"}, 45, 79),
    "Robust": ({"control": "robust"}, 60, 84),
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


def test_the_plot_is_drawn_with_its_policy_and_every_control(report):
    picture = shot(report)
    for colour in (COLOURS[0], *(style[0] for style in CONTROL_STYLES.values())):
        assert pixels_of(picture, colour) > 30, colour
    without = report.with_name("without.html")
    without.write_text(report.read_text().replace("data:image/svg+xml", "data:image/none"))
    assert pixels_of(shot(without), CONTROL_STYLES["epochs"][0]) == 0, "what is counted is the plot"
