"""What `tonari plan --from RUN` prints: an epoch planned alone, and with what a run measured."""

from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from tonari.oracle.epoch import PlannedEpoch
    from tonari.oracle.learned import Learned


def learned_words(epoch: "PlannedEpoch", learned: "Learned", run: Path, epochs: int) -> list[str]:
    """Put an epoch's plan beside the same with what a run measured, in lines.

    Args:
        epoch: Planned alone.
        learned: From the run.
        run: As it was given.
        epochs: Of the job.
    """
    from tonari.trainer.watch.parts import WORDS
    from tonari.trainer.watch.plan import PARTS

    scaled, (low_s, high_s) = learned.scale(epoch), learned.range_s(epoch)
    lines = [
        "",
        f"with what {run} measured",
        "",
        f"  {'':24} {'alone':>10} {'with it':>10}  factor",
    ]
    for name, words in PARTS.items():
        alone_s, with_s = getattr(epoch, name), getattr(scaled, name)
        if alone_s:
            lines.append(f"  {words:24} {alone_s:8.2f} s {with_s:8.2f} s  {_factor(learned, name)}")
    lines += [
        f"  {'an epoch':24} {epoch.epoch_s:8.2f} s {scaled.epoch_s:8.2f} s  "
        f"({low_s:.2f} to {high_s:.2f} s)",
        "",
        *(
            f"not in it: {WORDS[name]}, {seconds:.2f} s in an epoch of that run and hardly planned"
            for name, seconds in learned.unplanned_s.items()
        ),
    ]
    run_s = scaled.run_s(epochs)
    return [
        *lines,
        f"{epochs} epochs: {run_s / 3600:.2f} h, {run_s * epoch.num_nodes / 3600:.2f} node hours",
    ]


def learned_document(epoch: "PlannedEpoch", learned: "Learned", run: Path) -> dict[str, object]:
    """Describe the same for JSON."""
    from tonari.trainer.watch.plan import PARTS

    scaled, (low_s, high_s) = learned.scale(epoch), learned.range_s(epoch)
    return {
        "run": str(run), **asdict(learned), "epoch_s": scaled.epoch_s, "low_s": low_s,
        "high_s": high_s, **{name: getattr(scaled, name) for name in PARTS},
    }  # fmt: skip


def _factor(learned: "Learned", name: str) -> str:
    factor = learned.factors.get(name)
    if factor is None:
        return "1, as it was hardly planned there"
    if factor.num_epochs == 1:
        return f"{factor.median:.2f} in one epoch"
    return (
        f"{factor.median:.2f} ({factor.low:.2f} to {factor.high:.2f}) in {factor.num_epochs} epochs"
    )
