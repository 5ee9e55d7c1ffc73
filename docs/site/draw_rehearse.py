"""Draw docs/assets/rehearse.svg, of docs/rehearse.md: `python docs/site/draw_rehearse.py`.

It has the charts of the page that a rehearsal writes, and follows the reader's light or dark
colours.
"""

import math
from pathlib import Path

from draw_run import draw  # type: ignore[import-not-found]

from tonari.rehearse.model import LongRun
from tonari.rehearse.report import charts, rehearse

HOUR_S = 3600.0
RUN = LongRun(
    work_s={"steps": 90 * 6 * HOUR_S}, days=30, nodes=64, mtbf_s=1000 * HOUR_S,
    interval_s=6 * HOUR_S, checkpoint_s=60, reload_s=60, start_s=120, staging_s=1200,
    keeps_caches=True, queue_s=600, ending_s=300, limit_s=math.inf, signal_s=300, full_fraction=0,
    live_s=10,
)  # fmt: skip

if __name__ == "__main__":
    title = "A long run whose nodes fail: training that is done, and rehearsals that have ended"
    made = rehearse(RUN, [RUN.interval_s], [], runs=200, seed=0)
    (Path(__file__).parents[1] / "assets/rehearse.svg").write_text(draw(charts(made), title))
