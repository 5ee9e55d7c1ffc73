"""A study's report says what its cells say: time, targets, controls, and what is missing."""

import csv
import json
import math
import re
from dataclasses import replace
from html.parser import HTMLParser

import pytest
from hypothesis import given
from hypothesis import strategies as st
from matplotlib.figure import Figure
from PIL import Image

from tests.tonari.ablate.study_cells import (
    EPOCHS_CONTROL,
    POLICY,
    RANDOM_CONTROL,
    make_cell,
    make_study,
)
from tonari.ablate import report as ablate_report
from tonari.ablate.controls import CONTROLS, AgainstControl, against_controls, control_verdict
from tonari.ablate.findings import findings
from tonari.ablate.lines import report_lines
from tonari.ablate.plots import Place, draw_curves, draw_pareto, front
from tonari.ablate.report import write_report
from tonari.ablate.results import gather_arms
from tonari.ablate.stats import Difference, paired_ratio
from tonari.ablate.words import verdict_sentence
from tonari.report import pages
from tonari.report.pictures import DARK, LIGHT, darkened, render

# Seconds and points of each arm: the lines of both controls run through (50, 80) and (100, 90)
ARMS = {
    "Full": ({}, 100, 90),
    "Policy": (POLICY, 75, 88),
    "Epochs": (EPOCHS_CONTROL, 50, 80),
    "Random": (RANDOM_CONTROL, 50, 80),
}
WOBBLE = (0.3, -0.2, 0.1, -0.3, 0.1)
"""Points by which seeds differ, all arms alike."""
OWN = (0.05, -0.05, 0.0, 0.1, -0.1)
"""Points by which a policy's seeds differ beside."""


@pytest.fixture
def undrawn(monkeypatch):
    """Reports with empty plots, where only words are looked at: drawing takes seconds."""
    for module in (pages, ablate_report):
        monkeypatch.setattr(module, "render", lambda draw, inches, kind: b"")


def cells_of(arms, *, seeds=5):
    return {
        name: {
            seed: make_cell(
                settings, train_s=seconds, seed=seed,
                accuracy=points + WOBBLE[seed] + (OWN[seed] if "importance" in settings else 0),
            )
            for seed in range(seeds)
        }
        for name, (settings, seconds, points) in arms.items()
    }  # fmt: skip


def study_of(arms):
    return make_study({name: settings for name, (settings, _, _) in arms.items()})


def lines_of(arms):
    return {line.arm: line for line in report_lines(study_of(arms), cells_of(arms))}


def changed(name, *, seconds=75.0, points=88.0, settings=POLICY):
    return {**ARMS, name: (settings, seconds, points)}


def found_in(arms, found):
    policy = next(arm for arm in gather_arms(study_of(arms), found) if arm.name == "Policy")
    return {
        one.control: one for one in against_controls(policy, gather_arms(study_of(arms), found))
    }


def test_a_control_is_read_off_its_line_at_the_policys_own_time_seed_by_seed():
    # The line bends: 80 at 50 s, 89 at 75 s, 90 at 100 s. Seed 0 takes 60 s, the others 90
    arms = {**ARMS, "Epochs 0.75": (EPOCHS_CONTROL, 75, 89)}
    found = cells_of(arms)
    for seed in range(5):
        found["Policy"][seed] = make_cell(POLICY, accuracy=95, train_s=90 if seed else 60)
    over = found_in(arms, found)["epochs"]
    reached = [83.6, *(89.6,) * 4]
    assert over.difference.mean == pytest.approx(95 - (sum(reached) + sum(WOBBLE)) / 5)
    assert (over.difference.num_seeds, over.outcome) == (5, "better")
    assert (over.num_cheaper, over.num_dearer) == (0, 0)


def test_a_line_has_all_arms_of_its_control_or_the_seed_does_not_count():
    arms = {**ARMS, "Epochs 0.75": (EPOCHS_CONTROL, 75, 89)}
    found = cells_of(arms)
    assert found_in(arms, found)["epochs"].difference.mean == pytest.approx(-1)
    del found["Epochs 0.75"][3]
    over = found_in(arms, found)
    assert over["epochs"].difference.num_seeds == 4
    assert over["random"].difference.num_seeds == 5


@pytest.mark.parametrize(
    ("seconds", "gap", "said"),
    [
        (40, 8, "in 5 of 5 seeds it cost less than the cheapest such run"),
        (110, -2, "in 5 of 5 seeds it cost more than the dearest such run"),
    ],
)
def test_beyond_its_end_a_line_is_not_extrapolated_and_the_sentence_says_so(seconds, gap, said):
    line = lines_of(changed("Policy", seconds=seconds))["Policy"]
    assert line.controls[0].difference.mean == pytest.approx(gap, abs=0.01)
    assert said in verdict_sentence(line)
    assert "such run" not in verdict_sentence(lines_of(ARMS)["Policy"])


@pytest.mark.parametrize(
    ("epochs", "random", "words"),
    [
        ("better", "better", "beats both controls"),
        ("better", "undecided", "beats fewer epochs only"),
        ("worse", "better", "beats random pruning only"),
        ("worse", "undecided", "beats none"),
        ("worse", "worse", "beats none"),
        ("undecided", "undecided", "undecided at 5 seeds"),
        ("better", None, "beats fewer epochs; random pruning not run"),
        (None, "worse", "beats none; fewer epochs not run"),
        (None, None, "no control to compare with"),
    ],
)
def test_a_verdict_names_the_controls_that_are_beaten(epochs, random, words):
    outcomes = {"epochs": epochs, "random": random}
    gap = Difference(0, -1, 1, 5)
    found = [AgainstControl(name, gap, one, 0, 0) for name, one in outcomes.items() if one]
    assert control_verdict(found) == words


def test_where_a_control_wins_the_report_says_so_at_the_top(tmp_path, undrawn):
    arms = changed("Policy", points=84)
    line = lines_of(arms)["Policy"]
    assert line.control_verdict == "beats none"
    assert "Fewer epochs wins at no more cost: the policy is at -1.00" in verdict_sentence(line)
    write_report(tmp_path, study_of(arms), cells_of(arms), "tonari ablate s.toml")
    for name in ("table.md", "report.html"):
        text = (tmp_path / name).read_text()
        assert "A control wins at no more cost: fewer epochs reaches +1.00" in text
        assert "The policy does not beat every control" in text


def test_findings_follow_the_figures():
    def said(arms):
        return " ".join(
            findings(list(lines_of(arms).values()), margin=0.5, num_cells=20, expected=20)
        )

    assert "beats every control at its own cost: Policy" in said(ARMS)
    assert "No arm is shown to keep its baseline's accuracy, to 0.5 points" in said(ARMS)
    kept = said(changed("Policy", points=90.1))
    assert "shown to keep the accuracy of Full is Policy, a policy: +0.10" in kept
    control = changed("Random", seconds=70, points=90.1, settings=RANDOM_CONTROL)
    assert "shown to keep the accuracy of Full is Random, a control" in said(control)
    assert "A control wins" in said(control)


def test_arms_that_guess_are_told_to_have_learned_nothing():
    arms = {name: (settings, seconds, 10) for name, (settings, seconds, _) in ARMS.items()}
    lines = list(lines_of(arms).values())
    (said,) = findings(lines, margin=0.5, num_cells=20, expected=20, chance=10.0)
    assert said.startswith("Nothing was learned: no arm is above the 10 % of guessing")
    for chance in (None, 5.0):
        found = findings(lines, margin=0.5, num_cells=20, expected=20, chance=chance)
        assert "learned" not in " ".join(found)


def test_an_arm_without_a_control_is_no_policy_and_a_label_is_the_studys():
    found = cells_of(ARMS)
    lines = {line.arm: line for line in report_lines(study_of(ARMS), found)}
    assert [line.is_policy for line in lines.values()] == [False, True, False, False]
    assert [line.control for line in lines.values()] == ["", "", "epochs", "random"]
    assert lines["Full"].control_verdict == lines["Epochs"].control_verdict == ""


def test_times_are_ratios_paired_by_seed():
    costs = lines_of(ARMS)["Policy"].costs
    assert costs.train_s.mean == 75
    assert costs.train_ratio.mean == pytest.approx(0.75)
    assert costs.rows_ratio.mean == pytest.approx(0.75)
    assert costs.hidden_fraction == pytest.approx(0.25)
    assert lines_of(ARMS)["Full"].costs.train_ratio is None


def test_a_study_may_name_its_target():
    study, found = study_of(ARMS), cells_of(ARMS)
    named = replace(study, study=replace(study.study, target_accuracy=0.75))
    epochs = report_lines(named, found)[2].costs
    assert epochs is not None
    assert epochs.target is not None
    assert epochs.target.accuracy == 75
    assert epochs.target.seconds == pytest.approx(50)


def test_a_ratio_is_the_same_seen_from_either_side():
    one, other = {0: 2.0, 1: 8.0, 2: 3.0}, {0: 1.0, 1: 2.0, 2: 3.0, 3: 9.0}
    there, back = paired_ratio(one, other), paired_ratio(other, one)
    assert there is not None
    assert back is not None
    assert there.high is not None
    assert back.high is not None
    assert there.mean == pytest.approx(2) == pytest.approx(1 / back.mean)
    assert there.low == pytest.approx(1 / back.high)
    # Logarithms ln 2, ln 4, 0: mean ln 2, deviation ln 2, t(2) = 4.3027
    assert there.high == pytest.approx(math.exp(math.log(2) * (1 + 4.3027 / 3**0.5)), rel=1e-4)
    assert paired_ratio({0: 0.0}, {0: 1.0}) is None


def test_time_to_target_is_that_of_the_first_test_that_shows_it():
    # The target is 89.5; tests are after epochs 0, 2 and 4
    lines = lines_of(changed("Policy", points=91))
    assert lines["Policy"].costs.target.accuracy == pytest.approx(89.5)
    assert lines["Policy"].costs.target.seconds == pytest.approx(75)
    late = lines_of(changed("Policy", points=89.45))["Policy"].costs.target
    assert (late.num_reached, late.num_seeds) == (2, 5)
    early = lines_of(changed("Policy", points=145))["Policy"].costs.target
    assert early.seconds == pytest.approx(75 * 3 / 5)
    never = lines_of(ARMS)["Epochs"].costs.target
    assert (never.seconds, never.num_reached) == (None, 0)


@given(
    st.dictionaries(st.integers(0, 9), st.tuples(st.integers(1, 6), st.integers(1, 6)), min_size=1)
)
def test_an_arm_is_on_the_front_where_no_other_is_as_good_in_less_time(places):
    arms = {str(name): Place(s, 0, a, 0) for name, (s, a) in places.items()}
    named = front(arms)

    def beaten(one):
        return any(
            (o.seconds <= one.seconds and o.accuracy > one.accuracy)
            or (o.seconds < one.seconds and o.accuracy >= one.accuracy)
            for o in arms.values()
        )

    assert not any(beaten(arms[name]) for name in named)
    on = {(arms[name].seconds, arms[name].accuracy) for name in named}
    assert all(beaten(o) or (o.seconds, o.accuracy) in on for o in arms.values())


def test_all_files_tell_the_same_and_the_same_cells_make_the_same_page(tmp_path):
    found = cells_of(ARMS)
    document = write_report(tmp_path / "a", study_of(ARMS), found, "tonari ablate s.toml")
    write_report(tmp_path / "b", study_of(ARMS), found, "tonari ablate s.toml")
    assert json.loads((tmp_path / "a/study.json").read_text()) == json.loads(json.dumps(document))
    for name in ("report.html", "pareto.png", "table.csv"):
        assert (tmp_path / "a" / name).read_bytes() == (tmp_path / "b" / name).read_bytes()
    rows = list(csv.DictReader((tmp_path / "a/table.csv").read_text().splitlines()))
    policy = next(row for row in rows if row["arm"] == "Policy")
    assert float(policy["train_ratio_mean"]) == pytest.approx(0.75)
    assert float(policy["over_epochs_mean_points"]) == pytest.approx(3)
    assert policy["control_verdict"] == "beats both controls"
    with Image.open(tmp_path / "a/pareto.png") as plot:
        assert min(plot.size) > 400
    page = (tmp_path / "a/report.html").read_text()
    for said in ("tonari ablate s.toml", "0123456789ab", "2026-11-21", "beats both controls"):
        assert said in page


def test_missing_cells_are_named_and_a_study_without_any_has_a_page_too(tmp_path, undrawn):
    found = cells_of(ARMS)
    del found["Random"][2], found["Random"][4], found["Epochs"]
    document = write_report(tmp_path, study_of(ARMS), found, "c")
    assert document["cells_missing"] == {"Epochs": [0, 1, 2, 3, 4], "Random": [2, 4]}
    page = (tmp_path / "report.html").read_text()
    assert "7 of 20 cells are missing" in page
    assert "Random: seeds 2, 4" in page
    assert "beats random pruning; fewer epochs not run" in page
    write_report(tmp_path / "none", study_of(ARMS), {}, "c")
    assert "No cell has been trained yet" in (tmp_path / "none/report.html").read_text()


class Page(HTMLParser):
    """Tags and addresses of a page."""

    def __init__(self):
        super().__init__()
        self.tags: list[str] = []
        self.addresses: list[str] = []

    def handle_starttag(self, tag, attrs):
        self.tags.append(tag)
        self.addresses += [v or "" for k, v in attrs if k in ("src", "srcset", "href", "style")]


def test_a_page_needs_nothing_beside_it_and_runs_nothing(tmp_path, undrawn):
    write_report(tmp_path, study_of(ARMS), cells_of(ARMS), "c")
    text = (tmp_path / "report.html").read_text()
    page = Page()
    page.feed(text)
    assert page.tags.count("img") == 3
    assert page.addresses
    assert all(address.startswith("data:image/") for address in page.addresses)
    assert {"script", "link", "iframe"}.isdisjoint(page.tags)
    assert "url(" not in text
    assert "@import" not in text


def test_a_plot_needs_nothing_beside_it_and_is_dark_on_a_dark_page():
    arms = gather_arms(study_of(ARMS), cells_of(ARMS))
    light = render(lambda figure: draw_pareto(figure, arms), inches=(5, 4), kind="svg")
    dark = darkened(light).decode()
    assert "@font-face" not in dark
    assert set(re.findall(r'href="(.)', dark)) == {"#"}
    for name, colour in LIGHT.items():
        assert colour in light.decode()
        assert colour not in dark
        assert DARK[name] in dark


def test_every_control_is_drawn_in_all_plots(tmp_path):
    arms = {**ARMS, **{name: ({"control": name}, 60, 85) for name in CONTROLS}}
    write_report(tmp_path, study_of(arms), cells_of(arms), "c")
    found = gather_arms(study_of(arms), cells_of(arms))
    for draw in (draw_pareto, draw_curves):
        figure = Figure()
        draw(figure, found)
        drawn = {text.get_text() for text in figure.legends[0].get_texts()}
        assert all(any(name in text for text in drawn) for name in CONTROLS.values()), drawn


def test_names_are_shown_as_they_are(tmp_path):
    wild = "<script>alert('1')</script> & |$x_{$"
    arms = {wild: ARMS["Full"], "_hidden": ARMS["Policy"], "E": ARMS["Epochs"]}
    write_report(tmp_path, study_of(arms), cells_of(arms), "tonari ablate '<b>.toml'")
    text = (tmp_path / "report.html").read_text()
    page = Page()
    page.feed(text)
    assert "script" not in page.tags
    assert "b" not in page.tags
    assert "&lt;script&gt;alert(" in text
    assert "\\|$x_{$" in (tmp_path / "table.md").read_text()
