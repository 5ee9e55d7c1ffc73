"""What a certificate names of a run: its source, code, seeds, layouts, logs, as they are."""

import contextlib
import hashlib
import os
import subprocess
from pathlib import Path
from typing import Any

import dataio
import importance
import shuffle
from dataio.base.seeding import ORDER_VERSION
from dataio.rowlog.reading import find_log
from dataio.source.base import ShardedSource
from tonari.errors import CommandError
from tonari.rows.run import RunRows
from tonari.trainer.checkpoint.sums import MANIFEST, check_sums

CODE = (dataio, shuffle, importance)
"""Packages that decide which rows are trained when."""


def run_facts(path: Path, run: RunRows, *, log: Path | None, contents: bool) -> dict[str, Any]:
    """Describe a run, all that its order follows from.

    Args:
        path: Its directory, or a checkpoint in it.
        run: The same, opened.
        log: The log's directory, where it is elsewhere.
        contents: Hash the bytes of the source's files too.

    Raises:
        CommandError: If not all that the weights have seen is known, or a file cannot be read.
        ValueError: If the dataset is not at hand, or not the one that was trained on.
        DataioError: If log or dataset cannot be read.
        CheckpointError: If ``path`` is a checkpoint, and damaged.
    """
    if not run.is_whole:
        raise CommandError(
            f"{path}: its log of rows begins in mid-run, so that what was trained before is not "
            "known, expected one from the run's beginning on; certify such a run"
        )
    course = run.answers.course
    pieces = (*course.kept, *course.discarded)
    setups = [*dict.fromkeys(piece.attempt.setup for piece in pieces)]
    return {
        "run": {
            "steps": run.num_steps, "epochs": run.num_epochs,
            "skipped_batches": sum(
                stop - first
                for piece in course.kept
                for first, stop in piece.attempt.skipped
                if first < piece.steps.stop
            ),
        },
        "source": _source_facts(run, contents=contents),
        "setups": [setup.to_json() for setup in setups],
        "attempts": [
            {
                "attempt": piece.attempt.number, "setup": setups.index(piece.attempt.setup),
                "position": piece.attempt.position.to_json(), "kept": piece.kept,
                "steps": [piece.steps.start, piece.steps.stop],
                "skipped": [[*pair] for pair in piece.attempt.skipped],
            }
            for piece in pieces
        ],
        "log": _files(find_log(path, log=log).directory),
        "checkpoint": _checkpoint_facts(path),
    }  # fmt: skip


def code_facts() -> dict[str, Any]:
    """Describe the code that makes or checks a certificate."""
    digest, checkout = hashlib.sha256(), Path(str(dataio.__file__)).parents[1]
    for package in CODE:
        root = Path(str(package.__file__)).parent
        for file in sorted(root.rglob("*.py")):
            digest.update(f"{file.relative_to(root)}\n".encode() + file.read_bytes())
    commit = ""
    if (checkout / ".git").exists():  # else it would be the commit of whoever installed it
        asked = ["git", "-C", os.fspath(checkout), "rev-parse", "HEAD"]
        with contextlib.suppress(OSError):
            done = subprocess.run(asked, capture_output=True, text=True, check=False)
            commit = done.stdout.strip()
    return {
        "version": dataio.__version__, "order_version": ORDER_VERSION, "commit": commit or None,
        "sha256": digest.hexdigest(),
    }  # fmt: skip


def sha256_of(path: Path) -> str:
    """Hash a file.

    Raises:
        CommandError: If it cannot be read.
    """
    try:
        with path.open("rb") as file:
            return hashlib.file_digest(file, "sha256").hexdigest()
    except OSError as error:
        raise CommandError(f"{path}: cannot be read ({error}); bring it back") from error


def _source_facts(run: RunRows, *, contents: bool) -> dict[str, Any]:
    source = run.source()
    shards = source.shards if isinstance(source, ShardedSource) else ()
    files = []
    for shard in shards:
        path = Path(shard.path)
        is_local = path.is_file()
        files.append(
            {
                "path": shard.path, "samples": shard.num_samples,
                "bytes": path.stat().st_size if is_local else None,
                "sha256": sha256_of(path) if contents else None,
            }
        )  # fmt: skip
    return {
        "name": source.name, "made_as": source.made_as, "samples": source.num_samples,
        "fingerprint": source.fingerprint, "files": files,
    }  # fmt: skip


def _files(directory: Path) -> dict[str, Any]:
    return {
        path.name: {"bytes": path.stat().st_size, "sha256": sha256_of(path)}
        for path in sorted(directory.iterdir())
        if path.is_file()
    }


def _checkpoint_facts(path: Path) -> dict[str, Any] | None:
    if not (path / MANIFEST).is_file():
        return None
    check_sums(path)
    return {"name": path.resolve().name, "manifest_sha256": sha256_of(path / MANIFEST)}
