"""What a run did, sent to Weights & Biases and to MLflow. Both by rank 0 alone."""

import logging
import os
from importlib import import_module
from pathlib import Path
from types import ModuleType
from typing import Any

from typing_extensions import Self

from tonari.trainer.errors import ConfigError
from tonari.trainer.watch.metrics import Line, numbers
from tonari.trainer.watch.record import COMPLETE, Noted, Settings

logger = logging.getLogger(__name__)

PACKAGES = {"wandb": "wandb", "mlflow": "mlflow-skinny"}
"""By the key that asks for it, what is to be installed; the name to import is the key."""
EXPERIMENT = "tonari"
"""MLflow's, unless MLFLOW_EXPERIMENT_NAME names another."""


def import_tracker(key: str, value: str) -> ModuleType:
    """Import what a key of ``[run]`` asks for.

    Raises:
        ConfigError: If it is not installed.
    """
    try:
        return import_module(key)
    except ImportError as error:
        raise ConfigError(
            f"run.{key} is {value!r}, but {key} cannot be imported ({error}); pip install "
            f"{PACKAGES[key]}, or leave run.{key} out: metrics.jsonl has the same figures"
        ) from error


class Tracker:
    """A run as others keep it: the same one where it goes on. Others override three methods.

    Args:
        value: Of the key.
        directory: Of the run: its name is the run's.
        noted: What the run notes: the id that others gave it, too.
        settings: Of the run, as tables.

    Raises:
        ConfigError: If the package is not installed, or the run cannot be begun.
    """

    key = ""

    def __init__(self, value: str, directory: Path, noted: Noted, settings: Settings) -> None:
        self._value, self._directory, self._noted = value, directory.absolute(), noted
        self._settings, self._failed = settings, False
        self._module: Any = import_tracker(self.key, value)

    def __enter__(self) -> Self:
        ids = self._noted.record.ids
        try:
            ids[self.key] = self._begin(ids.get(self.key))
        except Exception as error:  # whatever it is, before any step
            raise ConfigError(
                f"run.{self.key} is {self._value!r}, and no run can be begun there "
                f"({type(error).__name__}: {error}); mend that, or leave run.{self.key} out"
            ) from error
        self._noted.write()
        return self

    def __exit__(self, kind: type[BaseException] | None, *_: object) -> None:
        self._try(lambda: self._end(failed=kind is not None))

    def write(self, line: Line) -> None:
        """Send a line's numbers at its step, as ``kind/name``."""
        self._try(lambda: self._send(numbers(line), int(line["step"] or 0)))

    def _try(self, send: Any) -> None:
        try:
            send()
        except Exception as error:  # whatever it is: no run ends for figures to look at
            if not self._failed:
                logger.warning(
                    "[rank 0] run.%s: cannot send (%s: %s); training goes on: metrics.jsonl has "
                    "all figures", self.key, type(error).__name__, error,
                )  # fmt: skip
            self._failed = True

    def _begin(self, known: str | None) -> str:
        raise NotImplementedError

    def _send(self, figures: dict[str, float], step: int) -> None:
        raise NotImplementedError

    def _end(self, *, failed: bool) -> None:
        raise NotImplementedError


class WandbRun(Tracker):
    """Sends lines to Weights & Biases; its WANDB_... variables hold, WANDB_MODE=offline too."""

    key = "wandb"
    _newest = 0

    def _begin(self, known: str | None) -> str:
        self._run = self._module.init(
            project=self._value, name=self._directory.name, dir=str(self._directory),
            config={**self._settings}, id=known, resume="allow",
        )  # fmt: skip
        return str(self._run.id)

    def _send(self, figures: dict[str, float], step: int) -> None:
        # It takes no step before its newest, as of an evaluation that comes late.
        self._newest = max(step, self._newest)
        late = {"evaluation/step": step} if step < self._newest else {}
        self._run.log(figures | late, step=self._newest)

    def _end(self, *, failed: bool) -> None:
        self._run.finish(exit_code=int(failed))


class MlflowRun(Tracker):
    """Sends lines to MLflow's server, database or directory, in the background."""

    key = "mlflow"

    def _begin(self, known: str | None) -> str:
        mlflow = self._module
        mlflow.set_tracking_uri(self._value)
        mlflow.set_experiment(os.environ.get("MLFLOW_EXPERIMENT_NAME", EXPERIMENT))
        run = mlflow.start_run(run_id=known, run_name=self._directory.name)
        if known is None:  # of one that goes on they cannot be changed
            tables = self._settings.items()
            params = {f"{table}.{key}": value for table, of in tables for key, value in of.items()}
            mlflow.log_params(params)
        return str(run.info.run_id)

    def _send(self, figures: dict[str, float], step: int) -> None:
        self._module.log_metrics(figures, step=step, synchronous=False)

    def _end(self, *, failed: bool) -> None:
        self._module.flush_async_logging()
        is_over = self._noted.how == COMPLETE
        self._module.end_run("FAILED" if failed else "FINISHED" if is_over else "KILLED")
