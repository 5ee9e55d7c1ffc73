"""A replica's tensors as bytes: where each lies in one buffer, and the copy into it."""

from collections.abc import Iterable, Mapping
from dataclasses import dataclass

import torch
from torch import Tensor

ALIGNMENT = 16


@dataclass(frozen=True)
class TensorPiece:
    """Where one tensor lies in a packed state.

    Attributes:
        name: Such as ``"parameter 0.weight"``, ``"buffer 1.running_var"`` or
            ``"moment 0.weight exp_avg"``.
        dtype: Kept on the way.
        shape: Of the tensor.
        start: First byte, aligned for every dtype.
        stop: One past the last.
    """

    name: str
    dtype: torch.dtype
    shape: tuple[int, ...]
    start: int
    stop: int

    def view(self, packed: Tensor) -> Tensor:
        """Read the tensor in place, on the host."""
        return packed[self.start : self.stop].view(self.dtype).view(self.shape)


def cut_pieces(tensors: Mapping[str, Tensor]) -> tuple[TensorPiece, ...]:
    """Lay tensors one after the other."""
    return place_pieces((name, value.dtype, tuple(value.shape)) for name, value in tensors.items())


def place_pieces(
    described: Iterable[tuple[str, torch.dtype, tuple[int, ...]]],
) -> tuple[TensorPiece, ...]:
    """Lay tensors of these names, dtypes and shapes one after the other."""
    pieces: list[TensorPiece] = []
    for name, dtype, shape in described:
        start = -(-pieces[-1].stop // ALIGNMENT) * ALIGNMENT if pieces else 0
        stop = start + dtype.itemsize * torch.Size(shape).numel()
        pieces.append(TensorPiece(name, dtype, shape, start, stop))
    return tuple(pieces)


def pack(tensors: Mapping[str, Tensor], pieces: Iterable[TensorPiece], packed: Tensor) -> None:
    """Copy tensors into a buffer of the host. Blocks until devices have done so."""
    devices = {tensor.device for tensor in tensors.values() if tensor.is_cuda}
    for piece in pieces:
        piece.view(packed).copy_(tensors[piece.name], non_blocking=True)
    for device in devices:
        torch.cuda.current_stream(device).synchronize()
