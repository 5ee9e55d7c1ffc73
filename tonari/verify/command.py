"""`tonari verify`: train some steps on a mesh, and beside it in plain torch, and compare."""

import argparse
import json
import os
import re
import sys
import tempfile
import time
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING

from tonari.errors import CommandError
from tonari.names import EXAMPLES

if TYPE_CHECKING:
    from tonari.trainer.config.config import Config
    from tonari.trainer.run.verify.checking import Verdict

REASON = re.compile(r"\[rank \d+\] (?:rank \d+.*? failed: |uncaught )(.*)")
ABORTED = re.compile(r"what\(\): +(.*)")
REFUSED = ("ConfigError", "DataioError", "CheckpointError")
LAST_WORDS = 600


def main(argv: list[str]) -> int:
    """Run the command.

    Args:
        argv: Its arguments, without the command's name.

    Returns:
        0 if every mesh trains what one process trains, else 1.

    Raises:
        ConfigError: If the settings are wrong.
        CommandError: If a mesh has no such name.
    """
    parser = _parser()
    given = parser.parse_intermixed_args(argv)
    if given.timeout <= 0:
        parser.error(f"--timeout is {given.timeout}, expected seconds above 0")
    if given.steps < 4:
        parser.error(f"--steps is {given.steps}, expected at least 4: two epochs of two steps")
    from dataio.world.launchers import mpi_claim, torchrun_claim

    if mpi_claim(os.environ) or torchrun_claim(os.environ):
        raise CommandError(
            "it was started by a launcher, as one of several ranks; start it alone: it starts the "
            "ranks of each mesh itself, on this machine"
        )
    # Only now: `--help` and wrong arguments should not wait for torch.
    from tonari.trainer.config.config import load_config
    from tonari.verify.meshes import overrides_of, own_overrides, split_arguments
    from tonari.verify.report import document, table

    overrides, names = split_arguments(given.arguments)
    dtype = () if any(each.startswith("mesh.dtype=") for each in overrides) else DOUBLE
    fixed = (*overrides, *dtype, "run.device=cpu")
    if names:
        meshes = [(*fixed, *overrides_of(name)) for name in names]
    else:
        own = load_config(given.config, fixed)
        meshes = [(*fixed, *own_overrides(own.mesh))]
    configs = [load_config(given.config, each) for each in meshes]
    verdicts = []
    for config, each in zip(configs, meshes, strict=True):
        verdicts.append(
            verify_mesh(given.config, config, each, steps=given.steps, timeout_s=given.timeout)
        )
        if len(configs) > 1 and sys.stderr.isatty():
            print(verdicts[-1].line, file=sys.stderr, flush=True)
    print(json.dumps(document(verdicts), indent=1) if given.json else table(verdicts))
    return 0 if all(verdict.equal for verdict in verdicts) else 1


DOUBLE = ("mesh.dtype=float64",)


def verify_mesh(
    path: Path, config: "Config", overrides: Sequence[str], *, steps: int, timeout_s: float
) -> "Verdict":
    """Start the ranks of a mesh on this machine, do the same in this process, and compare.

    Args:
        path: Of the config.
        config: What it says, with the overrides.
        overrides: Of the mesh, and others.
        steps: To train.
        timeout_s: Then the ranks are ended.
    """
    from tonari.mpi import mpiexec_command
    from tonari.processes import run_group
    from tonari.trainer.run.own import own_of
    from tonari.trainer.run.verify.checking import (
        Verdict,
        compare_recorded,
        layers_of,
        mesh_words,
        world_size_of,
    )

    started, ranks = time.monotonic(), world_size_of(config)
    with tempfile.TemporaryDirectory(prefix="tonari-verify-") as directory:
        launch = mpiexec_command(ranks) if ranks > 1 else []
        layers = layers_of(config, own_of(config), steps=steps)
        rank = [sys.executable, "-m", "tonari.verify.rank"]
        command = [*launch, *rank, str(path), directory, str(layers.kept), str(steps)]
        environment = {**os.environ, "OMP_NUM_THREADS": os.environ.get("OMP_NUM_THREADS", "1")}
        status, output = run_group([*command, *overrides], timeout_s=timeout_s, env=environment)
        if status == 0:
            found = compare_recorded(config, own_of(config), Path(directory), layers, steps=steps)
        else:
            kind, reason = _reason(status, output, timeout_s=timeout_s)
            found = Verdict(mesh=mesh_words(config), figures={}, differences=(), failed=kind,
                            notes=(reason,))  # fmt: skip
    return replace(found, seconds=time.monotonic() - started)


def _reason(status: int | None, output: str, *, timeout_s: float) -> tuple[str, str]:
    """Say why ranks did not end well: whether they refused the model, and in which words."""
    if status is None:
        return "failed", f"the ranks did not end within {timeout_s:.0f} s; give --timeout more"
    found = REASON.findall(output)
    words = [line for line in output.splitlines() if line.strip()]
    for name in REFUSED:
        for reason in [*found, *words]:
            _, is_there, rest = reason.partition(f"{name}: ")
            if is_there:
                return "refused", rest
    found = found or ABORTED.findall(output) or [" ".join(words[-3:])[-LAST_WORDS:]]
    return "failed", f"the ranks ended with status {status}: {found[0]}"


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="tonari verify",
        description="Train four steps (--steps) of a config on a mesh, stop within its second "
        "epoch and go on, and do the same in one process that does no more than plain torch does: "
        "the plain module, the plain optimizer, a plain loop over the same rows. Compare the loss "
        "of each row, the norms of gradients, every weight, buffer, averaged weight and state of "
        "the optimizer on every rank, evaluations and the state after the resume; name the first "
        "that differs, and where it belongs. Exit 0 if all are equal, 1 if not. The ranks are "
        "started here, on the CPU, in double precision, with a few rows of the config's data in a "
        "temporary cache: the run's directory and cache are left alone.",
        epilog="Examples: `tonari verify run.toml` verifies the config's own mesh (two replicas "
        "where it names none); `tonari verify run.toml dp2 fsdp2 pp2 pp2+zbv tp2+pp2` five "
        "meshes; `tonari verify run.toml mesh.pp=2 mesh.microbatches=4` one, by settings. A model "
        "whose numbers cannot be doubles: mesh.dtype=float32, which compares to 1e-3. `--steps "
        "20` trains longer, on more rows: for what shows late, such as a table that is made every "
        "tenth step.",
    )
    parser.add_argument("config", type=Path, metavar="CONFIG.toml")
    parser.add_argument(
        "arguments", nargs="*", metavar="MESH|SECTION.KEY=VALUE",
        help="meshes by name: an axis and its ranks (dp2, fsdp2, pp2, tp2, cp2), a schedule (zbv) "
        "or recomputation (full, selective), joined by +; and settings for all of them, instead "
        f"of the file's ({EXAMPLES / 'cifar10.toml'} names what there is)",
    )  # fmt: skip
    parser.add_argument(
        "--steps", type=int, default=4, metavar="N",
        help="optimizer steps to train, half of them in the first epoch; the run stops one step "
        "into the second, and goes on (default, and at least: 4)",
    )  # fmt: skip
    parser.add_argument(
        "--timeout", type=float, default=300.0, metavar="SECONDS",
        help="of the ranks of each mesh (default: 300)",
    )  # fmt: skip
    parser.add_argument(
        "--json", action="store_true", help="one JSON document in place of the table"
    )
    return parser
