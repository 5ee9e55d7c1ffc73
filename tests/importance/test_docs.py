"""The policy that docs/importance.md writes works as it says, on every world."""

from pathlib import Path
from types import ModuleType

import numpy as np
import pytest

from dataio.plan.policies import Importance
from dataio.world import run_threads, single_world, thread_worlds
from shuffle import Partial
from tests.importance.hidden import NUM_SAMPLES, hidden_of_all, train
from tests.importance.rows import one_pool, reported

DOC = Path(__file__).parents[2] / "docs" / "importance.md"


@pytest.fixture(scope="module")
def policy() -> Importance:
    """What the page's last block of code makes."""
    code = DOC.read_text().split("```python\n")[-1].split("```")[0]
    assert code.count("\n") < 80
    module = ModuleType("policy_of_the_page")
    exec(compile(code, str(DOC), "exec"), module.__dict__)
    made: Importance = module.NeverForgotten(0.4)
    return made


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
