"""Put together what was carried, and run the list; needs Python, pip and torch alone.

    python DIR/load-1/begin.py WORK [arguments of `python -m benchmarks.gpu all`]

Beside the first load may lie others, or come later: what is whole by then is used.
"""

import os
import subprocess
import sys
import tarfile
from pathlib import Path


def join_parts(loads: Path, work: Path) -> list[Path]:
    """Join the parts of each file that are all there; which ones are new in WORK."""
    joined = []
    for first in sorted(loads.glob("load-*/*.1of*")):
        name, _, count = first.name.rpartition(".1of")
        names = [f"{name}.{number}of{count}" for number in range(1, int(count) + 1)]
        parts = [part for each in names for part in loads.glob(f"load-*/{each}")]
        if len(parts) == len(names) and not (work / name).exists():
            (work / name).write_bytes(b"".join(part.read_bytes() for part in parts))
            joined.append(work / name)
    return joined


def main() -> None:
    """Join, install beside the machine's own packages, unpack, run."""
    loads, work = Path(__file__).resolve().parents[1], Path(sys.argv[1]).resolve()
    site, checkout = work / "site", work / "checkout"
    work.mkdir(parents=True, exist_ok=True)
    joined = join_parts(loads, work)
    if wheels := [str(path) for path in joined if path.suffix == ".whl"]:
        install = ["install", "-q", "--no-index", "--no-deps", "--upgrade", "--target", str(site)]
        subprocess.run([sys.executable, "-m", "pip", *install, *wheels], check=True)
    with tarfile.open(work / "checkout.tar.gz") as archive:
        if not checkout.exists():
            archive.extractall(checkout, filter="data")
        commit = archive.pax_headers["comment"][:12]
    command = ["all", "--out", str(work / "out"), "--data", str(work), "--commit", commit]
    environment = os.environ | {"PYTHONPATH": f"{checkout}{os.pathsep}{site}"}
    os.chdir(checkout)
    os.execve(
        sys.executable,
        [sys.executable, "-m", "benchmarks.gpu", *command, *sys.argv[2:]],
        environment,
    )


if __name__ == "__main__":
    main()
