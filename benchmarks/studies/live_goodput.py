"""What share of the node hours trains, by nodes, their failures, and by what is done then?

Rehearsals in virtual time (`tonari.rehearse.model`) of ten days of steps. The job starts again from
a checkpoint, of the intervals between these that were tried the best; or it goes on live, with one
copy of each row or two, and saves every six hours. Seconds are those that a lab measured, and the
defaults of `tonari rehearse`. ``vote`` is two copies with a step that is longer by the factor
``--vote``, as where gradients cross nodes through the memory of the host in each step, and a vote
comes after each.

    python -m benchmarks.studies.live_goodput [--live 10] [--vote 2.3] [--plot live.png]
"""

import argparse
import json
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING

from tonari.rehearse.command import ASSUMED_S
from tonari.rehearse.model import DAY_S, LongRun, simulate
from tonari.rehearse.report import FACTORS
from tonari.report.pictures import render

if TYPE_CHECKING:
    from matplotlib.figure import Figure

NODES = (4, 16, 64, 256, 1024, 4096, 16384)
MTBF_H = (2000.0, 50000.0)
SAVES_S, RUNS = 6 * 3600.0, 20
WAYS = {
    "restart": "start again", "live_1_copy": "live, one copy", "live_2_copies": "live, two copies",
    "vote": "gradients by the host",
}  # fmt: skip


def goodputs(nodes: int, mtbf_h: float, *, live_s: float, vote: float) -> dict[str, float]:
    """Compute the share of the node hours that trained steps which counted, of each way."""
    run = LongRun(
        work_s={"steps": 10 * DAY_S}, days=30, nodes=nodes, mtbf_s=mtbf_h * 3600,
        interval_s=SAVES_S, checkpoint_s=60.0, reload_s=60.0, start_s=ASSUMED_S["start"],
        staging_s=1200.0, keeps_caches=True, queue_s=ASSUMED_S["queue"],
        ending_s=ASSUMED_S["ending"], limit_s=float("inf"), signal_s=ASSUMED_S["signal"],
        full_fraction=0.0, live_s=live_s,
    )  # fmt: skip
    tried = [replace(run, interval_s=run.young_daly_s * factor) for factor in FACTORS]
    found = [simulate(each, runs=RUNS, seed=0).goodput(each) for each in tried]
    one, two = (
        simulate(replace(run, copies=copies), runs=RUNS, seed=0).goodput(run) for copies in (1, 2)
    )
    return dict(zip(WAYS, (max(found), one, two, two / vote), strict=True))


def draw(lines: list[dict[str, float]]) -> "Callable[[Figure], None]":
    """Draw them over the nodes."""

    def onto(figure: "Figure") -> None:
        for axes, mtbf_h in zip(figure.subplots(1, 2, sharey=True), MTBF_H, strict=True):
            own = [line for line in lines if line["mtbf_h"] == mtbf_h]
            for way, name in WAYS.items():
                shares = [line[way] for line in own]
                # Two lines lie on one another.
                style = "o--" if way == "live_2_copies" else "o-"
                axes.plot([line["nodes"] for line in own], shares, style, label=name)
            axes.set_xscale("log", base=2)
            axes.set_xticks(NODES, [f"{nodes:,}" for nodes in NODES], fontsize=8)
            axes.set(title=f"a node fails once in {mtbf_h:,.0f} h", xlabel="nodes", ylim=(0, 1.02))
        figure.axes[0].set_ylabel("goodput")
        figure.axes[0].legend()

    return onto


def main() -> None:
    """Print a line of JSON for each number of nodes and each rate of failures."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--live", type=float, default=ASSUMED_S["live"], metavar="S")
    parser.add_argument("--vote", type=float, default=2.3)
    parser.add_argument("--plot", type=Path)
    args = parser.parse_args()
    lines = []
    for mtbf_h in MTBF_H:
        for nodes in NODES:
            found = goodputs(nodes, mtbf_h, live_s=args.live, vote=args.vote)
            lines.append({"nodes": nodes, "mtbf_h": mtbf_h} | found)
            print(json.dumps(lines[-1]), flush=True)
    if args.plot is not None:
        args.plot.write_bytes(render(draw(lines), inches=(8, 3.5), kind="png"))


if __name__ == "__main__":
    main()
