"""The step of the user's own model is measured, or refused in one message."""

import pytest

from dataio.world import run_threads, thread_worlds
from tonari.bench.errors import BenchError
from tonari.bench.storage.training.calibrate import REPEATS, WARM_UP, calibrate

CLOCK = "tonari.bench.storage.training.calibrate.time.perf_counter"


def test_a_step_is_the_median_after_warming_up_of_the_slowest_rank(tmp_path, monkeypatch):
    script = tmp_path / "model.py"
    script.write_text(
        "def make_step(batch_size):\n"
        "    def step():\n"
        "        with open(__file__ + '.calls', 'a') as file:\n"
        "            file.write(f'{batch_size}\\n')\n"
        "    return step\n"
    )
    # The first steps are slow, and one later.
    took_s = [9.0] * WARM_UP + [0.25] * (REPEATS - 1) + [7.0]
    ticks = [0.0]
    for step_s in took_s:
        ticks += [0.0, step_s]
    clock = iter(ticks)
    monkeypatch.setattr(CLOCK, lambda: next(clock))
    [found] = run_threads(thread_worlds((1,)), lambda world: calibrate(script, 16, world=world))
    assert found == 0.25
    assert (tmp_path / "model.py.calls").read_text().split() == ["16"] * (WARM_UP + REPEATS)


def test_all_ranks_have_the_slowest_ranks_step(tmp_path, monkeypatch):
    script = tmp_path / "model.py"
    script.write_text("def make_step(batch_size):\n    return lambda: None\n")

    medians = iter([0.5, 2.0])

    def run(world):
        return calibrate(script, 4, world=world)

    monkeypatch.setattr(
        "tonari.bench.storage.training.calibrate._median_step", lambda step, script: next(medians)
    )
    assert run_threads(thread_worlds((1, 1)), run) == [2.0, 2.0]


@pytest.mark.parametrize(
    ("text", "found"),
    [
        (None, "found no such file"),
        ("x = 1", "defines no function make_step"),
        ("def make_step(n):\n    return 3", "returned int"),
        ("raise OSError('no card')", "running it failed: OSError: no card"),
        ("def make_step(n):\n    return lambda: 1 / 0", "step 0 failed: ZeroDivisionError"),
    ],
)
def test_a_script_without_a_step_is_refused_with_the_cure(tmp_path, text, found):
    script = tmp_path / "model.py"
    if text is not None:
        script.write_text(text)
    [world] = thread_worlds((1,))
    with pytest.raises(BenchError, match=found) as error:
        calibrate(script, 4, world=world)
    assert "--step-ms" in str(error.value)
