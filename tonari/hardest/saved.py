"""Find the scores that a loader saved, and what in them shows which rows are hard."""

from pathlib import Path

from dataio import StateError
from dataio.plan.history import Scores
from dataio.state.snapshot import find_snapshot
from tonari.errors import CommandError
from tonari.hardest.rank import MEASURES, Measure


def find_saved(path: Path) -> Path:
    """Find a loader's saved state: the directory itself, in a checkpoint, or the newest of several.

    Raises:
        CommandError: If there is none.
    """
    # Only here: torch is slow to import
    from tonari.trainer.checkpoint.directory import latest

    checkpoint = latest(path / "checkpoints") or latest(path) or path
    inside = max(checkpoint.glob("*/loader"), default=checkpoint / "loader")
    try:
        return find_snapshot(inside if inside.is_dir() else path)
    except StateError as error:
        raise CommandError(
            f"{path}: found no saved loader state, expected what loader.save wrote (state.json), "
            "a checkpoint of `tonari train` (step-NUMBER), its run.directory, or a directory of "
            "saves (NUMBER/loader); give one of these"
        ) from error


def choose_measure(scores: Scores, given: Measure | None, saved: Path) -> Measure:
    """Choose what to rank by, of what was saved.

    Raises:
        CommandError: If it was not saved, or nothing was.
    """
    kept = [measure for measure in MEASURES if measure in (scores.dtype.names or ())]
    if kept and given in (None, *kept):
        return given or kept[0]
    expected = given or kept[0] if kept else MEASURES[0]
    raise CommandError(
        f"{saved}: saved with {'the scores ' + ', '.join(kept) if kept else 'no scores'}, expected "
        f"{expected}; train with "
        f'columns = ["{expected}"] under [importance] in the TOML file of a run, or in a loop of '
        f'your own with importance.Full(columns=("{expected}",)), which leaves no row out and '
        "remembers this of each, and call loader.report there with every batch"
        + (f"; or give --by {kept[0]}" if kept else "")
    )
