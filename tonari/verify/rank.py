"""One rank of a mesh that is verified; started by `tonari.verify.command`.

Arguments: the config, the directory to leave what it saw in, layers to keep (0: all), steps,
overrides.
"""

import sys
from pathlib import Path

from tonari.trainer.config.config import load_config
from tonari.trainer.run.own import own_of
from tonari.trainer.run.verify.checking import run_on_mesh


def main(argv: list[str]) -> None:
    """Train the short run."""
    config, directory, layers, steps, *overrides = argv
    settings = load_config(Path(config), overrides)
    run_on_mesh(
        settings, own_of(settings), Path(directory), layers=int(layers),
        steps=int(steps),
    )  # fmt: skip


if __name__ == "__main__":
    main(sys.argv[1:])
