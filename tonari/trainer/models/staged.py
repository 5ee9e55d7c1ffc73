"""What the trainer asks of a model: a stem, numbered blocks and a head; any may be elsewhere."""

import copy
from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, TypeVar, cast

import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor.parallel import ParallelStyle
from torch.utils.flop_counter import FlopCounterMode

from tonari.trainer.errors import ConfigError
from tonari.trainer.models.hub import HubFormat
from tonari.trainer.models.unchanged import without_trace
from tonari.trainer.private.autograd import is_view
from tonari.trainer.private.trees import tree_leaves

M = TypeVar("M", bound=nn.Module)

if TYPE_CHECKING:
    from tonari.trainer.models.deferred import Recording


class StagedModel(nn.Module, ABC):
    """A model that can be cut between any two blocks; to bring your own, see ``docs/models.md``.

    Parameter names do not depend on the cut, so that a checkpoint of one mesh fits every other.

    Args:
        stem: Turns a batch's input into what the first block takes; None on later stages.
        blocks: In order; what a block gives, the next one takes: one tensor.
        head: Turns what the last block gives into logits; None on earlier stages.

    Attributes:
        recording: How to make the weights of a model that was built without memory; else None.
    """

    recording: "Recording | None" = None

    def __init__(self, *, stem: nn.Module, blocks: list[nn.Module], head: nn.Module) -> None:
        super().__init__()
        self.stem: nn.Module | None = stem
        self.blocks = nn.ModuleDict({str(number): block for number, block in enumerate(blocks)})
        self.head: nn.Module | None = head
        self.num_blocks = len(blocks)
        self.hidden_dtype: torch.dtype | None = None
        self.num_sequence_parts = self.num_hidden_parts = 1
        # By `parallelize`: further names of a weight -> its first in the whole model, and the
        # stages of each weight that several have.
        self.first_names: Mapping[str, str] = {}
        self.shared_with: Mapping[str, tuple[int, ...]] = {}
        # By `tile_stages`: number of a block -> the dimensions of what it takes that are cut, and
        # what this rank has of each.
        self.sizes_here: Mapping[int, Mapping[int, int]] = {}

    def forward(self, values: Tensor) -> Tensor:
        """Pass a batch, or what the stage before gave, through the layers that are here."""
        if self.stem is not None:
            values = self.stem(values)
        for block in self.blocks.values():
            values = block(values)
        if self.head is not None:
            values = self.head(values)
        # FSDP hooks on to what comes out, where a view (of logits gathered over tp) may lose hooks.
        values = values.clone() if is_view(values) else values
        # A pipeline sends it on as it lies in memory.
        return values if self.head is not None else values.contiguous()

    def keep(self, blocks: range, *, first: bool, last: bool) -> None:
        """Drop all but some blocks, in place.

        Args:
            blocks: Numbers of those to keep.
            first: Whether to keep the stem.
            last: Whether to keep the head.
        """
        self.blocks = nn.ModuleDict({str(number): self.blocks[str(number)] for number in blocks})
        if not first:
            self.stem = None
        if not last:
            self.head = None

    @abstractmethod
    def data_shape(self, batch_size: int) -> Tensor:
        """Describe the stem's input, as a meta tensor."""

    @abstractmethod
    def logits_shape(self, batch_size: int) -> tuple[int, ...]:
        """Say the shape of the head's output."""

    @abstractmethod
    def hidden_shape_before(self, block: int, batch_size: int) -> tuple[int, ...]:
        """Say the shape of what a block takes (``num_blocks``: what the head takes)."""

    def tp_plan(self, *, sequence_parallel: bool, loss_parallel: bool) -> dict[str, ParallelStyle]:
        """Say how the layers that are here are split over tp; those not named stay whole.

        Args:
            sequence_parallel: Between layers, each tp rank holds its part of the sequence.
            loss_parallel: Logits stay split by class, as a DTensor.
        """
        return {}

    def tp_divides(self) -> Mapping[str, int]:
        """List the numbers that the tp size has to divide, by name."""
        return {}

    def use_context_parallel(self, mesh: DeviceMesh) -> None:
        """Take a part of each sequence only, the others being on the other ranks of the mesh."""
        raise ConfigError(
            f"mesh.cp is {mesh.size()}, expected 1: {type(self).__name__} has no sequence to "
            f"divide; leave mesh.cp out, and use mesh.tp or mesh.dp_shard"
        )

    def hub_format(self) -> HubFormat:
        """Say how the whole model's weights lie in files of Hugging Face's layout.

        Where this is not overridden, a file has our own names.
        """
        return HubFormat()

    def input_shape(self, batch_size: int) -> Tensor:
        """Describe what this part takes, as a meta tensor."""
        if self.stem is not None:
            return self.data_shape(batch_size)
        return self.hidden_shape(batch_size, self.first_block)

    def output_shape(self, batch_size: int) -> Tensor:
        """Describe what this part gives, as a meta tensor."""
        if self.head is None:
            return self.hidden_shape(batch_size, max(self._numbers(), default=-1) + 1)
        return self._meta(self.logits_shape(batch_size))

    def hidden_shape(self, batch_size: int, before: int = 1) -> Tensor:
        """Describe what the block of that number takes, as a meta tensor."""
        shape = [*self.hidden_shape_before(before, batch_size)]
        for dim, size in self.sizes_here.get(before, {}).items():
            shape[dim] = size
        return self._meta(tuple(shape))

    @property
    def first_block(self) -> int:
        """Number of the first block that is here; ``num_blocks`` if there is none."""
        return min(self._numbers(), default=self.num_blocks)

    def flops_per_row(self) -> int:
        """Count the operations of one sample's forward pass, of a whole model on one process.

        0 where it cannot run without data: a figure of the metrics only.
        """
        weights = {
            name: torch.empty_like(tensor, device="meta")
            for name, tensor in [*self.named_parameters(), *self.named_buffers()]
        }
        try:
            with FlopCounterMode(display=False) as counter, torch.no_grad(), without_trace(self):
                torch.func.functional_call(self, weights, (self.data_shape(1),))
        except Exception:
            return 0
        return int(counter.get_total_flops())

    def check_mesh(self, *, num_stages: int = 1, tp: int = 1) -> None:
        """Refuse sizes that this model cannot be divided by.

        Raises:
            ConfigError: Names the number that does not divide.
        """
        kind = type(self).__name__
        if num_stages > max(self.num_blocks, 1):
            raise ConfigError(
                f"mesh.pp: {kind} has {self.num_blocks} blocks, fewer than {num_stages} stages; "
                f"choose a smaller mesh.pp (or mesh.virtual), or a deeper model"
            )
        for name, number in self.tp_divides().items():
            if number % tp:
                raise ConfigError(
                    f"mesh.tp is {tp}, which does not divide {kind}'s {number} {name}; choose a "
                    f"mesh.tp or a number of {name} that does"
                )

    def check_replicas(self, *, is_gathered: bool) -> None:
        """Refuse what this model does to its weights, where ranks train with rows of their own.

        Args:
            is_gathered: Whether the weights lie in shards, of which a block's are gathered as it
                is computed.

        Raises:
            ConfigError: Names what it does.
        """

    def _numbers(self) -> list[int]:
        return [int(number) for number in self.blocks]

    def _meta(self, shape: tuple[int, ...]) -> Tensor:
        dtype = self.hidden_dtype or next(self.parameters()).dtype
        return torch.empty(shape, dtype=dtype, device="meta", requires_grad=True)


def without_data(model: M) -> M:
    """Copy a model on to ``meta``, weights that are one being one there too."""
    memo: dict[int, object] = {}
    for parameter in model.parameters():
        empty = torch.empty_like(parameter, device="meta")
        memo[id(parameter)] = nn.Parameter(empty, parameter.requires_grad)
    for buffer in model.buffers():
        memo[id(buffer)] = torch.empty_like(buffer, device="meta")
    return copied(model, memo)


def copied(model: M, memo: Mapping[int, object] | None = None) -> M:
    """Copy a model; what cannot be copied, such as a lock, is in both.

    Args:
        model: To copy.
        memo: What takes the place of some objects, by their identity.
    """
    taken = dict(memo or {})
    try:
        return copy.deepcopy(model, dict(taken))
    except (TypeError, RuntimeError):  # as torch raises for a tensor that was computed
        held = [value for module in model.modules() for value in vars(module).values()]
        for leaf in tree_leaves(held):
            # Modules themselves are copied: what they hold is looked at by itself.
            if not isinstance(leaf, (nn.Module, nn.Parameter)):
                try:
                    copy.deepcopy(leaf, dict(taken))
                except (TypeError, RuntimeError):
                    taken[id(leaf)] = leaf
        return copy.deepcopy(model, taken)


def aliases_of(module: nn.Module) -> dict[str, str]:
    """List the further names of tied parameters and of those of shared modules: name -> first."""
    first: dict[int, str] = {}
    found: dict[str, str] = {}
    for name, parameter in module.named_parameters(remove_duplicate=False):
        before = first.setdefault(id(parameter), name)
        if before != name:
            found[name] = before
    return found


def scaled(images: Tensor, dtype: torch.dtype) -> Tensor:
    """Map uint8 in [0, 255] to floating point in [-1, 1]."""
    return images.to(dtype) / 127.5 - 1


class Images(nn.Module):
    """A stem: scale bytes, then the layers.

    Attributes:
        mean, std: Of bytes divided by 255, one for each channel; empty: bytes become [-1, 1].
    """

    def __init__(
        self,
        layers: nn.Module,
        shape: tuple[int, int, int] | None = None,
        *,
        scale: Callable[[Tensor, torch.dtype], Tensor] = scaled,
    ) -> None:
        super().__init__()
        self.layers, self.shape, self.scale = layers, shape, scale
        self.mean: tuple[float, ...] = ()
        self.std: tuple[float, ...] = ()

    def forward(self, images: Tensor) -> Tensor:
        """Map uint8[batch, channels, height, width] to what the first block takes."""
        if self.shape is not None and tuple(images.shape[1:]) != self.shape:
            raise ValueError(
                f"images are {list(images.shape[1:])}, the model was made for "
                f"{list(self.shape)} [channels, height, width]; set data.channels and "
                "model.image_size, or data.image_size to resize"
            )
        dtype = next(self.layers.parameters()).dtype
        if not self.mean:
            return cast(Tensor, self.layers(self.scale(images, dtype)))
        values = images.to(dtype, copy=True)
        for channel, (mean, std) in enumerate(zip(self.mean, self.std, strict=True)):
            values[:, channel].div_(255 * std).sub_(mean / std)
        return cast(Tensor, self.layers(values))
