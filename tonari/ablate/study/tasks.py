"""What a study trains: a small ResNet on images, or a small GPT on bytes."""

from typing import Protocol

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from importance import outcome
from tonari.ablate.study.config import SettingsConfig
from tonari.ablate.study.data import LabelledText, Samples
from tonari.ablate.study.model import StudyResNet
from tonari.trainer.models import GPT
from tonari.trainer.run.data import VOCABULARY


class Task(Protocol):
    """A model, and what it takes of samples; leading axes of the samples are kept."""

    def build(self, settings: SettingsConfig) -> nn.Module:
        """Make the model, with weights that torch's generator draws."""
        ...

    def input(self, samples: Tensor, flips: Tensor) -> Tensor:
        """Take what the model reads.

        Args:
            samples: uint8[..., *shape of a sample].
            flips: bool[...]: Images that are mirrored.
        """
        ...

    def target(self, samples: Tensor, labels: Tensor) -> Tensor:
        """Take what it should answer: int64[...] or int64[..., places]."""
        ...


class ClassifyImages:
    """One class an image.

    Args:
        num_classes: Of the dataset.
    """

    def __init__(self, num_classes: int) -> None:
        self._num_classes = num_classes

    def build(self, settings: SettingsConfig) -> nn.Module:
        """Make a small ResNet."""
        return StudyResNet(
            self._num_classes, width=settings.width, blocks=settings.blocks, norm=settings.norm,
            replicas=settings.replicas, running=settings.running,
        )  # fmt: skip

    def input(self, samples: Tensor, flips: Tensor) -> Tensor:
        """Scale uint8[..., channels, height, width] to [-1, 1], some mirrored."""
        scaled = samples.float() / 127.5 - 1
        return torch.where(flips[..., None, None, None], scaled.flip(-1), scaled)

    def target(self, samples: Tensor, labels: Tensor) -> Tensor:
        """Take the labels."""
        return labels


class NextByte:
    """Each next byte of a sequence.

    Args:
        sequence_length: Bytes that the model reads of a sample.
    """

    def __init__(self, sequence_length: int) -> None:
        self._sequence_length = sequence_length

    def build(self, settings: SettingsConfig) -> nn.Module:
        """Make a small GPT."""
        return GPT(
            VOCABULARY, self._sequence_length, width=settings.width, depth=settings.blocks,
            heads=settings.heads,
        )  # fmt: skip

    def input(self, samples: Tensor, flips: Tensor) -> Tensor:
        """Take all bytes of uint8[..., sequence_length + 1] but the last."""
        return samples[..., :-1].long()

    def target(self, samples: Tensor, labels: Tensor) -> Tensor:
        """Take all bytes but the first."""
        return samples[..., 1:].long()


def task_of(data: Samples, num_classes: int) -> Task:
    """Choose what is trained by what there is to train on."""
    if isinstance(data, LabelledText):
        return NextByte(data.text.shape[1] - 1)
    return ClassifyImages(num_classes)


def losses_of_places(logits: Tensor, target: Tensor) -> Tensor:
    """Compute cross entropies, in nats.

    Args:
        logits: floating[rows, classes] or floating[rows, places, classes].
        target: int64[rows] or int64[rows, places].

    Returns:
        floating[rows, places]; one place, where a row has one answer.
    """
    losses = F.cross_entropy(logits.flatten(0, -2), target.flatten(), reduction="none")
    return losses.view(len(target), -1)


def row_outcome(logits: Tensor, target: Tensor) -> tuple[Tensor, Tensor]:
    """Say whether more than half of a row's answers are right, and how sure they are on average.

    Shapes are those of `losses_of_places`; the results bool[rows] and float32[rows].
    """
    correct, confidence = outcome(logits.flatten(0, -2), target.flatten())
    shares, means = (
        values.float().view(len(target), -1).mean(dim=1) for values in (correct, confidence)
    )
    return shares > 0.5, means
