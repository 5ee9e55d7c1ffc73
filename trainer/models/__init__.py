"""Reference models: they take what the loader gives, bytes of images or tokens, as it is."""

from trainer.models.adapted import Adapted
from trainer.models.cnn import SmallCNN
from trainer.models.deferred import deferred
from trainer.models.gpt import GPT
from trainer.models.hub import HubFormat, Stored
from trainer.models.llama import Llama
from trainer.models.resnet import ResNet
from trainer.models.resnet50 import ResNet50
from trainer.models.rotary import Rope
from trainer.models.seeded import seeded
from trainer.models.staged import StagedModel
from trainer.models.vit import ViT

__all__ = [
    "GPT", "Adapted", "HubFormat", "Llama", "ResNet", "ResNet50", "Rope", "SmallCNN",
    "StagedModel", "Stored", "ViT", "deferred", "seeded",
]  # fmt: skip
