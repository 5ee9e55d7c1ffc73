"""What `tonari plan --json` predicted for a run: read, and checked to be of this run."""

import json
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path

from dataio.base.location import bare_within
from dataio.world import World
from tonari.trainer.config.config import Config
from tonari.trainer.config.settings import as_tables
from tonari.trainer.errors import ConfigError

PARTS = {
    "train_s": "steps",
    "exchange_s": "rest of the exchange",
    "epoch_end_s": "epoch end",
    "refresh_s": "refresh",
    "evaluation_s": "evaluation",
    "checkpoint_s": "checkpoint",
}
"""Of an epoch: names in plans and metrics, and the words for them."""

OF_A_RUN = ("checkpoint_epochs", "checkpoint_async")
"""Of ``[run]``, what an epoch's time depends on."""
MOST_SHOWN = 4


@dataclass(frozen=True, kw_only=True)
class Plan:
    """What was predicted.

    Attributes:
        mean_s: Of each of `PARTS`, the mean over epochs.
        staging_s: Before the first epoch.
        refresh_every: Hidden rows are scored anew at the end of every so many epochs; 0: never.
        checkpoint_every: A checkpoint follows every so many epochs; 0: none does.
        steps: Of an epoch.
        windows_s: Of its steps, waits for rows beyond the quota.
        late_rows_s: For which the first epoch waits for rows that are staged beside it.
        num_nodes: Of the job.
    """

    mean_s: Mapping[str, float]
    staging_s: float
    refresh_every: int
    checkpoint_every: int
    steps: int
    windows_s: float
    late_rows_s: float
    num_nodes: int

    def parts_of(self, epoch: int) -> dict[str, float]:
        """Return what is planned for an epoch, and for the checkpoint of the epoch before."""
        refreshes = self.refresh_every and epoch % self.refresh_every == 0
        saves = self.checkpoint_every and epoch and epoch % self.checkpoint_every == 0
        return {
            **self.mean_s,
            "epoch_end_s": self.mean_s["epoch_end_s"] if epoch else 0.0,
            "exchange_s": self.mean_s["exchange_s"] if epoch else 0.0,
            "refresh_s": self.mean_s["refresh_s"] * self.refresh_every if refreshes else 0.0,
            "checkpoint_s": self.mean_s["checkpoint_s"] * self.checkpoint_every if saves else 0.0,
        }


def plan_settings(config: Config) -> dict[str, object]:
    """List the settings that an epoch's time may depend on, as ``section.key``."""

    def flat(tables: Mapping[str, object], before: str = "") -> Iterator[tuple[str, object]]:
        for name, value in tables.items():
            if isinstance(value, dict) and value:
                yield from flat(value, f"{before}{name}.")
            else:
                yield f"{before}{name}", value

    # Tuples as JSON has them
    tables = json.loads(json.dumps(bare_within(as_tables(config))))
    tables["run"] = {name: tables["run"][name] for name in OF_A_RUN}
    del tables["data"]["cache"]["path"]
    return dict(flat(tables))


def read_plan(path: Path, config: Config, world: World | None) -> Plan:
    """Read a plan of this run.

    Args:
        path: What ``tonari plan --json`` printed.
        config: The run's settings.
        world: Its ranks; None: not known yet.

    Raises:
        ConfigError: If it is no plan, has no epoch, or is of another run.
    """
    cure = "plan this run: tonari plan CONFIG.toml --probe FILE --json > plan.json"
    try:
        document = json.loads(path.read_text())
        epoch, theirs = document["epoch"], dict(document["settings"])
        if epoch is None:
            raise ConfigError(
                f"{path}: a plan of steps alone, without an epoch; probe without --no-data, and "
                + cure
            )
        found = (int(document["world_size"]), int(epoch["num_nodes"]))
        plan = Plan(
            mean_s={name: float(epoch[name]) for name in PARTS},
            staging_s=float(epoch["staging_s"]),
            refresh_every=int(epoch["refresh_every"]),
            checkpoint_every=int(epoch["checkpoint_every"]),
            steps=int(epoch["steps"]),
            windows_s=float(epoch["windows_s"]),
            late_rows_s=float(epoch["late_rows_s"]),
            num_nodes=int(epoch["num_nodes"]),
        )
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise ConfigError(
            f"{path}: not a plan of an epoch ({type(error).__name__}: {error}); {cure}"
        ) from error
    if world and found != (world.world_size, world.num_nodes):
        raise ConfigError(
            f"{path}: a plan for {found[0]} ranks on {found[1]} nodes, and the run has "
            f"{world.world_size} on {world.num_nodes}; {cure}"
        )
    ours = plan_settings(config)
    differ = [name for name in {**theirs, **ours} if theirs.get(name) != ours.get(name)]
    if differ:
        shown = [
            f"{name} is {json.dumps(theirs.get(name))} there and {json.dumps(ours.get(name))} here"
            for name in differ[:MOST_SHOWN]
        ]
        more = f", and {len(differ) - MOST_SHOWN} more" if len(differ) > MOST_SHOWN else ""
        raise ConfigError(
            f"{path}: a plan for other settings: {', '.join(shown)}{more}; give the same settings, "
            f"or {cure}"
        )
    return plan
