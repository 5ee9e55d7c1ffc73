"""What a replica has learned, as bytes: weights, statistics and moments; and how two are merged."""

from collections.abc import Iterable, Mapping
from dataclasses import dataclass

import torch
import xxhash
from torch import Tensor, nn
from torch.nn.parameter import is_lazy
from torch.optim import Optimizer

from dataio.base.errors import ExchangeError

SYNCHRONOUS = ("DistributedDataParallel", "FullyShardedDataParallel", "FSDPModule")
ALIGNMENT = 16


@dataclass(frozen=True)
class Piece:
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


def name_parameters(model: nn.Module, optimizer: Optimizer | None) -> dict[str, nn.Parameter]:
    """Name every parameter once, tied ones too; those of the optimizer alone by their place."""
    named: dict[str, nn.Parameter] = dict(model.named_parameters())
    known = {id(parameter) for parameter in named.values()}
    for number, group in enumerate(optimizer.param_groups if optimizer else []):
        for place, parameter in enumerate(group["params"]):
            if id(parameter) not in known:
                named[f"group {number} place {place}"] = parameter
    return named


def refuse_sharded(model: nn.Module, parameters: Mapping[str, nn.Parameter]) -> None:
    """Refuse what is kept equal, or split, over ranks by torch itself.

    Raises:
        ValueError: Names the module or parameter, and the cure.
    """
    # By name: importing torch's distributed tensors takes longer than all the rest of a start
    for module in model.modules():
        wrapper = next((kind for kind in _kinds(module) if kind in SYNCHRONOUS), None)
        if wrapper:
            raise ValueError(
                f"ModelExchange: the model holds a {wrapper}, which averages gradients in every "
                f"step: replicas stay equal, and exchanging them would change nothing; expected "
                f"replicas that train apart: pass the plain module, or leave ModelExchange out"
            )
    for name, parameter in parameters.items():
        if "DTensor" in _kinds(parameter):
            raise ValueError(
                f"ModelExchange: parameter {name} is a DTensor, a piece of a model that several "
                f"ranks share; expected a whole model on every rank: leave ModelExchange out"
            )
        if is_lazy(parameter):
            raise ValueError(
                f"ModelExchange: parameter {name} has no shape yet, expected equal weights on all "
                f"replicas; run one batch through the model before making the exchange"
            )


def find_tensors(
    model: nn.Module, optimizer: Optimizer | None, *, trained: Iterable[str]
) -> dict[str, Tensor]:
    """List what is exchanged, in an order that is the same on every replica.

    Args:
        model: All its buffers that are part of its state.
        optimizer: All its tensors, which appear with its first step.
        trained: Names of the parameters that may differ from replica to replica.

    Raises:
        ExchangeError: If the optimizer keeps more than tensors and numbers.
    """
    named, wanted = name_parameters(model, optimizer), set(trained)
    found: dict[str, Tensor] = {
        f"parameter {name}": parameter for name, parameter in named.items() if name in wanted
    }
    lasting = model.state_dict(keep_vars=True)
    found |= {f"buffer {name}": value for name, value in model.named_buffers() if name in lasting}
    for name, parameter in named.items():
        state = optimizer.state.get(parameter, {}) if optimizer else {}
        for kind in sorted(state):
            if isinstance(state[kind], Tensor):
                found[f"moment {name} {kind}"] = state[kind]
            elif not isinstance(state[kind], (int, float, str, type(None))):
                raise ExchangeError(
                    f"ModelExchange: {type(optimizer).__name__} keeps {kind!r} of parameter {name} "
                    f"in a {type(state[kind]).__name__}, expected tensors and numbers; pass "
                    f"optimizer=None to exchange weights and statistics alone"
                )
    return {name: value.detach() for name, value in found.items() if value.numel()}


def cut_pieces(tensors: Mapping[str, Tensor]) -> tuple[Piece, ...]:
    """Lay tensors one after the other."""
    return place_pieces((name, value.dtype, tuple(value.shape)) for name, value in tensors.items())


def place_pieces(
    described: Iterable[tuple[str, torch.dtype, tuple[int, ...]]],
) -> tuple[Piece, ...]:
    """Lay tensors of these names, dtypes and shapes one after the other."""
    pieces: list[Piece] = []
    for name, dtype, shape in described:
        start = -(-pieces[-1].stop // ALIGNMENT) * ALIGNMENT if pieces else 0
        stop = start + dtype.itemsize * torch.Size(shape).numel()
        pieces.append(Piece(name, dtype, shape, start, stop))
    return tuple(pieces)


def pack(tensors: Mapping[str, Tensor], pieces: Iterable[Piece], packed: Tensor) -> None:
    """Copy tensors into a buffer of the host. Blocks until devices have done so."""
    devices = {tensor.device for tensor in tensors.values() if tensor.is_cuda}
    for piece in pieces:
        piece.view(packed).copy_(tensors[piece.name], non_blocking=True)
    for device in devices:
        torch.cuda.current_stream(device).synchronize()


def merge(
    tensors: Mapping[str, Tensor],
    pieces: Iterable[Piece],
    *,
    mine: Tensor,
    theirs: Tensor,
    average: bool,
) -> None:
    """Give tensors what the exchange makes of both packed states, and keep what changed since.

    Raises:
        ExchangeError: If a tensor that was packed is gone or has another shape.
    """
    for piece in pieces:
        now = tensors.get(piece.name)
        if now is None or now.dtype != piece.dtype or tuple(now.shape) != piece.shape:
            found = "absent" if now is None else f"{now.dtype}{list(now.shape)}"
            raise ExchangeError(
                f"ModelExchange: {piece.name} is {found}, but was {piece.dtype}{list(piece.shape)} "
                f"when its round began; load model and optimizer of the same checkpoint, and call "
                f"flush() before replacing either"
            )
        settled = settle(
            now,
            piece.view(mine).to(now.device, non_blocking=True),
            piece.view(theirs).to(now.device, non_blocking=True),
            average=average,
            bounded=not piece.name.startswith("parameter "),
        )
        now.copy_(settled)


def settle(now: Tensor, mine: Tensor, theirs: Tensor, *, average: bool, bounded: bool) -> Tensor:
    """Make one tensor of what a replica has now and what both had when the round began.

    It is ``goal + (now - mine)``, where the goal is the mean of both, or theirs: exact where
    nothing changed since. Of what cannot be averaged (counts, flags) the goal is the larger.

    Args:
        now: The replica's own, with the steps since.
        mine: What it had sent.
        theirs: What came.
        average: Whether the goal is the mean.
        bounded: For moments and variances. Where both replicas have nothing below 0, an element
            never falls below both its own and the goal: it stays >= 0, and is not cut to 0 either,
            by which an optimizer would divide.
    """
    if now.dtype == torch.bool:
        return mine | theirs if average else theirs
    if not (now.is_floating_point() or now.is_complex()):
        goal = torch.maximum(mine, theirs) if average else theirs
        return now + (goal - mine)
    # Halves lose digits at each of three operations
    wide = torch.float32 if now.itemsize < 4 else now.dtype
    present, before, other = now.to(wide), mine.to(wide), theirs.to(wide)
    goal = (before + other) / 2 if average else other
    # Not where nothing is to be done: an infinity, as in a mask, would become a NaN
    settled = torch.where(goal == before, present, goal + (present - before))
    if bounded and not now.is_complex() and min(x.min() for x in (present, before, other)) >= 0:
        settled = torch.maximum(settled, torch.minimum(present, goal))
    return settled.to(now.dtype)


def digest_tensors(tensors: Iterable[Tensor]) -> bytes:
    """Hash the bits of tensors."""
    state = xxhash.xxh3_128()
    for tensor in tensors:
        flat = tensor.detach().cpu().contiguous().view(-1)
        state.update(flat.view(torch.uint8).numpy().data)
    return state.digest()


def _kinds(value: object) -> list[str]:
    return [kind.__name__ for kind in type(value).__mro__]
