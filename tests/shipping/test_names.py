"""Another's `dataio` is never taken for ours, in a checkout and where a wheel was installed."""

from pathlib import Path

import pytest

from tests.shipping.conftest import ROOT, Layout, Run

pytestmark = pytest.mark.thorough

LAYOUTS = ["checkout", "wheel"]


@pytest.mark.parametrize("layout", LAYOUTS)
def test_the_command_line_runs_and_names_its_own_errors(run_on: Run, layout: Layout) -> None:
    ended = run_on(layout, "-W", "error", "-m", "tonari", "cache", "verify", "/absent")
    assert (ended.returncode, ended.stderr.count("\n")) == (1, 1)
    assert ended.stderr.startswith("tonari cache: /absent: no such directory")


def test_the_names_of_errors_that_the_command_line_knows_are_names_of_classes(run_on: Run) -> None:
    program = (
        "import importlib; from tonari.cli import KNOWN_ERRORS\n"
        "for name in KNOWN_ERRORS:\n"
        "    module, _, kind = name.rpartition('.')\n"
        "    found = getattr(importlib.import_module(module), kind)\n"
        "    assert found.__module__ == module and issubclass(found, Exception), name\n"
        "print(len(KNOWN_ERRORS) > 3)"
    )
    ended = run_on("wheel", "-W", "error", "-c", program)
    assert (ended.stdout, ended.stderr) == ("True\n", "")


def test_a_traceback_names_the_same_modules_in_both_layouts(run_on: Run) -> None:
    program = (
        "import sys, traceback, dataio\n"
        "try:\n"
        "    dataio.Loader('/absent', fields={}, batch_size=1, cache=3)\n"
        "except Exception as error:\n"
        "    frames = traceback.walk_tb(error.__traceback__)\n"
        "    print([frame.f_globals['__name__'] for frame, _ in frames], error)"
    )
    shown = [run_on(layout, "-W", "error", "-c", program).stdout for layout in LAYOUTS]
    assert shown[0] == shown[1]
    assert "expected a str, a path or a dataio.NodeCache" in shown[0]


@pytest.mark.parametrize("layout", LAYOUTS)
def test_a_message_names_an_example_that_is_there(run_on: Run, layout: Layout) -> None:
    program = "from tonari.names import EXAMPLES; print((EXAMPLES / 'cifar10.toml').exists())"
    assert run_on(layout, "-W", "error", "-c", program).stdout == "True\n"


@pytest.mark.parametrize("layout", LAYOUTS)
def test_a_start_reads_no_record_of_packages(run_on: Run, layout: Layout) -> None:
    ended = run_on(
        layout, "-c", "import tonari, sys; print('importlib.metadata' in sys.modules, end='')"
    )
    assert ended.stdout == "False"


@pytest.mark.parametrize("layout", LAYOUTS)
def test_the_command_that_adds_an_extra_names_what_pip_finds(run_on: Run, layout: Layout) -> None:
    program = "from dataio.base.errors import install_command; print(install_command('cli'))"
    where = {"checkout": f"-e '{ROOT}[cli]'", "wheel": "'tonari[cli]'"}[layout]
    assert run_on(layout, "-W", "error", "-c", program).stdout == f"pip install {where}\n"


def write(directory: Path, name: str) -> Path:
    """Make a file or package of another's, and give the path that Python shows."""
    path = directory / (name if name.endswith(".py") else f"{name}/__init__.py")
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text("mine = True\n")
    return path


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("name", ["shuffle.py", "dataio"])
def test_a_name_that_leads_to_anothers_file_ends_the_start_with_both_files_named(
    run_on: Run, installed: Path, tmp_path: Path, layout: Layout, name: str
) -> None:
    theirs = write(tmp_path, name)
    short = name.removesuffix(".py")
    ended = run_on(layout, "-m", "tonari", "--version", before=[tmp_path])
    assert ended.returncode == 1
    ours = ROOT if layout == "checkout" else installed
    last = ended.stderr.splitlines()[-1]
    assert f"`import {short}` finds {theirs}, expected {ours}/{short}/__init__.py; " in last
    assert f"rename that file, or put {ours} before it on PYTHONPATH" in last


@pytest.mark.parametrize("name", ["trainer", "benchmarks", "oracle.py"])
def test_all_other_names_are_free(run_on: Run, tmp_path: Path, name: str) -> None:
    write(tmp_path, name)
    short = name.removesuffix(".py")
    program = f"import {short}, tonari.errors, tonari.cli; print({short}.mine)"
    ended = run_on("wheel", "-W", "error", "-c", program, before=[tmp_path])
    assert ended.stdout == "True\n", ended.stderr


def record(directory: Path, name: str, version: str, files: str) -> None:
    """Write what pip records of another distribution."""
    written = directory / f"{name}-{version}.dist-info"
    written.mkdir()
    (written / "METADATA").write_text(
        f"Metadata-Version: 2.1\nName: {name.replace('_', '-')}\nVersion: {version}\n"
    )
    (written / "RECORD").write_text(f"{files},,\n{written.name}/RECORD,,\n")


FIND = "from tonari.names_check import check_names; print(check_names())"


def test_doctor_says_where_our_packages_lie(run_on: Run, installed: Path) -> None:
    ended = run_on("wheel", "-W", "error", "-c", FIND)
    assert "verdict='fine'" in ended.stdout, ended.stderr
    assert f"beside {installed}/tonari" in ended.stdout


def test_doctor_finds_a_file_of_ours_that_another_distribution_recorded_too(
    run_on: Run, installed: Path, tmp_path: Path
) -> None:
    for path in (installed / "tonari", *(installed / name for name in ("dataio", "importance"))):
        (tmp_path / path.name).symlink_to(path)
    (tmp_path / "shuffle").symlink_to(installed / "shuffle")
    record(tmp_path, "importance", "0.2", "importance/__init__.py")
    ended = run_on("wheel", "-W", "error", "-c", FIND, tonari=tmp_path)
    assert "verdict='look'" in ended.stdout, ended.stderr
    where = f"{tmp_path}/importance/__init__.py"
    assert f"{where}, Tonari's, is a file of another package too" in ended.stdout
    assert "(of importance 0.2)" in ended.stdout
    assert "--force-reinstall" in ended.stdout
