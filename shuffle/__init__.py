"""Which node holds which row: local, partial and global shuffling; or which replica which model.

Only `ModelExchange` needs torch; it is imported when first asked for.
"""

from typing import TYPE_CHECKING

from dataio.plan.policies import Local
from shuffle.models.plan import equal_exchange
from shuffle.policies import Global, Partial

if TYPE_CHECKING:
    from shuffle.models.exchange import ModelExchange

__version__ = "0.1.0"
__all__ = ["Global", "Local", "ModelExchange", "Partial", "equal_exchange"]


def __getattr__(name: str) -> object:
    if name == "ModelExchange":
        from shuffle.models.exchange import ModelExchange

        return ModelExchange
    raise AttributeError(f"module 'shuffle' has no attribute {name!r}")
