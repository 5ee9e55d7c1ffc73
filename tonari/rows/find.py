"""Find a run's log of rows, from its directory, a checkpoint, or what a loader saved."""

import ast
import os
import re
from pathlib import Path

from dataio import StateError
from dataio.base.seeding import ORDER_VERSION
from dataio.plan.policies import Local, Shuffle
from dataio.rowlog.attempts import Course, find_course
from dataio.rowlog.files import LOG
from dataio.rowlog.reading import ROWS, RowLogRead
from dataio.state.snapshot import STATE, find_snapshot, load_state
from shuffle import Global, Partial
from tonari.trainer.checkpoint.directory import whole_checkpoints

SHUFFLES: dict[str, type[Partial] | type[Global] | type[Local]] = {
    "Partial": Partial, "Global": Global, "Local": Local,
}  # fmt: skip


def find_run_course(run: str | os.PathLike[str], logged: RowLogRead) -> Course:
    """Follow the run up to what was saved, where ``run`` is a save; else to its last step.

    Raises:
        StateError: If the save is of another log.
    """
    place = saved_place(Path(run))
    if place is None:
        _check_reached(Path(run), logged)
        return find_course(logged.attempts)
    name, attempt, step = place
    if name != logged.name:
        raise StateError(
            f"{run}: was saved by a loader with the log {name or 'of none'}, found "
            f"{logged.directory} with {logged.name or 'none'}; give the log of that run as log="
        )
    return find_course(logged.attempts, tip=(attempt, step))


def _check_reached(run: Path, logged: RowLogRead) -> None:
    """Refuse a log that ends before the run's newest checkpoint, as an older copy of it does.

    Raises:
        StateError: If so.
    """
    for checkpoint in reversed(whole_checkpoints(run / "checkpoints")):
        try:
            name, number, step = saved_place(checkpoint) or ("", 0, 0)
        except StateError:
            continue  # damaged, or of a loader without a log
        reached = {attempt.number: attempt.stop for attempt in logged.attempts}
        if name == logged.name and reached.get(number, -1) < step:
            raise StateError(
                f"{logged.directory}: the log of rows ends at step {reached.get(number, 0)} of "
                f"attempt {number}, but {checkpoint} was saved at step {step} of it: the log, or "
                "its file of steps, is an older copy; bring back the newest"
            )
        return


def saved_place(path: Path) -> tuple[str, int, int] | None:
    """Read where a save stands in its log; None: it is no save, but a run or a log."""
    if (path / LOG).exists() or (path / ROWS / LOG).exists():
        return None
    inside = path / "loader"
    found = find_snapshot(inside if inside.is_dir() else path)
    state = load_state(found).state
    rows = state.get("rows")
    if not isinstance(rows, list) or len(rows) != 3:
        raise StateError(
            f"{found / STATE}: was saved without a log of rows, expected one of a loader with "
            "reports=Reports(rows=DIRECTORY); give the run's directory, if its log begins later"
        )
    return str(rows[0]), int(rows[1]), int(rows[2])


def find_shuffle(course: Course, given: Shuffle | None) -> Shuffle:
    """Make the run's shuffle policy again from how it prints, or take the one that is given.

    Raises:
        ValueError: If it is none of Tonari's, or another than the run's.
        StateError: If this version orders rows otherwise than the one that wrote the log.
    """
    if not course.kept:
        raise StateError("the log of rows has no epoch yet; ask when the run has begun one")
    setup = course.kept[-1].attempt.setup
    if setup.order_version != ORDER_VERSION:
        raise StateError(
            f"the run has order version {setup.order_version}, this version of Tonari has "
            f"{ORDER_VERSION} and orders rows otherwise; ask with the version that trained it"
        )
    made = given if given is not None else _parsed(setup.shuffle)
    if made is None or repr(made) != setup.shuffle:
        raise ValueError(
            f"shuffle: the run has {setup.shuffle}, found {made}; give open(..., shuffle=...) the "
            "policy that the loader was given"
        )
    return made


def _parsed(text: str) -> Shuffle | None:
    found = re.fullmatch(r"(\w+)\((.*)\)", text)
    if found is None or found[1] not in SHUFFLES:
        return None
    call = ast.parse(text, mode="eval").body
    assert isinstance(call, ast.Call)
    given = {str(word.arg): ast.literal_eval(word.value) for word in call.keywords}
    return SHUFFLES[found[1]](**given)
