"""The table of sources: each one stages, resumes, is read in part, and says what is wrong."""

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from dataio import Loader, Reports, Workers
from dataio.base.errors import DataioError
from dataio.source import open_source
from dataio.world import single_world
from tests.dataio.source.cases import Case
from tests.dataio.source.formats.record_cases import RECORDS

CASES = [*RECORDS]

each = pytest.mark.parametrize("case", CASES, ids=lambda case: case.name)


def loader(case: Case, source: Any, cache: Path) -> Loader:
    return Loader(
        source,
        batch_size=5,
        fields=case.fields,
        cache=cache,
        world=single_world(),
        workers=Workers(threads=0),
        reports=Reports(progress=False),
    )


def shown(batch: dict[str, Any]) -> dict[str, Any]:
    """All that a batch holds, as values that compare."""
    return {
        name: value.tolist() if isinstance(value, torch.Tensor) else value
        for name, value in batch.items()
    }


@each
def test_it_stages(case: Case, tmp_path: Path) -> None:
    """Batches hold what was written, each sample once."""
    (tmp_path / "in").mkdir()
    source = case.write(tmp_path / "in")
    seen = set()
    with loader(case, source, tmp_path / "cache") as batches:
        for batch in batches:
            for row, number in enumerate(batch["sample_id"].tolist()):
                if not batch["weight"][row]:
                    continue
                seen.add(number)
                for name, value in case.sample(number).items():
                    held = batch[name][row]
                    if isinstance(held, torch.Tensor):
                        np.testing.assert_array_equal(held.numpy(), value)
                    else:
                        assert held == value
    assert seen == set(range(case.num_samples))


@each
def test_it_resumes(case: Case, tmp_path: Path) -> None:
    """A run that is saved within an epoch and goes on gives the batches of one that ran through."""
    (tmp_path / "in").mkdir()
    source = case.write(tmp_path / "in")
    whole, parts = [], []
    with loader(case, source, tmp_path / "a") as batches:
        for _ in batches.epochs(2):
            whole += [shown(batch) for batch in batches]
    with loader(case, source, tmp_path / "b") as batches:
        for batch in batches:
            parts.append(shown(batch))
            batches.save(tmp_path / "saved")
            break
    with loader(case, source, tmp_path / "b") as batches:
        batches.restore(tmp_path / "saved")
        for _ in batches.epochs(2):
            parts += [shown(batch) for batch in batches]
    assert parts == whole


@each
def test_it_is_read_in_part(case: Case, tmp_path: Path) -> None:
    """Who needs half of the samples reads about half of the bytes, where the format allows it."""
    (tmp_path / "in").mkdir()
    spec, fields = case.large(tmp_path / "in")
    source = open_source(spec)
    counted = source.bytes_read
    num_rows = sum(len(rows) for rows in source.read(np.arange(source.num_samples // 2), fields))
    assert num_rows == source.num_samples // 2
    total = sum(path.stat().st_size for path in (tmp_path / "in").rglob("*") if path.is_file())
    assert 0.3 * total < source.bytes_read - counted <= case.half_fraction * total


@each
def test_it_says_what_is_wrong(case: Case, tmp_path: Path) -> None:
    """One error names the file and what to do."""
    (tmp_path / "in").mkdir()
    with pytest.raises(DataioError, match=case.message):
        loader(case, case.broken(tmp_path / "in"), tmp_path / "cache").close()
