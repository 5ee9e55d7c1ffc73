"""Ranks that train a run by `tonari.trainer`, some of which are lost.

python -m tests.ranks.trainer.live OUT NUM_RANKS FAULTS OPTIONS

FAULTS as of `tests.dataio.job.live_ranks`: for a rank what happens to it, where, and the how
manieth time it is there. OPTIONS: ``config``, the settings' file, ``overrides`` of it, ``units``
as there, and ``by_size``: overrides of a restart on so many ranks. Then OUT/again/run is the run
that was restarted where ranks were lost or came.
"""

import json
import os
import re
import sys
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

import tonari.trainer.mesh.clip as clip
import tonari.trainer.run.build
import tonari.trainer.run.live
import tonari.trainer.run.loop as loop
from dataio.job.meeting import Meeting
from tests.dataio.job.live_ranks import SIGNALS, call, start_ranks
from tonari.trainer.checkpoint.checkpoint import Checkpoints
from tonari.trainer.config.config import load_config
from tonari.trainer.mesh.pipeline import Pipeline
from tonari.trainer.run.ema import WeightAverage
from tonari.trainer.run.live import Live
from tonari.trainer.run.next_door import PieceCopies

PLACES: dict[str, tuple[Any, str]] = {
    "begin": (Live, "begin"), "mesh": (tonari.trainer.run.build, "make_mesh"),
    "keep": (Live, "keep"), "forward": (Pipeline, "train"),
    "norm": (clip, "_norm_on_all"), "step": (torch.optim.AdamW, "step"), "count": (Live, "count"),
    "follow": (loop.Run, "_follow"), "epoch end": (loop.Run, "_end_epoch"),
    "evaluate": (loop, "evaluate"), "average": (WeightAverage, "average_buffers"),
    "save": (Checkpoints, "save"), "complete": (Checkpoints, "_complete"),
    "meet": (Meeting, "agree"), "share": (PieceCopies, "share_gradients"),
    "deal": (PieceCopies, "begin"),
}  # fmt: skip
"""Where a rank may be lost: as it calls these."""


def plant(kind: str, place: str, time: int, happen: Callable[[], None]) -> None:
    """Have something happen to this process as it comes somewhere for the how manieth time."""
    owner, name = PLACES[place]
    go_on: Callable[..., Any] = getattr(owner, name)
    been: Counter[str] = Counter()

    def called(*args: Any, **kwargs: Any) -> Any:
        been[name] += 1
        if been[name] == time and kind != "lack":
            happen()
        result = go_on(*args, **kwargs)
        if been[name] == time and kind == "lack":  # as where a rank alone does not get what it sums
            raise RuntimeError("Connection closed by peer")
        return result

    setattr(owner, name, called)


def run_rank(out: Path, number: int, fault: list[Any], options: dict[str, Any]) -> None:
    """Be one rank."""
    torch.set_num_threads(1)
    tonari.trainer.run.live.PATIENCE_S = 4.0
    os.environ["TORCHELASTIC_RUN_ID"] = "a"
    config = load_config(Path(options["config"]), options["overrides"])
    if fault:

        def happen() -> None:
            if fault[0] == "call":
                call(out, number, Path(config.run.directory) / "live", meeting=1)
            else:
                os.kill(os.getpid(), SIGNALS[fault[0]])

        kind, place, time = fault
        plant(kind, place, time, happen)
    summary = loop.train(config, quiet=True)
    found = [summary.progress.steps, summary.num_replicas, summary.rank, summary.world_size]
    (out / f"end-{number}.json").write_text(json.dumps(found))


def run_again(out: Path, num_ranks: int, options: dict[str, Any]) -> None:
    """Train what a run under live did, by restarts: on all ranks, then on those that went on."""
    said = "".join(path.read_text() for path in out.glob("said-*"))
    calls = sorted((int(step), ranks) for ranks, step in re.findall(WENT_ON, said))
    # A rank that lacked the last step says one less, a newcomer 0: the largest counts.
    ends = {ranks: step for step, ranks in calls if ranks != str([*range(num_ranks)])}
    # Of those that were left at one step, one after the other, the fewest took the next.
    went_on = sorted((step, -len(json.loads(ranks))) for ranks, step in ends.items())
    sizes, steps = [num_ranks, *(-size for _, size in went_on)], [step for step, _ in went_on]
    (out / "again").mkdir()
    for size, before, until in zip(sizes, [0, *steps], [*steps, None], strict=True):
        if until == before:
            continue
        own = [f"run.directory={out}/again/run", f"data.cache={out}/again/cache", "run.live=false"]
        given = [*options["overrides"], *own, *options["by_size"].get(str(size), [])]
        given += [f"run.max_steps={until}"] if until else []
        start_ranks(out / "again", size, {}, {**options, "overrides": given}, run_rank)
    (out / "stages.json").write_text(json.dumps([sizes, steps]))


WENT_ON = r"live: ranks (\[.*?\]) go on from step (\d+)"

if __name__ == "__main__":
    directory, ranks, given = Path(sys.argv[1]), int(sys.argv[2]), json.loads(sys.argv[4])
    start_ranks(directory, ranks, json.loads(sys.argv[3]), given, run_rank)
    run_again(directory, ranks, given)
