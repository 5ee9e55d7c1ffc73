"""One start of a run whose model the settings name. Arguments: report directory, settings, more."""

import json
import sys
from pathlib import Path

from trainer.config.config import load_config
from trainer.run.loop import train


def main() -> None:
    """Train, and say how it ended."""
    directory, config = Path(sys.argv[1]), Path(sys.argv[2])
    ended = train(load_config(config, sys.argv[3:]))
    (directory / f"{ended.rank}.json").write_text(json.dumps({"steps": ended.progress.steps}))


if __name__ == "__main__":
    main()
