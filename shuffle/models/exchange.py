"""Replicas that train apart exchange what they have learned, in place of rows.

Every ``every`` steps a drawn matching pairs the replicas (``plan``). Both partners pack their
state (``tensors``, ``pieces``), hand it over while they go on training (``handover``), and merge
the two (``merge``) a fixed number of steps later: what a replica becomes depends on the seed and
its rows, never on when the bytes arrived. All calls come from the training thread.
"""

import time
from dataclasses import dataclass
from typing import Literal

import numpy as np
import torch
import xxhash
from torch import Tensor, nn
from torch.optim import Optimizer
from typing_extensions import Self

from dataio.base.checked import checked
from dataio.base.errors import ExchangeError
from dataio.world import World
from shuffle.models.agreement import check_agreement, check_arguments, weights_differ
from shuffle.models.handover import Handover, Header
from shuffle.models.merge import mean, merge
from shuffle.models.pieces import TensorPiece, cut_pieces, pack, place_pieces
from shuffle.models.plan import partner_of
from shuffle.models.state import STATE_VERSION, ModelExchangeState, RoundState, check_state
from shuffle.models.tensors import (
    digest_tensors,
    find_tensors,
    name_parameters,
    refuse_sharded,
)

Mode = Literal["average", "swap"]

USUAL_OVERLAP = 8


@dataclass
class _Round:
    """A round under way; without a handover all its bytes are here."""

    number: int
    partner: int
    pieces: tuple[TensorPiece, ...]
    mine: Tensor
    theirs: Tensor
    handover: Handover | None


@checked
class ModelExchange:
    """Average or swap models with a drawn partner every so many steps, while training goes on.

    Weights, buffers (such as batch-norm statistics) and the optimizer's tensors travel in their own
    dtype; parameters that never required a gradient stay. A replica that an odd number leaves over
    sits the round out. One replica alone exchanges nothing.

    Collective: every replica makes it with the same arguments and the same weights, before a
    checkpoint is loaded, and calls ``step`` equally often.

    Args:
        model: Trained by this replica alone: no DistributedDataParallel.
        optimizer: Its optimizer; None leaves moments where they are.
        world: All ranks, each a replica, such as ``loader.world``.
        every: Steps from one round to the next, >= 1.
        mode: ``"average"``: both partners go on from the mean. ``"swap"``: each goes on from the
            other's state, on its own rows.
        overlap: Steps that a round takes, in [0, every]; 0 waits at once. By default half of
            ``every``, 8 at most.
        seed: Of the partners.

    Raises:
        ValueError: If an argument is out of range, or the model is kept equal or split by torch.
        WorldError: If the replicas' arguments differ.
        ExchangeError: If their weights do.
    """

    def __init__(
        self,
        model: nn.Module,
        optimizer: Optimizer | None = None,
        *,
        world: World,
        every: int,
        mode: Mode = "average",
        overlap: int | None = None,
        seed: int = 0,
    ) -> None:
        self._overlap = min(every // 2, USUAL_OVERLAP) if overlap is None else overlap
        check_arguments(every=every, overlap=self._overlap, world=world)
        parameters = name_parameters(model, optimizer)
        refuse_sharded(model, parameters)
        self._model, self._optimizer, self._world = model, optimizer, world
        self._every, self._mode, self._seed = every, mode, seed
        self._arguments: dict[str, str | int] = {
            "every": every,
            "mode": mode,
            "overlap": self._overlap,
            "seed": seed,
            "num_replicas": world.num_replicas,
        }
        self._step = 0
        self._apart = False
        self._trained: set[str] = set()
        self._round: _Round | None = None
        self._buffers = _no_buffers()
        self._tag = world.open_channel()
        self._rounds = self._rounds_alone = self._messages = 0
        self._sent_bytes = self._early_bytes = self._round_bytes = 0
        self._blocked_s = self._copy_s = 0.0
        self._first_weights = digest_tensors(parameters.values())
        self._note_trained()
        check_agreement(
            world,
            parameters,
            arguments=self._arguments,
            optimizer=optimizer,
            weights=self._first_weights,
        )

    @property
    def round_bytes(self) -> int:
        """Bytes that a replica sends a round, in the last one; 0 before the first."""
        return self._round_bytes

    def step(self) -> None:
        """Count a step of the optimizer, right after it; begin and end rounds when due.

        Blocks only where a round is due whose bytes have not come, for ``world.timeout_s`` at most
        without any, and once, in the first round, for all replicas.

        Raises:
            StallError: If the partner does not answer; names it.
            ExchangeError: If all replicas turn out to be equal, or partners do not go together.
        """
        self._step += 1
        self.poll()
        if self._round and self._step >= self._round.number * self._every + self._overlap:
            self.flush()
        if self._step % self._every == 0:
            self._begin(self._step // self._every)
            if self._overlap == 0:
                self.flush()

    def poll(self) -> None:
        """Move a round under way on; of use between steps that last long. Never blocks."""
        if self._round and self._round.handover:
            self._round.handover.poll()

    def flush(self) -> None:
        """End a round under way now, for example before an evaluation. Blocks for the partner.

        Every replica calls it after the same step.
        """
        if self._round is None:
            return
        self._receive(self._round)
        start = time.perf_counter()
        merge(
            self._find_tensors(),
            self._round.pieces,
            mine=self._round.mine,
            theirs=self._round.theirs,
            average=self._mode == "average",
        )
        self._copy_s += time.perf_counter() - start
        self._rounds += 1
        self._round = None

    @torch.no_grad()
    def average_all(self) -> None:
        """Make all replicas one model, for evaluation or export. Collective; blocks for all.

        Parameters and buffers become the mean over replicas, the same bits everywhere; counts and
        flags the largest. Moments stay. All bytes pass through rank 0: once at the end of training,
        not every few steps.
        """
        self.flush()
        if self._world.world_size == 1:
            return
        tensors = find_tensors(self._model, None, trained=self._note_trained())
        for tensor in tensors.values():
            flat = tensor.cpu().reshape(-1)
            tensor.copy_(mean(self._world, flat).view(tensor.shape))

    def state_dict(self) -> ModelExchangeState:
        """What a resumed run needs beside model and optimizer, all of this replica.

        Every replica calls it after the same step. Blocks for the bytes of a round under way, which
        are part of the state, twice ``round_bytes``; between rounds it is a few numbers.
        """
        under_way: RoundState | None = None
        if self._round:
            self._receive(self._round)
            under_way = {
                "number": self._round.number,
                "pieces": [
                    (piece.name, str(piece.dtype).removeprefix("torch."), list(piece.shape))
                    for piece in self._round.pieces
                ],
                "mine": self._round.mine.clone(),
                "theirs": self._round.theirs.clone(),
            }
        return {
            "version": STATE_VERSION,
            "arguments": dict(self._arguments),
            "step": self._step,
            "apart": self._apart,
            "trained": sorted(self._trained),
            "round": under_way,
        }

    def load_state_dict(self, state: ModelExchangeState) -> None:
        """Go on where ``state_dict`` was called: the same bits as without a stop.

        Raises:
            StateError: If it is of another version or other arguments, or a round is under way.
        """
        under_way = None if self._round is None else self._round.number
        check_state(state, arguments=self._arguments, under_way=under_way)
        self._step, self._apart = state["step"], state["apart"]
        self._trained = set(state["trained"])
        saved = state["round"]
        if saved is None:
            return
        pieces = place_pieces(
            (name, getattr(torch, dtype), tuple(shape)) for name, dtype, shape in saved["pieces"]
        )
        mine, theirs = self._make_room(pieces)
        mine.copy_(saved["mine"])
        theirs.copy_(saved["theirs"])
        partner = self._partner(saved["number"])
        assert partner is not None, "a round is with a partner"
        self._round = _Round(saved["number"], partner, pieces, mine, theirs, None)

    def stats(self) -> dict[str, float]:
        """Figures of this replica since construction.

        Returns:
            ``rounds`` merged and ``rounds_alone`` sat out, ``sent_bytes``, ``messages``;
            ``blocked_s`` waiting for the partner, ``copy_s`` packing and merging, in seconds;
            ``overlap_fraction`` of the bytes had come before they were waited for.
        """
        return {
            "rounds": self._rounds,
            "rounds_alone": self._rounds_alone,
            "sent_bytes": self._sent_bytes,
            "messages": self._messages,
            "blocked_s": self._blocked_s,
            "copy_s": self._copy_s,
            "overlap_fraction": self._early_bytes / max(self._sent_bytes, 1),
        }

    def close(self) -> None:
        """End a round under way, which its partner waits for, and give the buffers back."""
        self.flush()
        self._buffers = _no_buffers()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, *_: object) -> None:
        # After an error the partner may never answer
        if kind is None:
            self.close()

    def _begin(self, number: int) -> None:
        if not self._apart and self._world.world_size > 1:
            named = name_parameters(self._model, self._optimizer)
            self._apart = weights_differ(
                self._world, named, first=self._first_weights, step=self._step
            )
        partner = self._partner(number)
        if partner is None:
            self._rounds_alone += 1
            return
        start = time.perf_counter()
        tensors = self._find_tensors()
        pieces = cut_pieces(tensors)
        mine, theirs = self._make_room(pieces)
        pack(tensors, pieces, mine)
        self._copy_s += time.perf_counter() - start
        self._round_bytes = len(mine)
        handover = self._hand_over(number, partner, pieces, mine, theirs)
        self._round = _Round(number, partner, pieces, mine, theirs, handover)
        handover.poll()

    def _hand_over(
        self,
        number: int,
        partner: int,
        pieces: tuple[TensorPiece, ...],
        mine: Tensor,
        theirs: Tensor,
    ) -> Handover:
        rank = self._world.rank_of_replica(partner)
        header = np.array([number, len(pieces), len(mine), _digest(pieces)], np.uint64)

        def check(found: Header) -> None:
            if found.tobytes() != header.tobytes():
                raise ExchangeError(
                    f"[rank {self._world.rank}] ModelExchange: in round {number} rank {rank} sends "
                    f"{_words(found)}, expected {_words(header)}, as here; every replica must load "
                    f"a checkpoint of the same step, and give all parameters of the optimizer a "
                    f"gradient, zeros will do, before its first step"
                )

        return Handover(
            self._world,
            peer=rank,
            tag=self._tag,
            mine=mine.numpy(),
            theirs=theirs.numpy(),
            header=header,
            check=check,
            doing=f"exchanging models in round {number}",
        )

    def _receive(self, trade: _Round) -> None:
        """Wait for the bytes of a round. Blocks for the partner."""
        if trade.handover is None:
            return
        handover, start = trade.handover, time.perf_counter()
        handover.poll()
        early = handover.arrived_bytes
        handover.wait()
        self._blocked_s += time.perf_counter() - start
        self._early_bytes += early
        self._sent_bytes += len(trade.mine)
        self._messages += handover.messages
        trade.handover = None

    def _partner(self, number: int) -> int | None:
        return partner_of(
            self._world.replica,
            num_replicas=self._world.num_replicas,
            seed=self._seed,
            round_number=number,
        )

    def _make_room(self, pieces: tuple[TensorPiece, ...]) -> tuple[Tensor, Tensor]:
        """Hand out both buffers; they are used again until a round is larger."""
        num_bytes = pieces[-1].stop
        if num_bytes > len(self._buffers[0]):
            on_device = any(parameter.is_cuda for parameter in self._model.parameters())
            self._buffers = [
                torch.zeros(num_bytes, dtype=torch.uint8, pin_memory=on_device) for _ in range(2)
            ]
        mine, theirs = self._buffers
        return mine[:num_bytes], theirs[:num_bytes]

    def _find_tensors(self) -> dict[str, Tensor]:
        return find_tensors(self._model, self._optimizer, trained=self._note_trained())

    def _note_trained(self) -> set[str]:
        # A parameter that is frozen now may have been trained apart before
        named = name_parameters(self._model, self._optimizer)
        self._trained |= {name for name, value in named.items() if value.requires_grad}
        return self._trained


def _no_buffers() -> list[Tensor]:
    return [torch.empty(0, dtype=torch.uint8) for _ in range(2)]


def _digest(pieces: tuple[TensorPiece, ...]) -> int:
    return xxhash.xxh3_64_intdigest(repr(pieces).encode())


def _words(header: Header) -> str:
    number, tensors, num_bytes, digest = header.tolist()
    return f"round {number}: {tensors} tensors, {num_bytes} bytes (names and shapes {digest:x})"
