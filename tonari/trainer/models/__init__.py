"""Reference models: they take what the loader gives, bytes of images or tokens, as it is."""

from tonari.trainer.models.adapted import Adapted
from tonari.trainer.models.cnn import SmallCNN
from tonari.trainer.models.deferred import deferred
from tonari.trainer.models.gpt import GPT
from tonari.trainer.models.hub import HubFormat, Stored
from tonari.trainer.models.llama import Llama
from tonari.trainer.models.resnet import ResNet
from tonari.trainer.models.resnet50 import ResNet50
from tonari.trainer.models.rotary import Rope
from tonari.trainer.models.seeded import seeded
from tonari.trainer.models.staged import StagedModel
from tonari.trainer.models.vit import ViT

__all__ = [
    "GPT", "Adapted", "HubFormat", "Llama", "ResNet", "ResNet50", "Rope", "SmallCNN",
    "StagedModel", "Stored", "ViT", "deferred", "seeded",
]  # fmt: skip
