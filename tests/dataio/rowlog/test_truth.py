"""What a log answers is what was trained: every row of every batch, kept or thrown away."""

import pytest

from tests.dataio.exclude_run import NUM_SAMPLES
from tests.dataio.rowlog.played import answers, draw, forward, inverse, play

QUICK = 6


def seeds():
    for seed in range(50):
        yield pytest.param(seed, marks=[] if seed < QUICK else [pytest.mark.thorough])


@pytest.mark.parametrize("seed", list(seeds()))
def test_answers_are_what_was_trained(tmp_path, seed):
    history = draw(seed)
    kept, discarded = play(tmp_path, history)
    found = answers(tmp_path, history)
    assert found.course.is_whole
    told = forward(found)
    assert told[0] == kept
    assert told[1] == discarded
    for sample_id in range(0, NUM_SAMPLES, 1 if seed % 5 == 0 else 10):
        mine, thrown = inverse(found, sample_id)
        assert mine == {row: n for row, n in kept.items() if row[5] == sample_id}
        assert thrown == {row: n for row, n in discarded.items() if row[5] == sample_id}
