"""Write a small dataset as anemoi-datasets lays them out: waves that travel east around the globe.

pip install '.[zarr]'
python examples/anemoi_data.py weather.zarr
"""

import sys
from pathlib import Path

import numpy as np
import zarr
from numpy.typing import NDArray

VARIABLES = ["10u", "2t", "msl"]
MEANS, STDEVS = (0.0, 280.0, 101000.0), (5.0, 10.0, 900.0)
MISSING = (9, 24)


def write_dataset(
    path: Path, *, num_dates: int = 60, num_points: int = 256
) -> tuple[NDArray[np.float32], NDArray[np.datetime64]]:
    """Write it: the values, float32[dates, variable, 1, grid], and the dates, six hours apart."""
    dates = np.datetime64("2020-01-01", "s") + np.arange(num_dates) * np.timedelta64(6, "h")
    rng = np.random.default_rng(0)
    longitudes = np.linspace(0, 360, num_points, endpoint=False)
    # [dates, 1, 1, grid], [variable, 1, 1]
    angles = np.radians(longitudes - 5 * np.arange(num_dates)[:, None])[:, None, None]
    phases, means, stdevs = (
        np.reshape(numbers, (-1, 1, 1)) for numbers in (rng.random(3), MEANS, STDEVS)
    )
    noise = rng.normal(0, 0.1, (num_dates, len(VARIABLES), 1, num_points))
    values = (means + stdevs * (np.sin(3 * angles + 6 * phases) + noise)).astype(np.float32)
    group = zarr.open_group(path, mode="w", zarr_format=2)
    group.attrs.update(
        variables=VARIABLES, frequency="6h", missing_dates=[str(dates[at]) for at in MISSING]
    )
    data = group.create_array(
        "data",
        shape=values.shape,
        chunks=(1, *values.shape[1:]),
        dtype="float32",
        fill_value=np.nan,
    )
    for at in set(range(num_dates)) - {*MISSING}:
        data[at] = values[at]
    over = (0, 2, 3)
    arrays = {"mean": values.mean(over), "stdev": values.std(over),
              "minimum": values.min(over), "maximum": values.max(over)}  # fmt: skip
    arrays |= {"dates": dates, "latitudes": 0 * longitudes, "longitudes": longitudes}
    for name, array in arrays.items():
        group.create_array(name, data=array)
    return values, dates


if __name__ == "__main__":
    write_dataset(Path(sys.argv[1]))
