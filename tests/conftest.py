"""What all tests share: safe defaults, hypothesis profiles, and jobs of several ranks."""

import gc
import math
import os
import signal
import sys
from collections import defaultdict
from collections.abc import Iterator, Mapping
from pathlib import Path

# Before any import of NumPy or torch, which read it once.
os.environ.setdefault("OMP_NUM_THREADS", "1")
# Unbuffered, a line leaves a process in pieces, and those of several ranks mix.
os.environ.pop("PYTHONUNBUFFERED", None)

import pytest
from hypothesis import HealthCheck, settings

from tests import durations, multirank
from tests.forked.interpreter import OWN
from tests.forked.python import ForkedPython
from tests.multirank import (
    Ended,
    Launcher,
    RunRanks,
    job_environ,
    launch_command,
    read_reports,
    run_job,
)

# Imports of torch and what hypothesis draws make many objects and little garbage: looking for it
# every 700 objects takes a seventh of the processor's time. Ranks do the same: tests/start.
gc.set_threshold(10_000, 10, 10)

LAUNCHER_PREFIXES = (
    "PMI_",
    "PMIX_",
    "OMPI_COMM_WORLD_",
    "TORCHELASTIC_",
    "TONARI_",
    "PALS_",
    "JSM_",
    "FLUX_TASK_",
    "MV2_",
)

# As the session began: what a test sets for itself is read by its own processes alone.
ENVIRON = {
    name: value for name, value in job_environ().items() if not name.startswith(LAUNCHER_PREFIXES)
}

SLOW_SETUP = [HealthCheck.too_slow, HealthCheck.function_scoped_fixture]
settings.register_profile(
    "ci", derandomize=True, max_examples=40, deadline=None, suppress_health_check=SLOW_SETUP
)
settings.register_profile(
    "long", max_examples=2000, deadline=None, suppress_health_check=SLOW_SETUP
)
settings.load_profile(os.environ.get("HYPOTHESIS_PROFILE", "ci"))


@pytest.fixture(scope="session", autouse=True)
def _plain_environment(tmp_path_factory: pytest.TempPathFactory) -> Iterator[None]:
    """Keep the user's own settings, caches and launchers out of the tests, and of all fixtures."""
    with pytest.MonkeyPatch.context() as patch:
        for name in list(os.environ):
            if name.startswith(LAUNCHER_PREFIXES):
                patch.delenv(name)
        patch.setenv("TONARI_CACHE", str(tmp_path_factory.getbasetemp() / "cache"))
        yield


@pytest.fixture(autouse=True)
def _no_new_variables() -> Iterator[None]:
    """Take away what called code sets for its process: with it no later rank would be forked."""
    before = {*os.environ, *OWN}
    yield
    for name in {*os.environ} - before:
        del os.environ[name]


@pytest.fixture
def heard_interrupts() -> Iterator[None]:
    """Let Ctrl-C reach this process and what it starts, though a shell's background ignores it."""
    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    yield
    signal.signal(signal.SIGINT, before)


@pytest.fixture(params=["tensorstore", "zarr-python"])
def zarr_reader(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    """Have Zarr read by each of its readers."""
    if request.param == "tensorstore":
        pytest.importorskip("tensorstore", reason="is an extra: tonari[tensorstore]")
    else:
        monkeypatch.setitem(sys.modules, "tensorstore", None)


def pytest_addoption(parser: pytest.Parser) -> None:
    """Let a person have ranks forked, and have durations stored and gone by."""
    parser.addoption(
        "--forked", action="store_true", help="fork ranks from a process that has imported all"
    )
    parser.addoption(
        "--store-durations", action="store_true", help=f"write to {durations.PATH.name} how "
        "long tests take, for their order; with `make test-ci ARGS=--store-durations`",
    )  # fmt: skip
    parser.addoption(
        "--quicker-than", type=float, default=math.inf, metavar="SECONDS",
        help=f"leave out what took longer by {durations.PATH.name}, but for what is marked smoke",
    )  # fmt: skip


def pytest_configure(config: pytest.Config) -> None:
    """Measure, in the process that the workers report to."""
    if config.getoption("store_durations") and not hasattr(config, "workerinput"):
        config.pluginmanager.register(StoreDurations())


class StoreDurations:
    """Adds up how long each test takes, with what it sets up, and writes it at the end."""

    def __init__(self) -> None:
        self._durations_s: dict[str, float] = defaultdict(float)

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        """Take one phase of a test."""
        self._durations_s[report.nodeid] += report.duration

    def pytest_sessionfinish(self) -> None:
        """Write what was measured."""
        durations.store(self._durations_s)


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Begin with the files that take longest; leave out what takes long, if that is asked for."""
    stored, limit_s = durations.read(), config.getoption("quicker_than")
    left_out = [
        item for item in items
        if stored.get(item.nodeid, 0.0) >= limit_s and not item.get_closest_marker("smoke")
    ]  # fmt: skip
    if left_out:
        config.hook.pytest_deselected(items=left_out)
    named = [(item.nodeid, item) for item in items if item not in set(left_out)]
    items[:] = durations.longest_first(named, stored)


def pytest_runtest_setup(item: pytest.Item) -> None:
    """Skip tests marked ``gpu`` where there is none."""
    if item.get_closest_marker("gpu"):
        import torch

        if not torch.cuda.is_available():
            pytest.skip("no CUDA device")


@pytest.fixture(scope="session")
def forked_python() -> Iterator[ForkedPython]:
    """Start what processes are forked from, for all tests of this worker."""
    with ForkedPython(ENVIRON) as forked:
        yield forked


@pytest.fixture(scope="session", autouse=True)
def _forked(request: pytest.FixtureRequest) -> Iterator[None]:
    """Fork what tests start, if that is asked for; what it is forked from starts with the first."""
    if request.config.getoption("forked"):
        multirank.FORKED.append(lambda: request.getfixturevalue("forked_python").command)
    yield
    multirank.FORKED.clear()


@pytest.fixture
def forks(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    """Where ranks are forked, fork what called code starts by ``sys.executable`` too."""
    monkeypatch.setenv("PYTHONPATH", job_environ()["PYTHONPATH"])
    if request.config.getoption("forked"):
        (executable,) = request.getfixturevalue("forked_python").command
        monkeypatch.setattr(sys, "executable", executable)


@pytest.fixture
def run_ranks(tmp_path_factory: pytest.TempPathFactory) -> RunRanks:
    """Start several processes under mpiexec or torchrun; see ``RunRanks``."""

    def run(
        program: str, n: int, *args: str, launcher: Launcher = "mpiexec",
        env: Mapping[str, str] | None = None, timeout_s: float = 120.0, check: bool = True,
        fresh: bool = False,
    ) -> Ended:  # fmt: skip
        # Not before: it imports NumPy, and with this file each module's warnings begin anew.
        from tonari.errors import CommandError

        directory = tmp_path_factory.mktemp(Path(program).name)
        try:
            begin = launch_command(launcher, n, fresh=fresh)
        except CommandError as absent:
            pytest.skip(str(absent))
        script = Path(__file__).parent / "ranks" / f"{program}.py"
        try:
            status, output = run_job(
                [*begin, str(script), str(directory), *args], env=env, timeout_s=timeout_s
            )
        except TimeoutError as error:
            pytest.fail(str(error))
        ended = Ended(status, output, read_reports(directory, n), directory)
        if check:
            assert status == 0, f"{program} on {n} ranks ended with {status}:\n{output}"
            assert len(ended.reports) == n, f"{program}: {len(ended.reports)} reports\n{output}"
        return ended

    return run
