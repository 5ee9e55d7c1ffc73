"""Documents of packed text that are left out never count; the others of their sequence do."""

import csv
from collections import Counter
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import dataio
from dataio.source.wrap.packing import Packing
from dataio.world import World, run_threads, single_world, thread_worlds
from tests.dataio.source.wrap.test_packed import LENGTH, write_text
from tonari.rows import open as open_run

SEQUENCES = {way: dataio.Sequences(LENGTH, packing=way) for way in ("best_fit", "concatenated")}
TEXTS = [chr(97 + number) * (1 + number * 7 % 23) for number in range(26)]
"""A letter each, so that a token says its document; some are longer than a sequence."""
GONE = (3, 4, 11, 19, 20, 21)


def write_list(path: Path, documents: Any) -> Path:
    with path.open("w", newline="") as file:
        csv.writer(file).writerows([["document", "place"], *([each, "x"] for each in documents)])
    return path


def make(root: Path, world: World, way: Packing = "best_fit", **options: Any) -> dataio.Loader:
    names = str(root / "packed")
    given: dict[str, Any] = {
        "batch_size": 2, "fields": SEQUENCES[way].fields("uint8"), "seed": 3, "world": world,
        "cache": dataio.NodeCache(root / f"cache{world.node}"),
        "workers": dataio.Workers(threads=0),
    }  # fmt: skip
    return dataio.Loader(dataio.Shards(names, sequences=SEQUENCES[way]), **{**given, **options})


Seen = list[tuple[int, bytes, tuple[int, ...]]]


def rows_of(batch: Any) -> Seen:
    """List the rows of a batch that are no padding: sample, tokens, documents."""
    kept = batch["weight"] > 0
    return [
        (int(sample), bytes(tokens.numpy()), tuple(documents.tolist()))
        for sample, tokens, documents in zip(
            batch["sample_id"][kept], batch["tokens"][kept], batch["document"][kept], strict=True
        )
    ]


def letters(seen: Seen) -> Counter[str]:
    """Count the targets of each document."""
    found = Counter[str]()
    for _, tokens, documents in seen:
        for place in range(1, len(tokens)):
            if documents[place] and documents[place] == documents[place - 1]:
                found[chr(tokens[place])] += 1
    return found


@pytest.fixture
def packed(tmp_path: Path) -> Path:
    """A text in three shards."""
    write_text(tmp_path / "packed", TEXTS, shard_bytes=120)
    return tmp_path


@pytest.mark.parametrize("way", SEQUENCES)
@pytest.mark.parametrize("layout", [(1,), (2, 1), (1, 1)])
def test_each_target_of_the_other_documents_comes_once_and_none_of_those_left_out(
    packed: Path, way: Packing, layout: tuple[int, ...]
) -> None:
    given = str(write_list(packed / "gone.csv", GONE))

    def on_rank(world: World) -> Seen:
        with make(packed, world, way, exclude=given) as loader:
            return [row for _ in loader.epochs(1) for batch in loader for row in rows_of(batch)]

    seen = [row for rank in run_threads(thread_worlds(list(layout)), on_rank) for row in rank]
    kept = {text[0]: len(text) - 1 for n, text in enumerate(TEXTS) if n not in GONE}
    found = letters(seen)
    if way == "best_fit":
        # The last token of one piece is the first of the next: every target once
        assert found == Counter({letter: count for letter, count in kept.items() if count})
    assert set(found) == {letter for letter, count in kept.items() if count}
    with make(packed, single_world(), way) as loader:
        whole = {row[0]: row for batch in loader for row in rows_of(batch)}
    for sample, tokens, documents in seen:
        assert tokens == whole[sample][1], "the tokens stay where they are"
        for token, now, before in zip(tokens, documents, whole[sample][2], strict=True):
            assert now == (0 if token - 97 in GONE and before else before)
    left_out = set(whole) - {row[0] for row in seen}
    assert left_out, "a sequence without a target is left out whole"
    assert all(set(letters([whole[sample]])) <= {TEXTS[n][0] for n in GONE} for sample in left_out)


def test_a_run_goes_on_exactly_and_another_list_holds_from_there(packed: Path) -> None:
    others = [n for n in range(0, 26, 2) if n not in GONE]
    first, second = (str(write_list(packed / f"{len(each)}.csv", each)) for each in (GONE, others))
    log: Any = {"reports": dataio.Reports(rows=packed / "rows", progress=False)}
    with make(packed, single_world(), exclude=first) as loader:
        whole = [rows_of(batch) for batch in loader]
    with make(packed, single_world(), exclude=first, **log) as loader:
        batches = iter(loader)
        begun = [rows_of(next(batches)) for _ in range(3)]
        loader.save(packed / "saved")
        state = loader.state_dict()
    with make(packed, single_world(), exclude=first) as loader:
        assert loader.excluded == " (7 samples and 6 documents excluded)"
        loader.restore(packed / "saved")
        assert begun + [rows_of(batch) for batch in loader] == whole
    with (
        make(packed, single_world(), exclude=second) as loader,
        pytest.raises(dataio.StateError, match="another list to exclude"),
    ):
        loader.load_state_dict(state)
    with make(packed, single_world(), exclude=second, **log) as loader:
        loader.restore(packed / "saved")
        rest = [rows_of(batch) for batch in loader]
        replayed = [rows_of(loader.replay(0, step)) for step in range(3 + len(rest))]
    assert replayed == begun + rest, "each with the documents that were left out then"
    found = letters([row for rows in rest for row in rows])
    assert not set(found) & {TEXTS[n][0] for n in others}
    samples = [row[0] for rows in begun + rest for row in rows]
    assert len(set(samples)) == len(samples)
    # The log plans the same, though no whole sample is left out by some lists
    table = open_run(str(packed / "rows")).at(epoch=0)
    assert sorted(table["sample_id"].to_pylist()) == sorted(samples)


def test_a_list_that_leaves_no_sequence_out_changes_no_order(packed: Path) -> None:
    given = str(write_list(packed / "one.csv", [10]))
    log = dataio.Reports(rows=packed / "rows", progress=False)
    with make(packed, single_world()) as loader:
        whole = [[row[0] for row in rows_of(batch)] for batch in loader]
    with make(packed, single_world(), exclude=given, reports=log) as loader:
        assert [[row[0] for row in rows_of(batch)] for batch in loader] == whole
        assert loader.stats()["excluded_fraction"] == 0
        assert " samples (1 documents excluded), batches" in repr(loader)
    table = open_run(str(packed / "rows")).at(epoch=0)
    assert table["sample_id"].to_pylist() == [row for rows in whole for row in rows]


def test_what_changes_batches_comes_behind_the_mask(packed: Path) -> None:
    given = str(write_list(packed / "gone.csv", GONE))
    seen = []

    def look(batch: Any, rng: np.random.Generator) -> Any:
        seen.extend(rows_of(batch))
        return batch

    with make(packed, single_world(), exclude=given, batch_transform=look) as loader:
        assert set(letters([row for batch in loader for row in rows_of(batch)])) <= set(
            letters(seen)
        )
    assert not set(letters(seen)) & {TEXTS[n][0] for n in GONE}


def test_lists_that_do_not_fit_are_refused(packed: Path) -> None:
    given = str(write_list(packed / "gone.csv", [3, 26, 99]))
    with pytest.raises(ValueError, match=r"found document 26, expected numbers in \[0, 26\)"):
        make(packed, single_world(), exclude=given)
    given = str(write_list(packed / "gone.csv", [3]))
    tokens = {"tokens": SEQUENCES["best_fit"].fields("uint8")["tokens"]}
    with pytest.raises(ValueError, match=r"the fields are tokens, expected .*'document'"):
        make(packed, single_world(), exclude=given, fields=tokens)
    with pytest.raises(ValueError, match=r"column document, and .* has no documents"):
        dataio.Loader(
            {"x": np.arange(9)}, batch_size=1, fields={"x": dataio.Int("x")}, exclude=given,
            cache=dataio.NodeCache(packed / "other"), world=single_world(),
        )  # fmt: skip
    every = str(write_list(packed / "gone.csv", range(26)))
    with pytest.raises(ValueError, match=r"all .* samples of .* are left out"):
        make(packed, single_world(), exclude=every)
