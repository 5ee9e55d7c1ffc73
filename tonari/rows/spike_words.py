"""What `tonari rows --spikes` prints."""

import math
from collections.abc import Sequence

import pyarrow as pa

from tonari.trainer.watch.spikes import Spike

UNEXPLAINED = """
At least {} of the spikes hold none of these rows. A loss also rises by the learning rate, and by
chance. A smaller --spikes lists more rows; further epochs, with run.log_steps=1 and the column
history, tell the rows of a step apart."""

SHOWN = 10
"""Of the steps whose loss rose, the highest ones on the terminal."""


def spike_words(spikes: Sequence[Spike], at_start: Sequence[Spike]) -> list[str]:
    """Name the steps whose loss rose most, in lines."""
    lines = [
        f"step{'s' * (len(s.logged.steps) > 1)} "
        f"{'-'.join(dict.fromkeys(str(n) for n in (s.logged.steps[0], s.logged.steps[-1])))}, "
        f"epoch {s.logged.epoch}: loss {s.logged.loss:.6g}, usually {s.usual:.6g}"
        for s in sorted(spikes, key=lambda spike: -spike.excess)[:SHOWN]
    ]
    more = len(spikes) - len(lines)
    lines += [f"... {more:,} more: --json has all"] if more else []
    if at_start:
        last = at_start[-1].logged.steps[-1]
        lines.append(f"not counted: {len(at_start):,} until step {last}, as the loss first fell")
    return [*lines, ""]


def suspect_words(spikes: Sequence[Spike], table: pa.Table) -> str:
    """Sum up what was found."""
    epochs = len({spike.logged.epoch for spike in spikes})
    if not spikes:
        return "no step's loss rose so far; `tonari hardest` names single samples"
    words = f"{len(spikes):,} spikes in {epochs} epoch{'s' * (epochs != 1)}"
    left = len(spikes) - sum(table["spikes"].to_pylist())
    more = UNEXPLAINED.format(left) if left > len(spikes) / 2 else ""
    if len(table) and table["share"].null_count == 0:
        return (
            f"{words}, {len(table):,} rows that were in one each time that they were trained and "
            f"had more than an even share of its rise{more}"
        )
    if epochs == 1:
        return f"{words}, which does not separate rows that share a step: look, or train another"
    return f"{words}, {len(table):,} rows that were in one each time that they were trained{more}"


def spike_document(spikes: Sequence[Spike], table: pa.Table) -> dict[str, object]:
    """Put it into a JSON document."""
    return {
        "spikes": [
            {
                "epoch": s.logged.epoch, "first_step": s.logged.steps[0],
                "last_step": s.logged.steps[-1],
                "usual_loss": s.usual if math.isfinite(s.usual) else None,
                "loss": s.logged.loss if math.isfinite(s.logged.loss) else None,
            }
            for s in spikes
        ],
        "rows": plain_rows(table),
    }  # fmt: skip


def plain_rows(table: pa.Table) -> list[dict[str, object]]:
    """List a table's rows for JSON, which has no infinity: null stands for it."""
    return [
        {name: value if _is_number(value) else None for name, value in row.items()}
        for row in table.to_pylist()
    ]


def _is_number(value: object) -> bool:
    """Check whether JSON has a number for a value: it has none for infinity."""
    return not isinstance(value, float) or math.isfinite(value)
