"""What to do with files that are not opened as they are, by their names."""

from collections.abc import Iterable
from pathlib import Path, PurePosixPath

_READS = {
    ".csv": ("pyarrow.csv", "pyarrow.csv.read_csv({path!r})"),
    ".tsv": (
        "pyarrow.csv",
        "pyarrow.csv.read_csv({path!r}, parse_options=pyarrow.csv.ParseOptions(delimiter='\\t'))",
    ),
    ".json": (
        "json, pathlib, pyarrow",
        "pyarrow.Table.from_pylist(json.loads(pathlib.Path({path!r}).read_bytes()))",
    ),
    ".lance": ("lance", "lance.dataset({path!r}).to_table()"),
    ".vortex": ("vortex", "vortex.open({path!r}).to_arrow().read_all()"),
}
"""How each is read into a table of Arrow: what is imported, and the call."""
_NEEDS = {".lance": "pylance", ".vortex": "vortex-data"}
_OTHERS = {
    ".zip": "unpack it, and give the directory",
    ".idx": "give the .bin beside it, or the path without a suffix",
}
ARRAY_SUFFIXES = (".h5", ".hdf5", ".he5", ".hdf", ".nc", ".nc4", ".cdf", ".zarr", ".npz", ".npy")
"""Of files and stores of arrays."""
_ANY = "write a class with __len__ and __getitem__ that reads it, and give an object of it"


def advice(path: str) -> str:
    """Advise what to do with a file, or a directory that is one dataset."""
    return _known(path) or _ANY


def directory_advice(name: str) -> str:
    """Advise what to do with a directory that holds no shard, or a path where nothing is."""
    path = Path(name).expanduser()
    if "://" not in name and path.is_dir():
        if known := _known(name.rstrip("/")):
            return known
        splits = sorted(str(index.parent) for index in path.glob("*/index.json"))
        if splits:
            return f"name one of its splits: {', '.join(splits[:4])}"
        if found := _first_known(path.iterdir()):
            return f"of {found}: {_known(found)}"
    return "check the path, and that this node sees it"


def _first_known(children: Iterable[Path]) -> str:
    # A .json beside other files is a note about them.
    names = sorted(str(child) for child in children if child.suffix != ".json")
    return next((name for name in names if _known(name)), "")


def _known(path: str) -> str:
    suffix = PurePosixPath(path).suffix
    if suffix in ARRAY_SUFFIXES:
        return (
            f"give dataio.ArrayFiles({path!r}, axis=0), where a sample is a row of the arrays; "
            "axis=None: the whole file; see docs/grids.md"
        )
    if suffix not in _READS:
        return _OTHERS.get(suffix, "")
    modules, read = _READS[suffix]
    parquet = str(PurePosixPath(path).with_suffix(".parquet"))
    needs = f"`pip install {_NEEDS[suffix]}`, then " if suffix in _NEEDS else ""
    return (
        f"{needs}convert it in Python: `import {modules}, pyarrow.parquet; "
        f"table = {read.format(path=path)}; pyarrow.parquet.write_table(table, {parquet!r})`, and "
        f"give {parquet!r}"
    )
