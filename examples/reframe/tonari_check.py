"""ReFrame tests of a site: what its filesystem gives, and that a training reads it once.

    TONARI_DIR=/lustre/project/me reframe -C SITE.py -c examples/reframe/tonari_check.py -r
    reframe ... -S TonariBenchIO.num_tasks=8 -S TonariBenchIO.size=1GB -n TonariBenchIO

References belong to a site: derive a class from these in a file of yours, and set `reference`.
`-S python=PATH` names the Python of an environment that has Tonari.
"""
# ruff: noqa: RUF012 - ReFrame turns these attributes into variables of each test.

import json
import os
from pathlib import Path
from typing import Any

import reframe as rfm  # type: ignore[import-not-found]
from reframe.core.builtins import (  # type: ignore[import-not-found]
    performance_function,
    run_after,
    run_before,
    sanity_function,
    variable,
)
from reframe.utility.sanity import evaluate  # type: ignore[import-not-found]

DOCUMENT = "tonari.json"


class Tonari(rfm.RunOnlyRegressionTest):
    """One command of Tonari that writes a JSON document."""

    valid_systems = ["*"]
    valid_prog_environs = ["*"]
    python = variable(str, value="python")
    command: tuple[str, ...] = ()

    @run_before("run")
    def set_command(self) -> None:
        """Start the command by the Python that was named."""
        self.executable = self.python
        self.executable_opts = ["-m", "tonari", *self.command]
        self.env_vars = {"OMP_NUM_THREADS": os.environ.get("OMP_NUM_THREADS", "1")}

    def document(self) -> Any:
        """Read what the command wrote."""
        return json.loads((Path(self.stagedir) / self.written).read_text())

    @property
    def written(self) -> str:
        """The file, in the stage directory."""
        return DOCUMENT


@rfm.simple_test
class TonariBenchIO(Tonari):
    """The shared directory, cold: whole shards in order, and records in random order."""

    size = variable(str, value="64MiB")
    time_limit = "30m"
    tags = {"tonari", "io"}

    @run_after("setup")
    def name_directory(self) -> None:
        """Measure TONARI_DIR, else a directory beside the test's output."""
        directory = os.environ.get("TONARI_DIR") or str(Path(self.stagedir) / "measured")
        self.prerun_cmds = [f"mkdir -p {directory}"]
        patterns = ("--patterns", "sequential_shard", "random_record")
        self.command = (
            "bench", "io", directory, "--size", self.size, *patterns, "--json-file", DOCUMENT,
        )  # fmt: skip

    @sanity_function
    def measured_to_the_end(self) -> bool:
        """All phases ran; what was to be cold was seen to be, or could not be seen."""
        document = self.document()
        states = {
            repeat["verdict"]["state"]
            for phase in document["phases"]
            if phase["wanted"] == "cold" and phase["tier"] == "shared"
            for repeat in phase["repeats"]
        }
        found = (document["kind"], document["complete"], document["problems"])
        return found == ("tonari bench io", True, []) and "warm" not in states

    @performance_function("MB/s")
    def sequential_shard(self) -> float:
        """Read whole shards."""
        return self._most("sequential_shard")

    @performance_function("MB/s")
    def random_record(self) -> float:
        """Read records in random order."""
        return self._most("random_record")

    def _most(self, pattern: str) -> float:
        """Find the best median over numbers of readers."""
        medians = []
        for phase in self.document()["phases"]:
            kind = (phase["pattern"], phase["tier"], phase["wanted"])
            if kind == (pattern, "shared", "cold"):
                rates = sorted(sum(r["bytes_of_client"]) / r["seconds"] for r in phase["repeats"])
                medians.append(rates[len(rates) // 2])
        return float(max(medians)) / 1e6


@rfm.simple_test
class TonariDemo(Tonari):
    """A small training on two ranks of one node: the shared directory is read once."""

    time_limit = "20m"
    tags = {"tonari", "training"}
    command = (
        "demo", "--json", "--epochs", "3", "--ranks", "2", "--nodes", "2", "--workers", "0",
    )  # fmt: skip

    @property
    def written(self) -> str:
        """What the command printed."""
        return str(evaluate(self.stdout))

    @sanity_function
    def reads_the_source_once(self) -> bool:
        """After the first epoch nothing comes from the shared directory, and the model learns."""
        run = self.document()["runs"]["tonari"]
        return not any(run["source_bytes"][1:]) and run["test_accuracy"][-1] > 0.3

    @performance_function("s")
    def staging(self) -> float:
        """Fill the caches."""
        return float(self.document()["runs"]["tonari"]["staging_s"])

    @performance_function("s")
    def epoch(self) -> float:
        """The shortest epoch from the cache."""
        return float(min(self.document()["runs"]["tonari"]["epoch_s"]))
