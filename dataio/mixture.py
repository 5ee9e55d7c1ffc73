"""Several datasets as one: each step's batch comes from one of them, in the proportions asked for.

All ranks draw from the same dataset at a step, so a step's rows are of one kind everywhere and
the loaders' own collective calls meet.
"""

import json
import os
from collections.abc import Callable, Generator, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from dataio.base.atomic import write_record
from dataio.base.checked import checked
from dataio.base.errors import StateError
from dataio.base.permutation import permute
from dataio.base.seeding import Key, digest, key
from dataio.iterations import Iterations, Loop
from dataio.loader import Loader
from dataio.plan.by_step import ByStep, StepOrder, Weights, check_weights
from dataio.rows.samples import Batch
from dataio.state.resume import check_signed, sign
from dataio.state.saves import CURE, clear, find_save, lost, named, read_saved, replacing
from dataio.state.snapshot import STATE
from dataio.world import World
from dataio.world.agree import agree, together

MIXTURE = "mixture.json"
EMPTY_EPOCHS = 3
"""Epochs without a batch, as when all rows are hidden, before it is an error."""


@checked
class Mixture:
    """Draws batches from loaders by weight; an epoch is a number of steps.

    A loader whose epoch is used up begins its next one: every dataset goes round at its own pace,
    each of its samples once a lap. Rows that a loader hides get no new score at the end of a lap.
    Collective: as `Loader`'s calls are.

    Args:
        loaders: By name; closed with the mixture.
        weights: Share of the steps that each loader gets, in any scale; or a function of the
            epoch, the same on all ranks; or `ByStep`, where they change within an epoch.
        steps: Steps of an epoch; by default as many as one lap of all loaders; to be given where
            the data of one of them grows.
        seed: Of the order in which they take turns.

    Attributes:
        lost_with_ranks: As `Loader.lost_with_ranks`.

    Raises:
        ValueError: If the names do not match, or a weight is negative or all are 0.
    """

    def __init__(
        self,
        loaders: Mapping[str, Loader],
        weights: Weights | Callable[[int], Weights] | ByStep,
        *,
        steps: int | None = None,
        seed: int = 0,
    ) -> None:
        if not loaders:
            raise ValueError('Mixture: no loaders given; name some, such as {"web": loader}')
        self.loaders = dict(loaders)
        growing = [name for name, loader in loaders.items() if loader.grows]
        if growing and steps is None:
            raise ValueError(
                f"Mixture: the data of {growing[0]!r} grows, so a lap of all loaders is not as "
                "long at every start; give steps="
            )
        self._weights = weights
        lost = [each.lost_with_ranks for each in self.loaders.values()]
        self.lost_with_ranks = max(lost) or ("" if steps else "the steps of a lap")
        self._steps = steps if steps is not None else sum(map(len, self.loaders.values()))
        if self._steps < 1:
            raise ValueError(f"Mixture: steps is {steps}; give a number >= 1")
        self.seed = seed
        self.epoch = 0
        self.step = 0
        self._order: StepOrder | None = None
        if isinstance(weights, ByStep):
            self._order = StepOrder(weights, list(self.loaders), key(seed, "mixture"))
        self._open: dict[str, Iterator[Batch]] = {}
        self._iterations = Iterations("Mixture")
        self._plan = self._planned(0)

    def _planned(self, epoch: int) -> NDArray[np.int64]:
        """int64[steps]: The loader that each step draws from, by number."""
        if self._order is not None:
            first = epoch * self._steps
            return self._order.plan(range(first, first + self._steps))
        weights = self._weights(epoch) if callable(self._weights) else self._weights
        assert not isinstance(weights, ByStep)
        shares = np.array(check_weights(weights, list(self.loaders), when=f"epoch {epoch}"))
        counts = _apportion(shares / shares.sum(), self._steps)
        order = np.repeat(np.arange(len(counts)), counts)
        return order[permute(np.arange(self._steps), self._steps, self._key(epoch))]

    def _key(self, epoch: int) -> Key:
        return key(self.seed, "mixture", epoch=epoch)

    def __len__(self) -> int:
        """Count an epoch's steps."""
        return self._steps

    def epochs(self, num_epochs: int) -> Iterator[int]:
        """Yield the epochs that remain of a run; after a restore, first the interrupted one."""
        if self.step >= self._steps:
            if self.epoch + 1 >= num_epochs:
                return
            self._begin(self.epoch + 1)
        with self._iterations.led():
            while self.epoch < num_epochs:
                yield self.epoch
                if self.epoch + 1 >= num_epochs:
                    return
                self._begin(self.epoch + 1)

    def set_epoch(self, epoch: int) -> None:
        """Begin an epoch, with its weights. The loaders stay where they are in theirs."""
        if epoch != self.epoch:
            self._begin(epoch)
        self._iterations.ask()

    def _begin(self, epoch: int) -> None:
        self._plan = self._planned(epoch)
        self.epoch, self.step = epoch, 0
        self._iterations.begin_epoch()

    def __iter__(self) -> Iterator[Batch]:
        """Yield the rest of the epoch's batches; if there are none, those of the next epoch.

        ``batch["dataset"]`` is the loader's name. See `Loader.__iter__`.

        Raises:
            StateError: If it is the second whole loop in one epoch of `epochs`; or from ``next``,
                if another loop has begun since.
        """
        return Loop(self._iterations, self._batches())

    def _batches(self) -> Generator[Batch, None, None]:
        start = self._iterations.start(self.epoch, is_used_up=self.step >= self._steps)
        if start == "next epoch":
            self._begin(self.epoch + 1)
        elif start == "again":
            self.step = 0
        names = list(self.loaders)
        while self.step < self._steps:
            name = names[self._plan[self.step]]
            batch = self._next(name)
            self.step += 1
            yield batch | {"dataset": name}
        self._iterations.end()

    def skip(self, num_batches: int) -> None:
        """Pass over the next batches of the epoch, each one of its loader's; see `Loader.skip`.

        Raises:
            ValueError: If the epoch has not as many left.
        """
        left = self._steps - self.step
        if not 0 <= num_batches <= left:
            raise ValueError(
                f"Mixture.skip: {num_batches} batches, expected a number in [0, {left}], as many "
                f"as epoch {self.epoch} has left; pass over the others in the next epoch"
            )
        self._iterations.break_off()
        self._open.clear()
        names = list(self.loaders)
        for number in self._plan[self.step : self.step + num_batches].tolist():
            loader = self.loaders[names[number]]
            for _ in range(EMPTY_EPOCHS):
                if loader.is_used_up():
                    loader.set_epoch(loader.epoch + 1)
            loader.skip(1)
            self.step += 1

    def _next(self, name: str) -> Batch:
        loader = self.loaders[name]
        used_up = 0
        while True:
            if loader.is_used_up():
                used_up += 1
                if used_up > EMPTY_EPOCHS:
                    raise ValueError(
                        f"Mixture: {EMPTY_EPOCHS} epochs in a row of {name!r} had no batch, "
                        "expected at least one; lower its batch_size, or hide fewer of its rows"
                    )
                loader.set_epoch(loader.epoch + 1)
                self._open.pop(name, None)
            if name not in self._open:
                self._open[name] = iter(loader)
            batch = next(self._open[name], None)
            if batch is not None:
                return batch

    def report(
        self,
        batch: Batch,
        loss: torch.Tensor,
        correct: torch.Tensor | None = None,
        confidence: torch.Tensor | None = None,
    ) -> None:
        """Report to the batch's loader what its rows cost; see `Loader.report`."""
        self.loaders[str(batch["dataset"])].report(batch, loss, correct, confidence)

    def stats(self) -> dict[str, dict[str, float]]:
        """Each loader's figures, by name; see `Loader.stats`."""
        return {name: loader.stats() for name, loader in self.loaders.items()}

    def state_dict(self) -> dict[str, object]:
        """Say where the mixture and its loaders stand, as JSON."""
        states = {name: loader.state_dict() for name, loader in self.loaders.items()}
        return sign({**self._mine(), "loaders": states})

    def _mine(self) -> dict[str, object]:
        return {"seed": self.seed, "steps": self._steps, "epoch": self.epoch, "step": self.step}

    def load_state_dict(self, state: Mapping[str, object]) -> None:
        """Go on from where `state_dict` was taken; each loader as `Loader.load_state_dict` says.

        Raises:
            StateError: If it is of other loaders, another seed or number of steps, or damaged.
        """
        self._load(state, lambda name, each: self.loaders[name].load_state_dict(each))

    def remember(self) -> Any:
        """As `Loader.remember`."""
        return {name: loader.remember() for name, loader in self.loaders.items()}

    def count(self, state: Mapping[str, Any]) -> None:
        """As `Loader.count`."""
        for name, loader in self.loaders.items():
            loader.count(state["loaders"][name])

    def go_on(self, state: Mapping[str, object], remembered: Sequence[Any]) -> None:
        """As `Loader.go_on`."""
        self._load(
            state,
            lambda name, each: self.loaders[name].go_on(each, [one[name] for one in remembered]),
        )

    def _load(
        self, state: Mapping[str, object], load: Callable[[str, dict[str, object]], None]
    ) -> None:
        states = state.get("loaders")
        if not isinstance(states, dict) or set(states) != set(self.loaders):
            raise StateError(
                f"checkpoint: holds no state of exactly the loaders {', '.join(self.loaders)}; "
                "make the mixture as it was when the checkpoint was written"
            )
        self._check(state)
        check_signed(state)
        self._open.clear()
        for name in self.loaders:
            load(name, states[name])
        self._go_to(state)

    def _check(self, state: Mapping[str, object]) -> None:
        for name in ("seed", "steps"):
            if (was := state.get(name)) != self._mine()[name]:
                raise StateError(
                    f"checkpoint: the mixture's {name} is {was}, this one has "
                    f"{self._mine()[name]}; give Mixture(..., {name}={was})"
                )

    def _go_to(self, state: Mapping[str, object]) -> None:
        self._open.clear()
        self._iterations.begin_epoch()
        self.epoch, self.step = int(str(state["epoch"])), int(str(state["step"]))
        self._plan = self._planned(self.epoch)

    def save(self, path: str | os.PathLike[str]) -> None:
        """Write all loaders' states into a directory that all nodes see; see `Loader.save`.

        Args:
            path: A directory of its own: new, empty, or an earlier save, which is replaced when the
                new one is whole.
        """
        root, world = Path(path), self._world
        # Whole or not at all: loaders that stand at different times would skip or repeat samples
        with replacing(root, world, parts=list(self.loaders)) as partial:
            for name, loader in self.loaders.items():
                loader.save(partial / name)

            def write() -> None:
                with named(root):
                    record = {"mixture": self._mine(), "loaders": self._sums(partial)}
                    write_record(partial / MIXTURE, record)

            together(world, lambda: write() if world.rank == 0 else None, doing="save the mixture")

    def restore(self, path: str | os.PathLike[str]) -> None:
        """Go on exactly where `save` was called; see `Loader.restore`.

        Raises:
            StateError: On all ranks, if nothing was saved there, if it is damaged, or by another
                mixture.
        """
        root, world = Path(path).resolve(), self._world

        def find() -> bytes:
            if world.rank:
                return b""
            found = find_save(root, MIXTURE)
            record = read_saved(found / MIXTURE)
            self._check_parts(found, record)
            return json.dumps([found.name, record["mixture"]]).encode()

        name, state = json.loads(agree(world, find, doing="find what was saved")[0])
        self._check(state)
        self._open.clear()
        for part, loader in self.loaders.items():
            loader.restore(root.with_name(name) / part)
        self._go_to(state)
        if world.rank == 0:
            clear(root.parent)

    @property
    def _world(self) -> World:
        return next(iter(self.loaders.values())).world

    def _sums(self, root: Path) -> dict[str, str]:
        """Digest what names all parts of each loader's save."""
        return {name: digest((root / name / STATE).read_bytes()) for name in self.loaders}

    def _check_parts(self, root: Path, record: Mapping[str, Any]) -> None:
        """Refuse loaders' saves that are not those of the mixture's.

        Raises:
            StateError: It names the first.
        """
        saved = record["loaders"]
        if set(saved) != set(self.loaders):
            raise StateError(
                f"{root}: holds the loaders {', '.join(sorted(saved))}, this mixture has "
                f"{', '.join(sorted(self.loaders))}; make it as it was when it was saved"
            )
        for name, expected in saved.items():
            file = root / name / STATE
            try:
                found = digest(file.read_bytes())
            except OSError as error:
                raise lost(file, error) from error
            if found != expected:
                raise StateError(
                    f"{file}: is damaged or of another save: its digest is {found}, {MIXTURE} says "
                    f"{expected}; {CURE}"
                )

    def close(self) -> None:
        """Close all loaders."""
        self._open.clear()
        for loader in self.loaders.values():
            loader.close()

    def __enter__(self) -> "Mixture":
        return self

    def __exit__(self, kind: type[BaseException] | None, *_: object) -> None:
        for loader in self.loaders.values():
            loader.__exit__(kind)


def _apportion(shares: NDArray[np.float64], total: int) -> NDArray[np.int64]:
    """Round shares of a total to whole numbers that add up, largest remainders first."""
    exact = shares * total
    counts = np.floor(exact).astype(np.int64)
    order = np.argsort(counts - exact, kind="stable")
    counts[order[: total - counts.sum()]] += 1
    return counts
