"""`tonari stats`: the figures are those of NumPy on all values, on one rank and on two."""

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from hypothesis.extra import numpy as arrays
from PIL import Image

from tests.multirank import launch_command, run_job
from tonari import cli
from tonari.errors import CommandError
from tonari.stats.command import main
from tonari.stats.moments import measure, merge

SHAPE = (37, 3, 8, 12)


def write_grid(path: Path) -> np.ndarray:
    """Write pressures in Pa, whose mean is large beside their deviation, some of them unknown."""
    h5py = pytest.importorskip("h5py", reason="tonari[hdf5]")
    values = np.random.default_rng(0).normal(101_325, 3, SHAPE) * np.arange(1, 4)[:, None, None]
    values = values.astype(np.float32)
    values[4, 1, :2] = np.nan
    values[9, 2, 0, 0] = np.inf
    with h5py.File(path, "w") as file:
        file.create_dataset("time", data=np.arange(SHAPE[0])).make_scale("time")
        file["p"], file["lat"] = values, np.arange(8.0)
        for dim, name in zip(file["p"].dims, ("time", "level", "lat", "lon"), strict=True):
            dim.label = name
        file["p"].dims[0].attach_scale(file["time"])
    return values


def expected(values: np.ndarray) -> dict[str, list[float]]:
    """Measure [channels, n] with NumPy, all at once."""
    parts = [part[np.isfinite(part)] for part in values.astype(np.float64)]
    return {
        "mean": [p.mean() for p in parts], "std": [p.std() for p in parts],
        "min": [p.min() for p in parts], "max": [p.max() for p in parts],
        "count": [len(p) for p in parts],
        "nonfinite": [values.shape[1] - len(p) for p in parts],
    }  # fmt: skip


def close(found: dict[str, Any], values: np.ndarray) -> bool:
    return all(
        found[name] == pytest.approx(its, rel=1e-11) for name, its in expected(values).items()
    )


@pytest.mark.multirank
def test_figures_of_an_array_are_those_of_numpy_on_one_rank_and_two(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    values = write_grid(tmp_path / "a.h5")
    words = [str(tmp_path / "a.h5"), "--axis", "time", "--json"]
    assert cli.main(["stats", *words]) == 0
    found = json.loads(capsys.readouterr().out)
    assert [*found["fields"]] == ["p"], "and not the coordinates"
    assert close(found["fields"]["p"], values.reshape(1, -1))
    launch = launch_command("mpiexec", 2)
    status, said = run_job(
        [*launch, "-m", "tonari", "stats", *words, "--per", "level"], env=None, timeout_s=60
    )
    assert status == 0, said
    found = json.loads(said[said.index("{") : said.rindex("}") + 1])
    assert found["samples"] == SHAPE[0]
    assert close(found["fields"]["p"], np.moveaxis(values, 1, 0).reshape(3, -1))


def test_figures_of_pictures_are_by_channel_in_0_to_1(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    rng, seen = np.random.default_rng(0), list[np.ndarray]()
    for number in range(20):
        pixels = rng.integers(0, 100 + 50 * (number % 3), (6 + number, 9, 3), np.uint8)
        path = tmp_path / "data" / "ab"[number // 10] / f"{number:02}.png"
        path.parent.mkdir(parents=True, exist_ok=True)
        Image.fromarray(pixels).save(path)
        seen.append(pixels.reshape(-1, 3).T / 255)
    assert cli.main(["stats", str(tmp_path / "data"), "--json"]) == 0
    found = json.loads(capsys.readouterr().out)
    assert close(found["fields"]["image"], np.concatenate(seen, axis=1))
    assert cli.main(["stats", str(tmp_path / "data"), "--rows", "5"]) == 0
    *_, title, mean, std = capsys.readouterr().out.splitlines()
    assert title == "[augment]  # of tonari train"
    some = np.concatenate(seen[::4], axis=1)
    said = [float(word) for word in mean.removeprefix("mean = [").rstrip("]").split(", ")]
    assert said == pytest.approx(some.mean(axis=1), rel=1e-5)
    assert std.startswith("std = [")


def test_what_has_no_numbers_or_no_such_axis_is_refused(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    write_grid(tmp_path / "a.h5")
    words = [str(tmp_path / "a.h5"), "--axis", "time"]
    main(words)
    hint = "This is p over all places along level (3), lat (8), lon (12); --per level gives each"
    assert hint in capsys.readouterr().out
    main([*words, "--per", "level"])
    assert "over all" not in capsys.readouterr().out
    with pytest.raises(CommandError, match=r"--per x: .* axes level, lat, lon of .* \[3, 8, 12\]"):
        main([*words, "--per", "x"])
    with pytest.raises(CommandError, match="'p' is Text, expected a picture, an array or a number"):
        main([*words, "--fields", "p=text:p"])


@given(
    arrays.arrays(np.float64, (2, 30), elements=st.floats(-1e6, 1e6) | st.just(np.nan)),
    st.lists(st.integers(0, 30), max_size=4),
)
def test_parts_merge_to_the_whole(values: np.ndarray, cuts: list[int]) -> None:
    whole, found = measure(values), measure(values[:, :0])
    for part in np.split(values, sorted(cuts), axis=1):
        found = merge(found, measure(part))
    np.testing.assert_allclose(found, whole, rtol=1e-9, atol=1e-3)
