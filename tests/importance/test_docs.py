"""The policy that docs/importance.md writes works as it says, on every world."""

import re
from pathlib import Path
from types import ModuleType

import numpy as np
import pytest

from dataio.plan.policies import Importance, refresh_every
from dataio.world import run_threads, single_world, thread_worlds
from importance import policies, settings_of
from shuffle import Partial
from tests.importance.hidden import NUM_SAMPLES, hidden_of_all, train
from tests.importance.rows import one_pool, reported

DOC = Path(__file__).parents[2] / "docs" / "importance.md"
TRAINING = DOC.with_name("train.md")


@pytest.fixture(scope="module")
def policy() -> Importance:
    """What the page's last block of code makes."""
    code = DOC.read_text().split("```python\n")[-1].split("```")[0]
    assert code.count("\n") < 80
    module = ModuleType("policy_of_the_page")
    exec(compile(code, str(DOC), "exec"), module.__dict__)
    made: Importance = module.NeverForgotten(0.4)
    return made


def policies_of(words: str) -> set[str]:
    """List the classes that a cell of the page names; "all but" some are the others."""
    named = set(re.findall(r"\b[A-Z]\w+", words))
    everyone = {its.__name__ for its in policies().values()}
    assert named <= everyone
    return everyone - named if words.startswith("all but") else named


def test_the_page_says_of_every_setting_which_policies_take_it() -> None:
    table = DOC.read_text().split("### Settings\n")[1].split("\n\n")[0]
    found: dict[str, set[str]] = {}
    for row in table.splitlines()[2:]:
        settings, of, _ = row.strip("| ").split(" | ", 2)
        for name in re.findall(r"`(\w+)`", settings):
            assert name not in found
            found[name] = policies_of(of)
    takes = {its.__name__: settings_of(its) for its in policies().values()}
    assert found == {
        name: {kind for kind, mine in takes.items() if name in mine}
        for name in {name for mine in takes.values() for name in mine}
    }


def test_pages_list_every_policy_and_those_that_give_hidden_rows_new_scores() -> None:
    page = DOC.read_text()
    kinds = re.search(r'with `kind = "(\w+)"` \(or ([\w, ]+)\)', page)
    assert kinds is not None
    assert {kinds[1], *kinds[2].split(", ")} == policies().keys()
    table = page.split("## The policies\n")[1].split("\n\n")[1]
    names = re.findall(r"^\| `(\w+)\(", table, re.MULTILINE)
    assert sorted(names) == sorted(its.__name__ for its in policies().values())
    again = {its.__name__ for its in policies().values() if refresh_every(its()) is not None}
    refreshed = re.findall(r"^\| `(\w+)\(.* every `refresh_every` epochs \|", table, re.MULTILINE)
    assert set(refreshed) == again
    mixing = re.search(r"scores, which are not mixed\s\(([^)]*)\)", TRAINING.read_text())
    assert mixing is not None
    assert policies_of(mixing[1]) == again


def test_the_example_of_drawn_rows_runs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("TONARI_CACHE", str(tmp_path / "cache"))
    code = next(block for block in DOC.read_text().split("```python\n") if "balance=" in block)
    names: dict[str, object] = {}
    exec(compile(code.split("```")[0], str(DOC), "exec"), names)
    assert len(names["drawn"]) == 100  # type: ignore[arg-type]
    names["loader"].close()  # type: ignore[attr-defined]


def test_only_rows_never_forgotten_are_hidden_and_weights_sum_to_all(policy: Importance) -> None:
    scores = reported(np.zeros(1000))
    scores["forgotten"][::2], scores["correct"][::5] = 1, False
    selection = policy.select(one_pool(scores), epoch=3, num_epochs=None)
    assert selection.weights is not None
    hidden = scores[selection.hidden]
    assert (hidden["correct"] & (hidden["forgotten"] == 0)).all()
    assert 0.3 < len(hidden) / 400 < 0.5
    assert np.delete(selection.weights, selection.hidden).sum() == pytest.approx(1000, rel=1e-5)
    assert len(policy.select(one_pool(scores), epoch=2, num_epochs=None).hidden) == 0


def test_it_hides_the_same_samples_on_every_world(policy: Importance, tmp_path: Path) -> None:
    alone = train(single_world(), tmp_path / "alone", policy, Partial(0.3))
    expected = hidden_of_all([alone.watched.hidden])
    assert [len(ids) > NUM_SAMPLES // 10 for ids in expected] == [False] * 3 + [True] * 3
    seen = run_threads(
        thread_worlds([2, 1]), lambda world: train(world, tmp_path / "3", policy, Partial(0.3))
    )
    assert hidden_of_all([rank.watched.hidden for rank in seen]) == expected
