"""The classes that all batch norms, and all norms with statistics, are derived from.

Why: a module's own class of batch norm is one too. Public instead: a list of torch's classes, which
does not know those of others.
"""

from torch.nn.modules.batchnorm import _BatchNorm as BatchNorm
from torch.nn.modules.batchnorm import _NormBase as NormWithStatistics

__all__ = ["BatchNorm", "NormWithStatistics"]
