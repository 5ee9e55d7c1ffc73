"""What a log answers is what was trained: every row of every batch, kept or thrown away."""

import numpy as np
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
    found_rows = forward(found)
    assert found_rows[0] == kept
    assert found_rows[1] == discarded
    for asked in (np.arange(NUM_SAMPLES)[::7], np.arange(NUM_SAMPLES), np.array([seed])):
        found_rows = inverse(found, asked)
        wanted = set(asked.tolist())
        assert found_rows[0] == {row: n for row, n in kept.items() if row[5] in wanted}
        assert found_rows[1] == {row: n for row, n in discarded.items() if row[5] in wanted}
