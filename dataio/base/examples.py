"""Where the examples lie: beside the packages, in a checkout and in an installed wheel."""

from pathlib import Path

EXAMPLES = Path(__file__).parents[2] / "examples"
