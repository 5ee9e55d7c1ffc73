"""Train with some samples excluded, save amid the run, go on with more, and report what came.

Arguments: report directory, a directory for all ranks, the first and the second list as JSON, and
the steps until the second.
"""

import json
import sys
from dataclasses import asdict
from pathlib import Path

import shuffle
from dataio.world import discover_world
from importance import KeepAgreed
from tests.dataio.exclude_run import make, watch


def main() -> None:
    out, root = Path(sys.argv[1]), Path(sys.argv[2])
    first, second, steps = (json.loads(argument) for argument in sys.argv[3:])
    world = discover_world(timeout_s=60.0)
    told = []
    for exclude, stop in ((first, steps), (second, None)):
        with make(
            world, root / "cache", exclude=exclude, shuffle=shuffle.Partial(0.3),
            importance=KeepAgreed(0.5, begins=1),
        ) as loader:  # fmt: skip
            if stop is None:
                loader.restore(root / "saved")
            told.append(asdict(watch(loader, stop=stop)))
            if stop is not None:
                loader.save(root / "saved")
    (out / f"{world.rank}.json").write_text(json.dumps(told))
    world.close()


if __name__ == "__main__":
    main()
