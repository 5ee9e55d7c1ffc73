"""An environment for each peer that needs packages of its own, made on demand.

Their packages conflict with one another, so each peer has its own environment. What this
interpreter has (above all torch, a gigabyte) is shared through a path file, so that all peers are
measured with the same versions.
"""

import json
import site
import subprocess
import sys
import venv
from collections.abc import Sequence
from importlib import metadata
from pathlib import Path

from tonari.bench.errors import BenchError
from tonari.bench.loader.contenders import Contender

INSTALL_TIMEOUT_S = 1800
STAMP = "tonari.json"

STUB_TORCHVISION = {
    "__init__.py": "",
    "datasets.py": "VisionDataset = object\n",
    "transforms/__init__.py": "",
    "transforms/functional.py": "to_tensor = None\n",
}


def interpreter(contender: Contender, root: Path) -> Path | None:
    """Find the interpreter that runs a contender; None if its environment is not installed."""
    if not contender.environment:
        return Path(sys.executable)
    directory = root / contender.environment
    return directory / "bin" / "python" if (directory / STAMP).exists() else None


def versions(contender: Contender, root: Path) -> dict[str, str]:
    """Read the versions of what a contender measures."""
    if contender.environment:
        stamp = root / contender.environment / STAMP
        found: dict[str, str] = json.loads(stamp.read_text()) if stamp.exists() else {}
        return found
    return {module: metadata.version(module) for module in contender.modules}


def install(contender: Contender, root: Path) -> None:
    """Make a contender's environment, unless it is there. Blocks; needs a package index.

    Raises:
        BenchError: If pip fails.
    """
    if not contender.environment or interpreter(contender, root) is not None:
        return
    directory = root / contender.environment
    venv.create(directory, with_pip=True, clear=True)
    python = directory / "bin" / "python"
    places = _call([str(python), "-c", "import site; print(site.getsitepackages()[0])"])
    packages = Path(places.strip())
    (packages / "tonari-base.pth").write_text("\n".join(site.getsitepackages()) + "\n")
    (directory / "constraints.txt").write_text(
        "".join(f"{name}=={metadata.version(name).split('+')[0]}\n" for name in ("torch", "numpy"))
    )
    pip = [str(python), "-m", "pip"]
    quiet = ["--quiet", "--disable-pip-version-check"]
    constraints = str(directory / "constraints.txt")
    _call([*pip, "install", *quiet, "-c", constraints, *contender.packages])
    _repair_torchvision(python, packages)
    (directory / STAMP).write_text(_call([str(python), "-c", _ASK_VERSIONS, *contender.modules]))


_ASK_VERSIONS = (
    "import json, sys; from importlib.metadata import version\n"
    "print(json.dumps({name: version(name) for name in sys.argv[1:]}))"
)


def _repair_torchvision(python: Path, packages: Path) -> None:
    # The index has torchvision for CUDA alone; beside a torch for the CPU its import fails, and
    # with it that of loaders that want two names from it, which nothing here calls.
    probe = "import importlib.util as u; u.find_spec('torchvision') and __import__('torchvision')"
    if subprocess.run([str(python), "-c", probe], capture_output=True, check=False).returncode == 0:
        return
    _call([str(python), "-m", "pip", "uninstall", "--quiet", "--yes", "torchvision"])
    for name, text in STUB_TORCHVISION.items():
        path = packages / "torchvision" / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)


def _call(command: Sequence[str]) -> str:
    ended = subprocess.run(
        command, capture_output=True, text=True, timeout=INSTALL_TIMEOUT_S, check=False
    )
    if ended.returncode:
        words = (ended.stderr.strip().splitlines() or ["it wrote nothing"])[-1]
        raise BenchError(
            f"{' '.join(command[:4])} ...: ended with {ended.returncode} ({words}), expected 0; "
            "check the package index, or name the other peers with --contenders"
        )
    return ended.stdout
