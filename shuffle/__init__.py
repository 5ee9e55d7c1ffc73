"""Which node holds which row: local, partial and global shuffling."""

from dataio.policies import Local
from shuffle.policies import Global, Partial

__all__ = ["Global", "Local", "Partial"]
