"""Names of meshes on the command line, as the settings that they stand for."""

import re
from collections.abc import Sequence
from typing import get_args

from tonari.errors import CommandError
from tonari.trainer.config.config import MeshConfig
from tonari.trainer.mesh.place import Schedule

AXES = {"pp": "pp", "dp": "dp_replicate", "fsdp": "dp_shard", "cp": "cp", "tp": "tp"}
PART = re.compile(rf"({'|'.join(AXES)})(\d+)")


def split_arguments(given: Sequence[str]) -> tuple[tuple[str, ...], list[str]]:
    """Part overrides, ``section.key=value``, from names of meshes."""
    return tuple(each for each in given if "=" in each), [each for each in given if "=" not in each]


def overrides_of(name: str) -> tuple[str, ...]:
    """Say what a name such as ``pp2+tp2`` or ``pp2+zbv`` sets; all axes that it leaves out are 1.

    Raises:
        CommandError: If a part of it is neither an axis with its ranks nor a schedule.
    """
    sizes = dict.fromkeys(AXES.values(), 1)
    others = []
    for part in name.split("+"):
        found = PART.fullmatch(part)
        if found and int(found[2]):
            sizes[AXES[found[1]]] = int(found[2])
        elif part in get_args(Schedule):
            others.append(f"mesh.schedule={part}")
        elif part in ("full", "selective"):
            others.append(f"mesh.checkpointing={part}")
        elif part != "one":
            raise CommandError(
                f"mesh {name!r}: found {part!r}, expected an axis and its ranks (pp2, dp2, fsdp2, "
                f"tp2, cp2), a schedule ({', '.join(get_args(Schedule))}), full or selective "
                "(recomputation), or one; join several by +, as in pp2+tp2, or give settings, as "
                "in mesh.pp=2"
            )
    return (*(f"mesh.{axis}={size}" for axis, size in sizes.items()), *others)


def own_overrides(mesh: MeshConfig) -> tuple[str, ...]:
    """Complete a config's own mesh: replicas are as many as fit, of which two say enough."""
    if mesh.dp_replicate is not None:
        return ()
    alone = mesh.pp * mesh.dp_shard * mesh.sharing * mesh.tp == 1
    return (f"mesh.dp_replicate={2 if alone else 1}",)
