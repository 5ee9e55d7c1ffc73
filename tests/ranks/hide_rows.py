"""Train with policies one after the other, and report what this rank's policy hid.

Arguments: report directory, cache directory, names of policies as JSON.
"""

import json
import sys
from pathlib import Path
from typing import Any

import shuffle
from dataio.world import discover_world
from tests.importance.hidden import POLICIES, train


def main() -> None:
    out, root, names = Path(sys.argv[1]), Path(sys.argv[2]), json.loads(sys.argv[3])
    world = discover_world(timeout_s=60.0)
    report: dict[str, Any] = {"hidden": {}, "steps": {}}
    for name in names:
        seen = train(world, root / name, POLICIES[name], shuffle.Partial(0.3))
        report["hidden"][name] = seen.watched.hidden
        report["steps"][name] = seen.steps
    (out / f"{world.rank}.json").write_text(json.dumps(report))
    world.close()


if __name__ == "__main__":
    main()
