"""What a checkpoint holds of an exchange: its step, and a round that is under way."""

from collections.abc import Mapping
from typing import TypedDict

from torch import Tensor

from dataio.base.errors import StateError

STATE_VERSION = 1


class RoundState(TypedDict):
    """A round whose bytes have arrived and are not merged yet."""

    number: int
    pieces: list[tuple[str, str, list[int]]]
    mine: Tensor
    theirs: Tensor


class ModelExchangeState(TypedDict):
    """What ``torch.save`` writes, and ``torch.load`` reads with ``weights_only=True``."""

    version: int
    arguments: dict[str, str | int]
    step: int
    apart: bool
    trained: list[str]
    round: RoundState | None


def check_state(
    state: ModelExchangeState, *, arguments: Mapping[str, object], under_way: int | None
) -> None:
    """Refuse a state of another version or of other arguments.

    Args:
        state: To be loaded.
        arguments: Of the exchange that loads it.
        under_way: The round of that exchange, if there is one: the state cannot replace it.
    """
    if under_way is not None:
        raise StateError(
            f"ModelExchange: round {under_way} is under way, expected none where a "
            f"state is loaded; call flush() on every replica first"
        )
    if state["version"] != STATE_VERSION:
        raise StateError(
            f"ModelExchange: the state has version {state['version']}, expected "
            f"{STATE_VERSION}; resume with the version of Tonari that wrote it"
        )
    if state["arguments"] != arguments:
        raise StateError(
            f"ModelExchange: the state was made with {state['arguments']}, this one with "
            f"{arguments}; give the same arguments on as many replicas, or call "
            f"average_all() before saving and go on without this state"
        )
