"""Small modules as people write them: each keeps, draws or changes something in its own way."""

import functools
import threading
from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.nn.utils import parametrize
from torch.nn.utils.parametrizations import spectral_norm, weight_norm

WIDTH, HIDDEN, CLASSES = 8, 16, 3

TABLES: dict[tuple[int, ...], Tensor] = {}
CALLS = [0]
counted = 0


@functools.lru_cache
def table_of(width: int) -> Tensor:
    """Keep a table by its size."""
    return torch.sin(torch.arange(width).float())


class Two(nn.Module):
    """Two layers, and what others add between them."""

    def __init__(self) -> None:
        super().__init__()
        self.stem, self.head = nn.Linear(WIDTH, HIDDEN), nn.Linear(HIDDEN, CLASSES)

    def forward(self, x: Tensor) -> Tensor:
        """Give logits."""
        logits: Tensor = self.head(self.between(self.stem(x)).tanh())
        return logits

    def between(self, hidden: Tensor) -> Tensor:
        """Change the hidden tensor."""
        return hidden


class FrozenInEval(Two):
    """A frozen part with batch statistics, put into evaluation by hand."""

    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.BatchNorm1d(HIDDEN).requires_grad_(False).eval()

    def between(self, hidden: Tensor) -> Tensor:
        """Normalise by what it knew."""
        found: Tensor = self.norm(hidden)
        return found


class KeepsEval(FrozenInEval):
    """Does so in its own ``train``."""

    def __init__(self) -> None:
        super().__init__()
        self.norm.train()

    def train(self, mode: bool = True) -> "KeepsEval":
        """Leave the norm in evaluation."""
        super().train(mode)
        self.norm.eval()
        return self


class AllInEval(Two):
    """As a library gives it: in evaluation, batch statistics and all."""

    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.BatchNorm1d(HIDDEN)
        self.eval()

    def between(self, hidden: Tensor) -> Tensor:
        """Normalise."""
        found: Tensor = self.norm(hidden)
        return found


class Hooked(Two):
    """Gradients of one layer are made smaller, rows of the other are masked."""

    def __init__(self) -> None:
        super().__init__()
        self.stem.weight.register_hook(lambda gradient: gradient * 0.1)
        mask = torch.ones(CLASSES, 1)
        mask[0] = 0
        self.head.weight.register_hook(lambda gradient: gradient * mask)


class HookedLate(Two):
    """A gradient is changed once it is added up."""

    def __init__(self) -> None:
        super().__init__()
        self.stem.weight.register_post_accumulate_grad_hook(_halve)


def _halve(parameter: Tensor) -> None:
    assert parameter.grad is not None
    parameter.grad.mul_(0.5)


class Tied(Two):
    """A weight that two layers share.

    Args:
        by_data: By its memory alone.
    """

    def __init__(self, *, by_data: bool) -> None:
        super().__init__()
        self.a, self.b = nn.Linear(HIDDEN, HIDDEN), nn.Linear(HIDDEN, HIDDEN)
        if by_data:
            self.b.weight.data = self.a.weight.data
        else:
            self.b.weight = self.a.weight

    def between(self, hidden: Tensor) -> Tensor:
        """Pass through both."""
        found: Tensor = self.b(self.a(hidden).tanh())
        return found


class Anneals(Two):
    """A temperature that each forward pass lowers, in evaluation too."""

    def __init__(self) -> None:
        super().__init__()
        self.temperature = 2.0

    def between(self, hidden: Tensor) -> Tensor:
        """Divide by it."""
        self.temperature = max(0.5, self.temperature * 0.8)
        return hidden / self.temperature


class Caches(Two):
    """Keeps a table that its first forward pass makes.

    Args:
        where: In what.
    """

    held: Tensor | None = None

    def __init__(self, where: str) -> None:
        super().__init__()
        self.where = where
        self.kept: Tensor | None = None

    def between(self, hidden: Tensor) -> Tensor:
        """Add the table."""
        return hidden + self.table(hidden)

    def table(self, hidden: Tensor) -> Tensor:
        """Take the table, or make it."""
        width = hidden.shape[-1]
        if self.where == "lru_cache":
            return table_of(width).to(hidden)
        if self.where == "dict":
            if (width,) not in TABLES:
                TABLES[(width,)] = torch.sin(torch.arange(width).to(hidden))
            return TABLES[(width,)]
        if self.where == "class":
            if Caches.held is None:
                Caches.held = torch.sin(torch.arange(width).to(hidden))
            return Caches.held
        if self.where == "buffer":
            if not hasattr(self, "lazy"):
                made = torch.sin(torch.arange(width).to(hidden))
                self.register_buffer("lazy", made, persistent=False)
            return self.get_buffer("lazy")
        if self.kept is None:
            self.kept = torch.sin(torch.arange(width).to(hidden))
        return self.kept


class Counts(Two):
    """Forward passes are counted, and scale what it gives.

    Args:
        where: In what.
    """

    def __init__(self, where: str) -> None:
        super().__init__()
        self.where = where
        self.calls: Tensor
        self.register_buffer("calls", torch.zeros(()))
        self.plain = torch.zeros(())

    def between(self, hidden: Tensor) -> Tensor:
        """Scale by the count."""
        found: Tensor = hidden * (1 + self.count() / 8)
        return found

    def count(self) -> Any:
        """Count one more."""
        global counted
        if self.where == "rebound":
            self.calls = self.calls + 1
            return self.calls
        if self.where == "buffer":
            self.calls += 1
            return self.calls.clone()
        if self.where == "tensor":
            self.plain += 1
            return self.plain.clone()
        if self.training and self.where == "list":
            CALLS[0] += 1
        elif self.training:
            counted += 1
        return CALLS[0] if self.where == "list" else counted


class Spectral(Two):
    """Weights that are computed of others, by vectors that forward updates."""

    def __init__(self) -> None:
        super().__init__()
        spectral_norm(weight_norm(self.stem))


class OldNorms(Two):
    """The older of torch's weight and spectral norms, by hooks before forward."""

    def __init__(self) -> None:
        super().__init__()
        with torch.no_grad():
            self.stem = nn.utils.spectral_norm(self.stem)
        self.head = torch.nn.utils.weight_norm(self.head)


class _Symmetric(nn.Module):
    def forward(self, weight: Tensor) -> Tensor:
        return weight.triu() + weight.triu(1).T


class Parametrized(Two):
    """A weight that is symmetric, by a parametrization."""

    def __init__(self) -> None:
        super().__init__()
        self.middle = nn.Linear(HIDDEN, HIDDEN)
        parametrize.register_parametrization(self.middle, "weight", _Symmetric())

    def between(self, hidden: Tensor) -> Tensor:
        """Pass through it."""
        found: Tensor = self.middle(hidden)
        return found


class OwnGenerator(Two):
    """Drops by a generator of its own, in training."""

    def __init__(self) -> None:
        super().__init__()
        self.draws = torch.Generator().manual_seed(3)

    def between(self, hidden: Tensor) -> Tensor:
        """Drop half."""
        if not self.training:
            return hidden
        return hidden * torch.bernoulli(torch.full_like(hidden, 0.5), generator=self.draws)


class Compiled(Two):
    """A layer that is compiled where it is made."""

    def __init__(self) -> None:
        super().__init__()
        middle = nn.Sequential(nn.Linear(HIDDEN, HIDDEN), nn.GELU())
        self.middle: Any = torch.compile(middle, backend="eager")

    def between(self, hidden: Tensor) -> Tensor:
        """Pass through it."""
        found: Tensor = self.middle(hidden)
        return found


class Locked(Two):
    """Holds what cannot be copied."""

    def __init__(self) -> None:
        super().__init__()
        self.lock, self.numbers = threading.Lock(), iter(range(1, 100))

    def between(self, hidden: Tensor) -> Tensor:
        """Scale in a lock."""
        with self.lock:
            return hidden * 1.5


class ListsWeights(Two):
    """Adds a penalty on weights that it lists, as auxiliary logits."""

    def __init__(self) -> None:
        super().__init__()
        self.listed = [self.stem.weight]

    def between(self, hidden: Tensor) -> Tensor:
        """Scale by their norm."""
        scaled: Tensor = hidden * torch.linalg.vector_norm(self.listed[0])
        return scaled


class Features(Two):
    """Takes what a layer gives by a hook, which holds the module in a closure."""

    def __init__(self) -> None:
        super().__init__()
        self.seen: list[Tensor] = []
        self.stem.register_forward_hook(lambda module, given, made: self.seen.append(made))

    def between(self, hidden: Tensor) -> Tensor:
        """Add what was seen."""
        return hidden + self.seen.pop() + len(self.seen)


class Looks(Two):
    """Decides by values, and computes in NumPy."""

    def between(self, hidden: Tensor) -> Tensor:
        """Scale by a number of Python's."""
        scale = float(hidden.detach().numpy().std())
        return hidden / scale if hidden.sum().item() > 0 else hidden * scale


class Renormed(Two):
    """Keeps its rows short, in evaluation too."""

    def between(self, hidden: Tensor) -> Tensor:
        """Shorten a weight in place."""
        with torch.no_grad():
            self.head.weight.data.renorm_(2, 0, 0.2 if self.training else 0.1)
        return hidden


class Merges(Two):
    """Merges an addition into a weight for evaluation, as LoRA does."""

    def __init__(self) -> None:
        super().__init__()
        self.added = nn.Parameter(torch.randn(HIDDEN, HIDDEN) / 9)
        self.middle = nn.Linear(HIDDEN, HIDDEN)
        self.merged = False

    def train(self, mode: bool = True) -> "Merges":
        """Merge, or take apart."""
        if mode == self.merged:
            with torch.no_grad():
                self.middle.weight.add_(self.added, alpha=-1 if mode else 1)
            self.merged = not mode
        super().train(mode)
        return self

    def between(self, hidden: Tensor) -> Tensor:
        """Pass through both."""
        found: Tensor = self.middle(hidden)
        return found if self.merged else found + F.linear(hidden, self.added)


class Drops(Two):
    """Dropout, as a module and as a function."""

    def __init__(self) -> None:
        super().__init__()
        self.drop = nn.Dropout(0.2)

    def between(self, hidden: Tensor) -> Tensor:
        """Drop twice."""
        found: Tensor = F.dropout(self.drop(hidden), 0.2, training=self.training)
        return found


class Recurrent(Two):
    """An LSTM over what the stem gives, two places at a time."""

    def __init__(self) -> None:
        super().__init__()
        self.cell = nn.LSTM(2, HIDDEN, batch_first=True)

    def between(self, hidden: Tensor) -> Tensor:
        """Give the last state."""
        found: Tensor = self.cell(hidden.unflatten(1, (-1, 2)))[0][:, -1]
        return found


class InPlace(Two):
    """Scales its input in place."""

    def forward(self, x: Tensor) -> Tensor:
        """Give logits."""
        return super().forward(x.mul_(0.5))


IDIOMS: dict[str, Callable[[], nn.Module]] = {
    "frozen in eval": FrozenInEval, "keeps eval": KeepsEval, "all in eval": AllInEval,
    "gradient hook": Hooked, "hook after": HookedLate,
    "tied": lambda: Tied(by_data=False), "tied by data": lambda: Tied(by_data=True),
    "anneals": Anneals,
    **{f"caches in {where}": functools.partial(Caches, where)
       for where in ("attribute", "buffer", "lru_cache", "dict", "class")},
    **{f"counts in {where}": functools.partial(Counts, where)
       for where in ("buffer", "rebound", "tensor", "list", "global")},
    "spectral": Spectral, "old norms": OldNorms, "parametrized": Parametrized,
    "own generator": OwnGenerator, "compiled": Compiled, "locked": Locked,
    "lists weights": ListsWeights, "features": Features, "looks": Looks, "renormed": Renormed,
    "merges": Merges, "drops": Drops, "recurrent": Recurrent, "in place": InPlace,
}  # fmt: skip


def forget() -> None:
    """Empty what is kept outside of modules."""
    global counted
    TABLES.clear()
    table_of.cache_clear()
    Caches.held, CALLS[0], counted = None, 0, 0
