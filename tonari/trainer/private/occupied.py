"""A GPU that is kept busy for some cycles of its clock, one or two billion of which are a second.

Why: between two events of a GPU lies also what it waited for its host; where it is busy until the
host has issued all of a part, what lies between them is what that part computes. Public instead:
none; a product as large would take as long, and the caches with it.
"""

from collections.abc import Callable

import torch

occupy: Callable[[int], None] = torch.cuda._sleep
