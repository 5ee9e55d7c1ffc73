"""pip installs and removes the wheel beside other distributions that own the same names."""

import subprocess
import sys
import zipfile
from pathlib import Path

import pytest

from tests.shipping.conftest import PACKAGES

pytestmark = pytest.mark.thorough


def foreign_wheel(directory: Path, name: str) -> Path:
    """Make a distribution with one package of its own name."""
    info = f"{name}_of_others-1.0.dist-info"
    files = {
        f"{name}/__init__.py": "mine = True\n",
        f"{info}/METADATA": f"Metadata-Version: 2.1\nName: {name}-of-others\nVersion: 1.0\n",
        f"{info}/WHEEL": "Wheel-Version: 1.0\nRoot-Is-Purelib: true\nTag: py3-none-any\n",
    }
    record = "".join(f"{path},,\n" for path in [*files, f"{info}/RECORD"])
    wheel = directory / f"{name}_of_others-1.0-py3-none-any.whl"
    with zipfile.ZipFile(wheel, "w") as archive:
        for path, text in (files | {f"{info}/RECORD": record}).items():
            archive.writestr(path, text)
    return wheel


def test_each_distribution_stays_whole_when_another_comes_or_goes(
    wheel: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("PYTHONPATH", raising=False)
    subprocess.run([sys.executable, "-m", "venv", "--without-pip", tmp_path / "venv"], check=True)
    python = tmp_path / "venv" / "bin" / "python"
    (site,) = (tmp_path / "venv").glob("lib/python*/site-packages")
    quiet = ["--quiet", "--disable-pip-version-check"]

    def pip(*args: str) -> None:
        command = [sys.executable, "-m", "pip", "--python", str(python), *args, *quiet]
        ended = subprocess.run(command, capture_output=True, text=True, check=False)
        assert ended.returncode == 0, ended.stderr

    def install(path: Path) -> None:
        pip("install", "--no-deps", "--no-index", "--no-compile", str(path))

    def there() -> dict[Path, bytes]:
        root = tmp_path / "venv"
        files = {path for path in root.rglob("*") if path.is_file() and path.suffix != ".pyc"}
        return {path: path.read_bytes() for path in files}

    empty = there()
    before, after = foreign_wheel(tmp_path, "trainer"), foreign_wheel(tmp_path, "benchmarks")
    install(before)
    with_theirs = there()
    install(wheel)
    with_ours = there()
    pip("install", "--no-deps", "--no-index", "tonari[cli]")  # what messages name: it is there
    assert with_theirs.items() <= with_ours.items()
    added = {
        path.relative_to(site).parts[0]
        for path in with_ours.keys() - with_theirs.keys()
        if path.is_relative_to(site)
    }
    assert {name for name in added if not name.endswith(".dist-info")} == {*PACKAGES}
    install(after)
    program = "import trainer, benchmarks; import tonari.cli as ours"
    shown = f"{program}; print(trainer.mine, benchmarks.mine, ours.__name__)"
    ended = subprocess.run(
        [python, "-P", "-W", "error", "-c", shown], capture_output=True, text=True, check=False
    )
    assert (ended.stdout, ended.stderr) == ("True True tonari.cli\n", "")
    with_all = there()
    pip("uninstall", "--yes", "trainer-of-others")
    assert (with_ours.items() - with_theirs.items()) <= there().items()
    pip("uninstall", "--yes", "tonari")
    left = with_all.items() - with_ours.items()
    assert there() == empty | dict(left)
    assert not [path for path in site.iterdir() if path.is_dir() and not any(path.iterdir())]
