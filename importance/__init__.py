"""Which rows are worth this epoch, and how often: the policies, and what a step reports to them."""

from importance.auto import Auto
from importance.cost_aware import CostAware
from importance.forgetting import Forgetting
from importance.full import Full
from importance.infobatch import InfoBatch
from importance.kakurenbo import Kakurenbo
from importance.keep_agreed import KeepAgreed
from importance.learnable import Learnable
from importance.named import find_policy, make_policy, policies, settings_of
from importance.outcome import outcome
from importance.random import RandomPrune
from importance.schedule import lr_drops
from importance.selective_backprop import SelectiveBackprop
from importance.seta import SeTa
from importance.stopped_learning import StoppedLearning
from importance.weighted import Weighted

__version__ = "0.1.0"
__all__ = [
    "Auto",
    "CostAware",
    "Forgetting",
    "Full",
    "InfoBatch",
    "Kakurenbo",
    "KeepAgreed",
    "Learnable",
    "RandomPrune",
    "SeTa",
    "SelectiveBackprop",
    "StoppedLearning",
    "Weighted",
    "find_policy",
    "lr_drops",
    "make_policy",
    "outcome",
    "policies",
    "settings_of",
]
