"""Average gradients over the replicas by fewer bytes, where what joins the nodes is slow.

No hook of FSDP does it: torch calls one after its own all-reduce, or, where there is none, once for
each microbatch, with a vector in which no matrix is left. So shards are made over the ranks of a
replica alone, and their gradients are averaged here, once a step.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, Literal

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor

from dataio.base.seeding import key
from tonari.trainer.errors import ConfigError
from tonari.trainer.mesh.average import average_gradients, dense_gradient
from tonari.trainer.private.messages import all_gather

Kind = Literal["bfloat16", "powersgd"]

SEGMENT = 128 << 10
"""Numbers that go to a rank in one message. Longer ones hold up, on a link of 100 Mbit, what the
other direction asks for: two ranks took twice as long."""


@dataclass(frozen=True)
class _Matrix:
    """A gradient of which a product of two narrow matrices is sent.

    Attributes:
        error: float32[rows, columns]: What this rank's gradients had and no step got yet.
        basis: float32[columns, width]: The second factor of the step before, of all ranks.
    """

    error: Tensor
    basis: Tensor


class Compression:
    """Averages float32 gradients over dp_replicate; `average` is collective.

    ``"bfloat16"``: each rank rounds its gradient, one rank adds up each part of them in float32,
    in the order of the ranks, and rounds the mean: half the bytes of a sum in float32.
    ``"powersgd"``: the mean of matrices by rank ``rank``, with error feedback and a warm start;
    vectors, and matrices of which that would not halve the bytes, go as they are. All replicas
    get the same bits. Gradients of other dtypes are averaged as without compression.

    Args:
        parts: The stages that this rank owns, spread without dp_replicate.
        mesh: With the axes of ``tonari.trainer.mesh.mesh.AXES``.
        kind: As said above.
        rank: Columns of the factors, >= 1.
        warmup_steps: First steps of the run in which powersgd compresses nothing.
        seed: Of the first factors.

    Attributes:
        state: What a checkpoint holds of it, by names that no other rank of this mesh has.

    Raises:
        ConfigError: If there is no float32 gradient.

    Source: Vogels et al., PowerSGD, NeurIPS 2019, algorithms 1 and 2.
    """

    def __init__(
        self, parts: Sequence[nn.Module], mesh: DeviceMesh, *, kind: Kind, rank: int,
        warmup_steps: int, seed: int,
    ) -> None:  # fmt: skip
        self._group = mesh.get_group("dp_replicate")
        self._kind, self._warmup_steps = kind, warmup_steps
        named = [each for each in nn.ModuleList(parts).named_parameters() if each[1].requires_grad]
        self._others = [its for _, its in named if its.dtype != torch.float32]
        named = [each for each in named if each[1].dtype == torch.float32]
        if not named:
            raise ConfigError(
                f'optimizer.compress_gradients is "{kind}", but the model trains no float32 '
                "weights, whose gradients it compresses; leave it out"
            )
        self._parameters = [its for _, its in named]
        self._matrices: dict[int, _Matrix] = {}
        self.state: dict[str, Tensor] = {}
        place = f"rank {dist.get_rank()} of {'x'.join(map(str, mesh.shape))}"
        generator = torch.Generator(mesh.device_type)
        for number, (name, parameter) in enumerate(named if kind == "powersgd" else []):
            own = _own_part(parameter)
            shape = (own.shape[0], own.shape[1:].numel()) if own.dim() > 1 else (0, 0)
            width = min(rank, *shape)
            if not width or 2 * width * sum(shape) >= own.numel():
                continue
            generator.manual_seed(key(seed, f"powersgd {name}") % 2**63)
            basis = torch.randn(shape[1], width, generator=generator, device=own.device)
            matrix = self._matrices[number] = _Matrix(own.new_zeros(shape), basis)
            self.state |= {
                f"{place} error {name}": matrix.error, f"{place} basis {name}": basis
            }  # fmt: skip

    @torch.no_grad()
    def average(self, step: int) -> None:
        """Replace each gradient by its mean over the replicas.

        A parameter that some replicas have not used counts as zeros there. One that none has used
        keeps no gradient, and what powersgd had left of earlier ones waits.

        Args:
            step: Of the run, from 0.
        """
        if self._others:
            average_gradients(self._others, self._group)
        wholes = [dense_gradient(each) for each in self._parameters]
        grads = [_own_part(each) for each in wholes]
        matrices = self._matrices if step >= self._warmup_steps else {}
        for number, matrix in matrices.items():
            matrix.error.add_(grads[number].reshape(matrix.error.shape))
        plain = [grad for number, grad in enumerate(grads) if number not in matrices]
        fronts = [matrix.error @ matrix.basis for matrix in matrices.values()]
        used = [float(each.grad is not None) for each in self._parameters]
        *means, counts = self._mean([*plain, *fronts, grads[0].new_tensor(used)])
        for grad, mean in zip(plain, means, strict=False):
            grad.copy_(mean)
        fronts = [torch.linalg.qr(front).Q for front in means[len(plain) :]]
        pairs = list(zip(matrices.values(), fronts, strict=True))
        backs = self._mean([matrix.error.T @ front for matrix, front in pairs]) if pairs else []
        # What this rank has used needs no count, for which it would wait for its device.
        have = used if all(used) else counts.tolist()
        for (number, matrix), front, back in zip(matrices.items(), fronts, backs, strict=True):
            if not have[number]:
                continue
            # Columns of zeros, as of a step without any gradient, would stay so for ever.
            matrix.basis.copy_(torch.where(back.any(0), back, matrix.basis))
            sent = front @ back.T
            matrix.error.sub_(sent)
            grads[number].copy_(sent.view(grads[number].shape))
        for parameter, whole, count in zip(self._parameters, wholes, have, strict=True):
            parameter.grad = whole if count else None

    def _mean(self, tensors: Sequence[Tensor]) -> list[Tensor]:
        """Average tensors over the group, in the messages of one."""
        flat = torch.cat([each.flatten() for each in tensors])
        if self._kind == "bfloat16":
            flat = mean_by_bfloat16(flat, self._group)
        else:
            dist.all_reduce(flat, group=self._group)
            flat /= self._group.size()
        pieces = torch.split(flat, [each.numel() for each in tensors])
        return [piece.view(each.shape) for piece, each in zip(pieces, tensors, strict=True)]


def mean_by_bfloat16(flat: Tensor, group: dist.ProcessGroup) -> Tensor:
    """Average float32[n] over a group, sending bfloat16 alone; sums are in float32. Collective.

    Returns:
        float32[n]: Of numbers that bfloat16 has, the same bits on all ranks.
    """
    size, length = group.size(), len(flat)
    segments = max(-(-length // (size * SEGMENT)), 1)
    # bfloat16[segments, ranks, n / segments / ranks]
    shape = (segments, size, -(-length // (segments * size)))
    sent = flat.new_zeros(shape, dtype=torch.bfloat16)
    sent.view(-1)[:length].copy_(flat)
    received = torch.empty_like(sent)
    _send(dist.all_to_all_single, received, sent, group)
    mean = (received.float().sum(1) / size).bfloat16()
    _send(all_gather, sent, mean, group)
    return sent.view(-1)[:length].float()


def _send(how: Callable[..., Any], into: Tensor, sent: Tensor, group: dist.ProcessGroup) -> None:
    """Send segments, all under way at once; as bytes, which all backends take."""
    pairs = zip(into, sent, strict=True)
    works = [
        how(to.view(torch.uint8).view(-1), of.view(torch.uint8).view(-1), group=group,
            async_op=True)
        for to, of in pairs
    ]  # fmt: skip
    for work in works:
        work.wait()


def _own_part(value: Tensor) -> Tensor:
    return value.to_local() if isinstance(value, DTensor) else value.detach()
