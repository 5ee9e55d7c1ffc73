"""What a run says at its end: bytes of the source beside a DataLoader's, and where time went."""

import pytest

from dataio.world import World, run_threads, single_world, thread_worlds
from tests.trainer.watch.test_meter import place
from tonari.trainer.watch.totals import Totals, source_words, time_words, wait_words

STATS = {
    "source_bytes": 1e6, "staging_bytes": 8e5, "staged_rows": 80, "rows": 200, "disk_bytes": 0.0,
    "page_cache_bytes": 6e6, "wait_s": 1.0, "staging_s": 2.0, "exchange_blocked_s": 0.25,
    "hidden_fraction": 0.2,
}  # fmt: skip


def totals(epochs: float = 3.0, **stats: float) -> dict[str, float]:
    counted = Totals()
    counted.add(1.0, {})
    counted.add(epochs - 1, STATS)
    world = single_world()
    return counted.sum_up(STATS | stats, num_samples=100, place=place(world, (1,) * 5), world=world)


def test_a_dataloader_reads_what_staging_read_of_a_row_for_each_sample_and_epoch() -> None:
    assert source_words(totals()) == (
        "read 1 MB from the source; a DataLoader would have read about 3 MB, each of 100 samples "
        "once an epoch"
    )
    assert "about 2.5 MB" in source_words(totals(epochs=2.5)), "the part of an epoch is a part"


def test_rows_of_a_cache_that_was_full_count_as_they_lie_there() -> None:
    found = source_words(totals(staged_rows=0, staging_bytes=0, source_bytes=5e4))
    assert found.startswith("read 50 KB from the source; a DataLoader would have read about 9 MB")
    assert found.endswith("once an epoch, if samples are as large there as in the cache")
    assert source_words(totals(staged_rows=0, rows=0)) == "read 1 MB from the source"


@pytest.mark.parametrize(("epochs", "end"), [(1.0, "from the second epoch on"), (1.04, "saved")])
def test_that_nothing_was_saved_is_said(epochs: float, end: str) -> None:
    assert f": nothing was saved{'; ' if epochs == 1 else ''}" in source_words(totals(epochs))
    assert source_words(totals(epochs)).endswith(end)
    assert "nothing" not in source_words(totals(1.06))


def test_ranks_add_up_and_the_slowest_counts() -> None:
    def sum_up(world: World) -> dict[str, float]:
        here = place(world, (1, world.world_size, 1, 1, 1))
        counted = Totals()
        counted.add(2.0, STATS | {"hidden_fraction": 0.1 + 0.2 * world.rank})
        stats = STATS | {"wait_s": 1.0 + world.rank}
        return counted.sum_up(stats, num_samples=100, place=here, world=world)

    first, second = run_threads(thread_worlds((1, 1)), sum_up)
    assert first == second
    assert (first["source_bytes"], first["rows"], first["wait_s"]) == (2e6, 400, 2.0)
    assert first["hidden_fraction"] == pytest.approx(0.2)
    assert first["num_samples"] == 100


def test_a_scorer_counts_what_it_read_and_no_row_again() -> None:
    def sum_up(world: World) -> dict[str, float]:
        counted = Totals()
        counted.add(1.0, STATS)
        here = place(world, (2, 1, 1, 1, 1))
        return counted.sum_up(STATS, num_samples=100, place=here, world=world)

    found, _ = run_threads(thread_worlds((1, 1)), sum_up)
    assert (found["source_bytes"], found["staged_rows"]) == (2e6, 80)
    assert found["hidden_fraction"] == pytest.approx(0.2)


def test_the_time_is_told_by_what_took_it() -> None:
    parts_s = {
        "train_s": 30.0, "epoch_end_s": 1.5, "refresh_s": 0.0, "evaluation_s": 4.0,
        "checkpoint_s": 0.5,
    }  # fmt: skip
    found = totals() | {"num_saved": 3.0}
    assert time_words(found, parts_s) == (
        "time: staging 2.0 s, steps 30.0 s (waiting for batches 1.0 s), epoch ends 1.5 s (waiting "
        "for the exchange 0.2 s), new scores of hidden rows 0.0 s, evaluation 4.0 s, checkpoints "
        "0.5 s (3 written)"
    )
    assert "1.0 s, 0.5 s of it for rows beyond the quota)" in time_words(
        found | {"window_wait_s": 0.5}, parts_s
    )


def test_what_steps_waited_for_is_said_with_what_to_change() -> None:
    parts_s = {"train_s": 100.0}
    found = totals(
        wait_s=40.0, wait_p95_s=0.25, wait_decode_s=30.0, wait_source_s=9.9, wait_disk_s=0.1
    )
    assert wait_words(found, parts_s) == (
        "\nsteps waited for batches 40% of their time (decode 30.0 s, source 9.9 s; 19 of 20 waits "
        "were shorter than 0.25 s): give it more threads ([data.workers] threads), or set "
        'data.decoded = "auto"'
    )
    assert "more room" in wait_words(found | {"wait_source_s": 90.0}, parts_s)
    assert wait_words(found, {"train_s": 900.0}) == ""
    assert wait_words(found | {"wait_s": 9.0}, {"train_s": 9.0}) == "", "too short to matter"
