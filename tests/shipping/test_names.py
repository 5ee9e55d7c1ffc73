"""`dataio` and `tonari.dataio` are the same modules; another's `dataio` is never taken for ours."""

from pathlib import Path

import pytest

from tests.cases import diagonal
from tests.shipping.conftest import ROOT, Layout, Run

pytestmark = pytest.mark.thorough

LAYOUTS = ["checkout", "wheel"]

SAME = """
import importlib.resources, importlib.util, multiprocessing, pickle, sys

def name_in_child(error, path):
    import tonari.dataio.base.errors as by_long_name
    import dataio.base.errors as by_short_name
    path.put([type(error) is by_long_name.QuotaError, type(error) is by_short_name.QuotaError])

if __name__ == "__main__":
    if sys.argv[1] == "short":
        import dataio.base.errors, shuffle, importance
        import tonari.dataio.base.errors
    else:
        import tonari.dataio.base.errors
        import dataio.base.errors, shuffle, importance
    from tonari import dataio as again, shuffle as shuffle_again
    from tonari.dataio.plan import order
    from dataio.plan import order as order_again
    assert dataio is tonari.dataio is again and shuffle is shuffle_again
    assert order is order_again
    assert dataio.base.errors is tonari.dataio.base.errors
    assert isinstance(dataio.QuotaError("x"), tonari.dataio.base.errors.QuotaError)
    assert importlib.resources.files("dataio") == importlib.resources.files("tonari.dataio")
    for module in (dataio, dataio.base.errors):
        assert module.__spec__.name == module.__name__, module.__spec__
        assert importlib.util.find_spec(module.__name__) is module.__spec__
    assert importlib.util.find_spec("tonari.dataio.absent") is None
    assert importlib.util.find_spec("dataio.absent") is None
    import tonari.benchmarks.errors, tonari.cli
    assert tonari.cli._is_known(dataio.QuotaError("x"))
    assert tonari.cli._is_known(tonari.benchmarks.errors.BenchError("x"))
    assert not tonari.cli._is_known(ValueError("x"))
    for part in ("trainer", "oracle"):
        assert importlib.util.find_spec(f"tonari.{part}").origin.endswith(f"{part}/__init__.py")
    from tonari.dataio.base.examples import EXAMPLES
    from tonari.names import EXAMPLES as named
    assert EXAMPLES == named and (EXAMPLES / "clusters/gigabit.toml").exists()
    spawn = multiprocessing.get_context("spawn")
    answers = spawn.Queue()
    child = spawn.Process(target=name_in_child, args=(dataio.QuotaError("x"), answers))
    child.start()
    assert answers.get(timeout=60) == [True, True]
    child.join()
    print("the same")
"""


@diagonal(layout=LAYOUTS, first=["short", "long"])
def test_both_names_lead_to_one_module(
    run_on: Run, tmp_path: Path, layout: Layout, first: str
) -> None:
    program = tmp_path / "program.py"
    program.write_text(SAME)
    ended = run_on(layout, "-W", "error", str(program), first)
    assert (ended.stdout, ended.stderr) == ("the same\n", "")


@diagonal(layout=LAYOUTS, module=["dataio.base.examples", "tonari.dataio.base.examples"])
def test_a_module_runs_as_a_program_by_both_names(run_on: Run, layout: Layout, module: str) -> None:
    ended = run_on(layout, "-W", "error", "-m", module)
    assert (ended.returncode, ended.stderr) == (0, "")


@pytest.mark.parametrize("layout", LAYOUTS)
def test_the_command_line_runs_and_names_its_own_errors(run_on: Run, layout: Layout) -> None:
    ended = run_on(layout, "-W", "error", "-m", "tonari", "cache", "verify", "/absent")
    assert (ended.returncode, ended.stderr.count("\n")) == (1, 1)
    assert ended.stderr.startswith("tonari cache: /absent: no such directory")


def test_a_message_names_our_classes_as_they_can_be_imported(run_on: Run) -> None:
    program = "import dataio; dataio.Loader('/absent', fields={}, batch_size=1, cache=3)"
    ended = run_on("wheel", "-W", "error", "-c", program)
    assert "expected a str, a path or a dataio.NodeCache" in ended.stderr


@pytest.mark.parametrize("layout", LAYOUTS)
def test_a_start_reads_no_record_of_packages(run_on: Run, layout: Layout) -> None:
    ended = run_on(
        layout, "-c", "import tonari, sys; print('importlib.metadata' in sys.modules, end='')"
    )
    assert ended.stdout == "False"


def write(directory: Path, name: str) -> Path:
    """Make a file or package of another's, and give the path that Python shows."""
    path = directory / (name if name.endswith(".py") else f"{name}/__init__.py")
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text("mine = True\n")
    return path


@pytest.mark.parametrize("name", ["shuffle.py", "dataio"])
def test_a_short_name_that_is_anothers_is_reported_once_and_left_to_it(
    run_on: Run, installed: Path, tmp_path: Path, name: str
) -> None:
    theirs = write(tmp_path, name)
    short = name.removesuffix(".py")
    program = f"import tonari.benchmarks.errors, {short}; from tonari import {short} as ours"
    ended = run_on(
        "wheel", "-c", f"{program}; print({short}.mine, ours.__name__)", before=[tmp_path]
    )
    assert ended.stdout == f"True tonari.{short}\n"
    assert ended.stderr.count("finds") == 1
    assert (
        f"`import {short}` finds {theirs}, expected {installed}/{short}.py; write " in ended.stderr
    )
    assert f"`from tonari import {short}`" in ended.stderr


def test_a_module_below_a_short_name_that_is_anothers_is_not_ours(
    run_on: Run, tmp_path: Path
) -> None:
    write(tmp_path, "dataio")
    program = "import tonari, dataio.base"
    ended = run_on("wheel", "-W", "ignore", "-c", program, before=[tmp_path])
    assert "ModuleNotFoundError: No module named 'dataio.base'" in ended.stderr


def test_a_file_that_was_written_over_ours_is_found(
    run_on: Run, installed: Path, tmp_path: Path
) -> None:
    (tmp_path / "tonari").symlink_to(installed / "tonari")
    theirs = write(tmp_path, "importance.py")
    ended = run_on("wheel", "-c", "import tonari", tonari=tmp_path)
    assert f"`import importance` finds {theirs}, which another package wrote over" in ended.stderr


@pytest.mark.parametrize("name", ["trainer", "benchmarks", "oracle.py"])
def test_the_other_names_are_free_in_a_wheel(
    run_on: Run, installed: Path, tmp_path: Path, name: str
) -> None:
    write(tmp_path, name)
    short = name.removesuffix(".py")
    program = (
        f"import {short}, tonari.benchmarks.errors; from importlib.util import find_spec; "
        f"print({short}.mine, find_spec('tonari.{short}').origin)"
    )
    ended = run_on("wheel", "-W", "error", "-c", program, before=[tmp_path])
    assert ended.stdout == f"True {installed}/tonari/{short}/__init__.py\n", ended.stderr


def test_a_checkout_that_would_import_anothers_code_does_not_start(
    run_on: Run, tmp_path: Path
) -> None:
    theirs = write(tmp_path, "trainer.py")
    ended = run_on("checkout", "-m", "tonari", "--version", before=[tmp_path])
    assert ended.returncode == 1
    last = ended.stderr.splitlines()[-1]
    assert f"`import trainer` finds {theirs}, expected {ROOT}/trainer/__init__.py; " in last
    assert "rename that file" in last


def test_doctor_names_the_distribution_that_owns_the_name(
    run_on: Run, installed: Path, tmp_path: Path
) -> None:
    write(tmp_path, "dataio")
    record = tmp_path / "dataio_of_others-3.1.dist-info"
    record.mkdir()
    (record / "METADATA").write_text(
        "Metadata-Version: 2.1\nName: dataio-of-others\nVersion: 3.1\n"
    )
    (record / "top_level.txt").write_text("dataio\n")
    program = "from tonari.names_check import check_names; print(check_names())"
    ended = run_on("wheel", "-W", "ignore", "-c", program, before=[tmp_path])
    assert "verdict='look'" in ended.stdout
    assert "(of dataio-of-others 3.1)" in ended.stdout
    ended = run_on("wheel", "-W", "error", "-c", program)
    assert "verdict='fine'" in ended.stdout, ended.stderr
    assert f"installed below {installed}/tonari" in ended.stdout


def test_doctor_finds_a_file_that_ours_was_written_over(
    run_on: Run, installed: Path, tmp_path: Path
) -> None:
    # As `importance` 0.0.1 of the package index, which is this one file, installed before ours.
    for path in (installed / "tonari", installed / "importance.py"):
        (tmp_path / path.name).symlink_to(path)
    record = tmp_path / "importance-0.0.1.dist-info"
    record.mkdir()
    (record / "METADATA").write_text("Metadata-Version: 2.1\nName: importance\nVersion: 0.0.1\n")
    (record / "RECORD").write_text("importance.py,,\nimportance-0.0.1.dist-info/RECORD,,\n")
    program = "from tonari.names_check import check_names; print(check_names())"
    ended = run_on("wheel", "-W", "error", "-c", program, tonari=tmp_path)
    assert "verdict='look'" in ended.stdout, ended.stderr
    assert f"{tmp_path}/importance.py, Tonari's, is a file of another package too" in ended.stdout
    assert "(of importance 0.0.1)" in ended.stdout
    assert "--force-reinstall" in ended.stdout
