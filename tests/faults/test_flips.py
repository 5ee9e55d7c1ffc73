"""Single flipped bits and cut files of a cache: the same rows all the same, or an error by name.

Caches of every state are made by the loader, damaged in one place while nobody uses them, and
opened by the loader again. Rows are repaired from truth alone, and no other row is touched.
"""

import os
import re
import shutil
import traceback
from collections import Counter
from dataclasses import replace
from functools import cache as remembered
from pathlib import Path

import numpy as np
import pytest

from dataio import CorruptRowError, DataioError
from dataio.store.tools.report import open_to_read
from dataio.world import run_threads, thread_worlds
from tests.faults.damage import (
    CURE,
    MADE,
    STATES,
    Made,
    check_truth,
    cut,
    files_below,
    flip,
    kind_of,
    outcome,
    restore,
    small,
)
from tests.faults.samples import Job, node_directory, train
from tonari import cli

pytestmark = pytest.mark.thorough

EVERY = bool(os.environ.get("TONARI_LONG"))
FLIPS, CUTS = (500, 100) if EVERY else (60, 24)


@pytest.fixture(scope="module")
def make(tmp_path_factory):
    """Makes a cache in a state, once."""

    @remembered
    def made(name: str, kind: str) -> Made:
        before, job = STATES[name]
        job = replace(job, kind=kind)
        place = tmp_path_factory.mktemp("made")
        with pytest.MonkeyPatch.context() as patch:
            small(patch)
            (place / "cache").mkdir()
            files = before(job, place / "cache")
            restore(files, place / "again")
            trained = train(job, place / "again", saves=place, num_epochs=2)
        return Made(name, job, files, trained)

    return made


@pytest.fixture(autouse=True)
def _small_and_quick(monkeypatch):
    small(monkeypatch)


def draw(make, tmp_path, *, damage, count: int, seed: int) -> Counter[tuple[str, str]]:
    """Damage one file after the other, each of every cache as often as the others."""
    rng = np.random.default_rng(seed)
    caches = [make(name, kind) for name, kind in MADE]
    choices = [(made, name) for made in caches for name in sorted(made.files)]
    order = [choices[i % len(choices)] for i in rng.permutation(max(count, len(choices)))[:count]]
    outcomes: Counter[tuple[str, str]] = Counter()
    wrong = []
    for number, (made, name) in enumerate(order):
        root = tmp_path / str(number)
        restore(made.files, root)
        told = damage(root / name, rng)
        try:
            came = outcome(made, root)
        except Exception as error:
            at = traceback.extract_tb(error.__traceback__)[-1]
            wrong.append(
                f"{number}: {made}: {name} {told}: {type(error).__name__} at {at.filename}:"
                f"{at.lineno}: {str(error)[:1000]}"
            )
            came = "WRONG"
        outcomes[kind_of(root / name), came] += 1
        shutil.rmtree(root)
    for (file, came), times in sorted(outcomes.items()):
        print(f"{damage.__name__} {file}: {came}: {times}")
    assert not wrong, f"{len(wrong)} of {count}:\n" + "\n".join(wrong)
    return outcomes


@pytest.mark.timeout(3600 if EVERY else 300)
def test_no_flipped_bit_is_silent_or_spreads(make, tmp_path):
    outcomes = draw(make, tmp_path, damage=flip, count=FLIPS, seed=1)
    assert sum(outcomes.values()) == FLIPS


@pytest.mark.timeout(3600 if EVERY else 300)
def test_no_cut_file_is_silent_or_spreads(make, tmp_path):
    outcomes = draw(make, tmp_path, damage=cut, count=CUTS, seed=2)
    assert sum(outcomes.values()) == CUTS


def opened(job: Job, root: Path, damage) -> list[str]:
    """Train an epoch on an open cache that is damaged after its manifest was read; what came."""

    def rank(world):
        with job.make(world, root) as loader:
            damage(loader._session.pool.cache)
            for batch in loader:
                for row in np.flatnonzero(batch["slot"].numpy() >= 0).tolist():
                    job.check_row(batch, row)
        return "the same rows"

    return run_threads(thread_worlds(job.nodes), rank)


ALONE = Job((1,), "both")


@pytest.mark.parametrize("verify", ["once", "always"])
def test_repair_never_writes_where_another_row_lies(tmp_path, verify):
    """An entry that was damaged in memory points at another row: it is no place to write to."""
    job = replace(ALONE, cache={"verify": verify})
    train(replace(job, epochs=0), tmp_path / "cache", saves=tmp_path)
    before = files_below(tmp_path / "cache")

    def misplace(cache):
        slots = np.array([3])
        cache.entries.position.put(slots, cache.entries.position[np.array([17])])

    with pytest.raises(
        CorruptRowError, match=r"slot 3 .*another row claims its place.*cache verif"
    ):
        opened(job, tmp_path / "cache", misplace)
    after = files_below(tmp_path / "cache")
    assert {n: d for n, d in after.items() if "lock" not in n} == {
        name: data for name, data in before.items() if "lock" not in name
    }


@pytest.mark.parametrize("kind", ["variable", "both"])
def test_repair_never_writes_over_a_part_of_another_rows_extent(tmp_path, kind):
    job = replace(ALONE, kind=kind)
    train(replace(job, epochs=0), tmp_path / "cache", saves=tmp_path)
    before = files_below(tmp_path / "cache")

    def shift(cache):
        slots = np.array([4])
        cache.entries.offset.put(slots, cache.entries.offset[slots] + 1)

    with pytest.raises(CorruptRowError, match=r"slot 4 .*another row claims its place"):
        opened(job, tmp_path / "cache", shift)
    heap = next(name for name in before if name.endswith("heap-0.bin"))
    assert (tmp_path / "cache" / heap).read_bytes() == before[heap]


@pytest.mark.timeout(3600 if EVERY else 120)
def test_a_bit_that_flips_in_an_open_cache_is_repaired_or_named(tmp_path):
    """In the entries that a process holds, and in the bytes that all have mapped."""
    job, rng = replace(ALONE, nodes=(2,)), np.random.default_rng(3)
    train(replace(job, epochs=0), tmp_path / "made", saves=tmp_path)
    files, wrong = files_below(tmp_path / "made"), []
    outcomes: Counter[tuple[str, str]] = Counter()
    columns = ["sample_id", "checksum", "position", "heap", "offset", "length_0"]
    for number in range(120 if EVERY else 24):
        root = tmp_path / str(number)
        restore(files, root)
        place = ([*columns, "fixed-0.npy", "heap-0.bin", "heap-1.bin"])[number % 9]
        slot, bit = int(rng.integers(job.num_samples)), int(rng.integers(48))

        def damage(
            cache, place=place, slot=slot, bit=bit, root=root, state=rng.bit_generator.state
        ):
            if place in columns:
                column, slots = cache.entries.columns()[place], np.array([slot])
                column.put(slots, column[slots] ^ column.wide(1 << bit))
            elif cache.local_rank == 0:
                mine = np.random.default_rng()
                mine.bit_generator.state = state
                path = cache.directory / place
                at = int(mine.integers(128 if path.suffix == ".npy" else 0, path.stat().st_size))
                with open(path, "r+b") as file:
                    file.seek(at)
                    byte = file.read(1)[0]
                    file.seek(at)
                    file.write(bytes([byte ^ 1 << bit % 8]))

        try:
            came = opened(job, root, damage)[0]
        except DataioError as error:
            came = type(error).__name__
            if str(root) not in str(error) or not re.search(CURE, str(error)):
                wrong.append(f"{number}: {place} of slot {slot}, bit {bit}: {error}")
        except Exception as error:
            at = traceback.extract_tb(error.__traceback__)[-1]
            wrong.append(
                f"{number}: {place} of slot {slot}, bit {bit}: {type(error).__name__} at "
                f"{at.filename}:{at.lineno}: {str(error)[:1000]}"
            )
            came = "WRONG"
        outcomes[place, came] += 1
        # Whatever was in memory: what the files say is still true.
        assert check_truth(job, root) <= 1
        shutil.rmtree(root)
    for (place, came), times in sorted(outcomes.items()):
        print(f"open {place}: {came}: {times}")
    assert not wrong, f"{len(wrong)}:\n" + "\n".join(wrong)


def verified(capsys, root: Path, *flags: str) -> tuple[int, str]:
    status = cli.main(["cache", "verify", str(root), *flags])
    said = capsys.readouterr()
    return status, said.out + said.err


def live_byte(directory: Path, name: str) -> int:
    """Choose a byte that means something: of a row that is there, or of the middle of a table."""
    path, cache = directory / name, open_to_read(directory)
    if path.suffix == ".npy":
        whole, entries = np.load(path, mmap_mode="r"), cache.entries
        position = int(entries.position[entries.present][0])
        return int(path.stat().st_size - (len(whole) - position) * whole[:1].nbytes)
    if path.suffix == ".bin":
        entries = cache.entries.take(cache.entries.extent_bytes > 0)
        return int(entries.offset[:][entries.heap[:] == int(name[len("heap-") : -4])][0])
    return path.stat().st_size // 2


DAMAGED = [
    *(("moved", kind) for kind in ("manifest", "meta", "base", "delta")),
    *(("moved", kind) for kind in ("fixed", "heap", "headers")),
    ("in staging", "staged"), ("in a pull", "surplus"), ("in a pull", "given"),
    ("partial", "fixed"), ("partial", "base"),
]  # fmt: skip


@pytest.mark.parametrize(("state", "kind"), DAMAGED)
def test_verify_finds_a_flipped_bit_in_every_kind_of_file(make, tmp_path, capsys, state, kind):
    made = make(state, "both")
    root, name = tmp_path / "cache", next(n for n in sorted(made.files) if f"/{kind}" in n)
    restore(made.files, root)
    if state == "moved":
        assert verified(capsys, root)[0] == 0
    data = bytearray((root / name).read_bytes())
    data[live_byte((root / name).parent, Path(name).name)] ^= 4
    (root / name).write_bytes(data)
    status, said = verified(capsys, root, "--dry-run")
    assert status == 1, said
    assert (root / name).read_bytes() == data, "nothing is changed"
    status, said = verified(capsys, root)
    assert status == 1
    assert str((root / name).parent) in said
    if kind == "meta":
        assert re.search(r"meta.json: damaged.*remove", said)
        shutil.rmtree((root / name).parent)
    assert train(made.job, root, saves=root, num_epochs=2) == made.trained
    status, said = verified(capsys, root)
    assert status == 0, said


@pytest.mark.parametrize("name", ["fixed-0.npy", "headers.npy"])
def test_verify_mends_the_header_of_an_array(make, tmp_path, capsys, name):
    made, root = make("staged", "both"), tmp_path / "cache"
    restore(made.files, root)
    path = node_directory(root, 0) / name
    data = bytearray(path.read_bytes())
    data[20] ^= 4
    path.write_bytes(data)
    assert verified(capsys, root, "--dry-run")[0] == 1
    status, said = verified(capsys, root)
    assert (status, name in said) == (1, True), said
    assert len(np.load(path))
    assert path.read_bytes() == made.files[str(path.relative_to(root))]
    assert verified(capsys, root)[0] == 0
