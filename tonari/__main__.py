"""`python -m tonari`, the same as `tonari`: what `torchrun -m tonari train ...` starts."""

import sys

from tonari.cli import main

if __name__ == "__main__":
    sys.exit(main())
