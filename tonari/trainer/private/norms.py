"""The class that all batch norms are derived from.

Why: a module's own class of batch norm is one too. Public instead: a list of torch's classes, which
does not know those of others.
"""

from torch.nn.modules.batchnorm import _BatchNorm as BatchNorm

__all__ = ["BatchNorm"]
