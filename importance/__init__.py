"""Which rows are worth this epoch: the policies, and what a training step reports to them."""

from importance.full import Full
from importance.kakurenbo import Kakurenbo
from importance.outcome import outcome
from importance.random import RandomPrune

__all__ = ["Full", "Kakurenbo", "RandomPrune", "outcome"]
