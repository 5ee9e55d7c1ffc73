"""`python -m tonari`, the same as `tonari`: what `torchrun -m tonari train ...` starts."""

from tonari.cli import run

if __name__ == "__main__":
    run()
