"""Notices what else than its ``rng`` a transform draws from, and makes it draw the same each time.

Where it is looked at, and where the global generators are seeded for it, is the loader's own
thread: nobody else draws meanwhile, and the training loop finds them as it left them. Until it was
seen to draw from them, a transform runs on any thread.
"""

import copy
import logging
from collections.abc import Callable, Mapping
from typing import Literal, TypeVar

import numpy as np
import torch
from PIL import Image as Pillow

from dataio.base.seeding import Key, generator
from dataio.batch.global_generators import global_states, globals_kept, seed_globals
from dataio.rows.samples import AsList

T = TypeVar("T")
V = TypeVar("V")
How = Literal["free", "look", "seeded"]
"""On any thread; or on the loader's own: looked at, or with the global generators seeded."""

ROWS_LOOKED_AT = 4
LOOK_EVERY = 256
"""Batches from one look to the next, at last: looks become rarer."""

log = logging.getLogger(__name__)


class TransformWatch:
    """Watches one transform of a loader.

    Args:
        what: Its name, for the log.
        unit: What it is called for: ``"sample"`` or ``"batch"``.
        cure: What to do instead of drawing from global generators.
        logs: Whether this rank logs.
        is_alone: In a process of its own, where the global generators are always seeded.

    Attributes:
        draws: Whether it was seen to draw from global generators.
    """

    def __init__(
        self, what: str, *, unit: str, cure: str, logs: bool = True, is_alone: bool = False
    ) -> None:
        self._what, self._unit, self._cure = what, unit, cure
        self._logs, self._is_alone = logs, is_alone
        self.draws = self._was_tried = False
        self._num_batches = 0

    def plan(self) -> How:
        """Decide how it is called for the next batch."""
        if self.draws:
            return "seeded"
        self._num_batches += 1
        number = self._num_batches
        return "free" if number & (number - 1) and number % LOOK_EVERY else "look"

    def call(
        self, function: Callable[[V, np.random.Generator], T], value: V, stream: Key, how: How
    ) -> T:
        """Call it. Where it is seeded, the caller keeps the global generators."""
        if how == "look":
            with globals_kept():
                return self._look(function, value, stream)
        if how == "seeded" or self._is_alone:
            seed_globals(stream)
        return function(value, generator(stream))

    def _look(self, function: Callable[[V, np.random.Generator], T], value: V, stream: Key) -> T:
        tried: T | None = None
        tries = not self._was_tried
        if tries:
            self._was_tried = True
            seed_globals(stream)
            # A copy: it may write into what it is given.
            tried = function(copy.deepcopy(value), generator(stream))
        seed_globals(stream)
        before = global_states()
        result = function(value, generator(stream))
        after = global_states()
        drawn = [name for name in before if before[name] != after[name]]
        if drawn and not self._is_alone and not self.draws:
            self.draws = True
            self._warn_that_it_draws(drawn)
        if tries and not _is_same(tried, result):
            self._warn(
                f"{self._what}: gives another result for the same {self._unit} and rng when it is "
                "called again, expected what these decide; it has a generator or another state of "
                "its own, so that other runs and numbers of threads give other batches: draw from "
                "rng, or seed that generator from rng in each call, with Workers(processes=...)"
            )
        return result

    def _warn_that_it_draws(self, drawn: list[str]) -> None:
        late = ""
        if self._num_batches > 1:
            late = f" In {self._num_batches - 1} batches before it they were not: these differ "
            late += "from run to run."
        self._warn(
            f"{self._what}: draws from the global generators of {', '.join(drawn)}; these are now "
            f"seeded for each {self._unit}, so that any number of threads gives the same batches, "
            f"and it runs on the loader's own thread, which is slower; {self._cure}.{late}"
        )

    def _warn(self, message: str) -> None:
        if self._logs:
            log.warning("%s", message)


def _is_same(one: object, other: object) -> bool:
    """Whether two results are equal, as far as it can be seen."""
    if isinstance(one, Mapping) and isinstance(other, Mapping):
        return one.keys() == other.keys() and all(_is_same(one[k], other[k]) for k in one)
    if isinstance(one, (list, tuple)) and isinstance(other, (list, tuple)):
        return len(one) == len(other) and all(map(_is_same, one, other))
    if isinstance(one, AsList) and isinstance(other, AsList):
        return _is_same(one.value, other.value)
    if isinstance(one, Pillow.Image) and isinstance(other, Pillow.Image):
        return one == other
    if isinstance(one, torch.Tensor) and isinstance(other, torch.Tensor):
        same_form = one.shape == other.shape and one.dtype == other.dtype
        # A nan is like another.
        return same_form and bool(((one == other) | ((one != one) & (other != other))).all())
    if isinstance(one, (np.ndarray, np.generic)) and isinstance(other, (np.ndarray, np.generic)):
        return np.asarray(one).tobytes() == np.asarray(other).tobytes()
    plain = (bool, int, float, complex, str, bytes)
    return not (isinstance(one, plain) and isinstance(other, plain)) or one == other or one != one
