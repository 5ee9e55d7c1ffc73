"""What replicas must agree on before they exchange anything, and that they train apart."""

from collections.abc import Mapping

import xxhash
from torch import nn
from torch.optim import Optimizer

from dataio.base.errors import ExchangeError, WorldError
from dataio.world import World
from shuffle.models.tensors import digest_tensors


def check_arguments(*, every: int, overlap: int, world: World) -> None:
    """Refuse arguments out of range, and a world whose ranks share a replica."""
    if every < 1:
        raise ValueError(f"ModelExchange: every is {every}, expected at least 1 step")
    if not 0 <= overlap <= every:
        raise ValueError(
            f"ModelExchange: overlap is {overlap}, expected steps in [0, every] = [0, {every}]; a "
            f"round must end before the next begins"
        )
    if world.num_replicas != world.world_size:
        raise ValueError(
            f"ModelExchange: {world.world_size} ranks make {world.num_replicas} replicas, expected "
            f"a whole model on every rank; leave tensor and pipeline parallelism out, or "
            f"ModelExchange"
        )


def check_agreement(
    world: World,
    parameters: Mapping[str, nn.Parameter],
    *,
    arguments: Mapping[str, object],
    optimizer: Optimizer | None,
    weights: bytes,
) -> None:
    """Refuse replicas that were made with other arguments or weights than rank 0. Collective.

    Args:
        world: All ranks.
        parameters: By name; their shapes and dtypes are compared.
        arguments: Of the exchange.
        optimizer: Its kind is compared.
        weights: Digest of the parameters' values.

    Raises:
        WorldError: On every rank, if the arguments differ.
        ExchangeError: On every rank, if the weights do.
    """
    described = repr([(name, value.shape, value.dtype) for name, value in parameters.items()])
    kind = type(optimizer).__name__
    mine = f"{arguments} of {kind} and {xxhash.xxh3_64_hexdigest(described.encode())}"
    found = world.allgather(weights + mine.encode(), doing="comparing the replicas' models")
    size = len(weights)
    other = next((rank for rank, its in enumerate(found) if its[size:] != found[0][size:]), None)
    if other is not None:
        raise WorldError(
            f"ModelExchange: rank {other} was made with {found[other][size:].decode()} (a "
            f"hash of the parameters' names and shapes), rank 0 with "
            f"{found[0][size:].decode()}; every rank must be given the same arguments",
            on_all_ranks=True,
        )
    other = next((rank for rank, its in enumerate(found) if its != found[0]), None)
    if other is not None:
        raise ExchangeError(
            f"ModelExchange: rank {other} begins with other weights than rank 0, expected "
            f"the same on all ranks; call torch.manual_seed with one seed before making "
            f"the model, and make the exchange before loading a checkpoint",
            on_all_ranks=True,
        )


def weights_differ(
    world: World, parameters: Mapping[str, nn.Parameter], *, first: bytes, step: int
) -> bool:
    """Whether replicas have trained apart since the first weights. Collective.

    Raises:
        ExchangeError: On every rank, if the weights changed and are equal all the same.
    """
    mine = digest_tensors(parameters.values())
    found = world.allgather(mine, doing="comparing the replicas' models")
    differ = len(set(found)) > 1
    # A rate of 0, as a warm-up may begin with, has changed nothing yet
    if not differ and mine != first:
        raise ExchangeError(
            f"ModelExchange: after {step} steps all {world.num_replicas} "
            f"replicas hold bitwise the same weights, expected replicas that train apart; "
            f"exchanging them would change nothing: do not average gradients over ranks, "
            f"and give every rank batches of its own, or leave ModelExchange out",
            on_all_ranks=True,
        )
    return differ
