"""Single flipped bits and cut files of a cache: the same rows all the same, or an error by name.

Caches of every state are made by the loader, damaged in one place while nobody uses them, and
opened by the loader again. Rows are repaired from truth alone, and no other row is touched.
"""

import os
import re
import shutil
import traceback
from collections import Counter
from dataclasses import dataclass, replace
from functools import cache as remembered
from pathlib import Path

import numpy as np
import pytest

import shuffle
from dataio import CorruptRowError, DataioError
from dataio.cache.tools.report import open_to_read
from dataio.rows.rows import corrupt_rows
from dataio.world import run_threads, thread_worlds
from tests.faults.recording import Files, Recorder, State
from tests.faults.samples import WIDE, Job, Samples, Trained, fields_of, node_directory, train
from tonari import cli

pytestmark = pytest.mark.thorough

EVERY = bool(os.environ.get("TONARI_LONG"))
FLIPS, CUTS = (500, 100) if EVERY else (60, 24)
CURE = r"remove|run `tonari cache verify|read (these|them) again|restore|give another|look at"
PARTIAL = {"shuffle": shuffle.Partial(0.4)}


@dataclass(frozen=True)
class Made:
    """A cache as a job left it, and what the job trains on it when nothing is damaged."""

    name: str
    job: Job
    files: Files
    trained: Trained

    def __str__(self) -> str:
        return f"{self.name} ({self.job.kind})"


def files_below(root: Path) -> Files:
    return {
        str(path.relative_to(root)): path.read_bytes() for path in root.rglob("*") if path.is_file()
    }


def staged(job: Job, root: Path) -> Files:
    train(replace(job, epochs=0), root, saves=root)
    return files_below(root)


def moved(job: Job, root: Path) -> Files:
    train(job, root, saves=root)
    return files_below(root)


def most(job: Job, root: Path, prefix: str) -> Files:
    """Run a job, and find the moment at which there were the most files of a kind."""
    recorder = Recorder(root)
    with recorder.recording():
        train(job, root, saves=root, num_epochs=1)
    kills = [state.files for state in recorder.states if state.kind == "kill"]
    return max(kills, key=lambda files: sum(f"/{prefix}" in name for name in files))


def in_staging(job: Job, root: Path) -> Files:
    return most(job, root, "staged-")


def in_pull(job: Job, root: Path) -> Files:
    train(job, root, saves=root)
    shutil.rmtree(node_directory(root, 1))
    return most(job, root, "given-")


STATES = {
    "staged": (staged, Job((2, 1), "", options=PARTIAL)),
    "in staging": (in_staging, Job((2, 1), "", options=PARTIAL)),
    "moved": (moved, Job((1, 1), "", epochs=4, options=PARTIAL)),
    "in a pull": (in_pull, Job((1, 1), "", epochs=4, options=PARTIAL)),
    "partial": (
        moved, Job((1,), "", epochs=2, num_samples=120, width=WIDE, cache={"quota": 900_000}),
    ),
}  # fmt: skip
MADE = [
    *(("staged", kind) for kind in ("fixed", "variable", "both")),
    *(("moved", kind) for kind in ("fixed", "variable", "both")),
    ("in staging", "both"), ("in a pull", "both"), ("partial", "both"),
]  # fmt: skip


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


def small(patch) -> None:
    patch.setattr("dataio.pool.staging.SEAL_BYTES", 300)
    patch.setattr("dataio.cache.commit_log.MOVED_PER_BASE", 9.0)
    patch.setattr("dataio.pool.pull.ROUND_BYTES", 400)
    patch.setattr("dataio.cache.files.store.HEAP_STEP_BYTES", 1 << 10)
    patch.setattr("os.fsync", lambda descriptor: None)
    patch.setattr("os.fdatasync", lambda descriptor: None)


@pytest.fixture(autouse=True)
def _small_and_quick(monkeypatch):
    small(monkeypatch)


def restore(files: Files, root: Path) -> None:
    State("", "", files, None).restore(root)


def kind_of(path: Path) -> str:
    return re.sub(r"[-0-9]+\.", ".", re.sub(r"-\d.*\.", ".", path.name))


def where(path: Path, rng: np.random.Generator) -> int:
    """Choose a byte; of an array its header as often as its rows."""
    size = path.stat().st_size
    if path.suffix == ".npy" and rng.random() < 0.3:
        return int(rng.integers(128))
    return int(rng.integers(size))


def flip(path: Path, rng: np.random.Generator) -> str:
    at, bit = where(path, rng), int(rng.integers(8))
    data = bytearray(path.read_bytes())
    data[at] ^= 1 << bit
    path.write_bytes(data)
    return f"bit {bit} of byte {at} of {len(data)} flipped"


def cut(path: Path, rng: np.random.Generator) -> str:
    if rng.random() < 0.3:
        path.unlink()
        return "removed"
    size = path.stat().st_size
    left = int(rng.integers(size))
    os.truncate(path, left)
    return f"cut from {size} to {left} bytes"


def check_truth(job: Job, root: Path) -> int:
    """Compare every row of the caches with its sample, and count those that do not match.

    Raises:
        AssertionError: If an entry is not its sample's.
    """
    num_corrupt = 0
    for node in range(len(job.nodes)):
        cache = open_to_read(node_directory(root, node))
        slots = np.flatnonzero(cache.entries.present)
        rows = cache.read_rows(slots)
        true = sums(job)[rows.sample_id]
        assert np.array_equal(rows.checksum, true), f"node {node}: entries of other samples"
        num_corrupt += len(corrupt_rows(rows))
    return num_corrupt


def sums(job: Job) -> np.ndarray:
    """The checksum of every sample."""
    source, ids = Samples(job.num_samples, job.width), np.arange(job.num_samples)
    read = source.read(ids, fields_of(job.kind, job.width))
    return np.concatenate([rows.checksum for rows in read])


def outcome(made: Made, root: Path) -> str:
    """Train on a damaged cache, and say what came of it.

    Raises:
        AssertionError: If other rows were trained, or the error does not say where, or what to do.
        Exception: What is raised that is none of ours.
    """
    try:
        found = train(made.job, root, saves=root, num_epochs=2)
    except DataioError as error:
        told = str(error)
        assert str(root) in told, f"without a path: {told}"
        assert re.search(CURE, told), f"without a cure: {told}"
        return type(error).__name__
    assert found == made.trained, "other samples"
    assert not check_truth(made.job, root), "rows stay corrupt"
    return "the same rows"


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
            damage(loader._parts.pool.cache)
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
