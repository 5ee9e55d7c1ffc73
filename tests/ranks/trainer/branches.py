"""Models with branches on some ranks, or all in one process: what two steps make of them.

Arguments: directory, file of a whole state dict for each case. Each rank writes, by case, its rows'
losses, norm, gradients and state, and the whole state that it gathered.
"""

import json
import sys
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.functional import cross_entropy, normalize

from dataio.job.launch import join
from tonari.trainer.mesh.average import average_gradients
from tonari.trainer.mesh.branches import Branches, clip_grad_norm, gather_rows

ROWS, MAX_NORM, CASES = 8, 0.2, ("inception", "dropped", "one branch", "raw", "towers")


class Cell(nn.Module):
    """A stem, branches, and a head behind a dropout."""

    def __init__(self, stem: nn.Module, branches: Branches, width: int) -> None:
        super().__init__()
        self.stem, self.cell = stem, branches
        self.head = nn.Sequential(nn.Flatten(), nn.Dropout(0.3), nn.Linear(width * 16, 5))

    def forward(self, batch: dict[str, Tensor]) -> Tensor:
        """Give the losses of rows."""
        logits = self.head(self.cell(self.stem(batch["image"])))
        return cross_entropy(logits, batch["label"], reduction="none")


class Tower(nn.Module):
    """Embeds one field of a batch."""

    def __init__(self, name: str, width: int) -> None:
        super().__init__()
        self.name = name
        self.layers = nn.Sequential(nn.Flatten(), nn.Linear(width, 9), nn.Tanh(), nn.Linear(9, 4))

    def forward(self, batch: dict[str, Tensor]) -> Tensor:
        """Give floating[rows, 4]."""
        return normalize(self.layers(batch[self.name]))


class Towers(nn.Module):
    """Two towers, and the losses of rows among all rows of all replicas."""

    def __init__(self, branches: Branches, replicas: Any) -> None:
        super().__init__()
        self.towers, self.replicas = branches, replicas
        self.scale = nn.Parameter(torch.tensor(3.0))

    def forward(self, batch: dict[str, Tensor]) -> Tensor:
        """Give the losses of rows."""
        mine = self.towers(batch)
        every = mine
        begin = 0
        if self.replicas is not None:
            every = [gather_rows(each, self.replicas) for each in mine]
            begin = dist.get_rank(self.replicas) * len(mine[0])
        target = torch.arange(begin, begin + len(mine[0]))
        pairs = ((mine[0], every[1]), (mine[1], every[0]))
        each = [cross_entropy(self.scale * a @ b.T, target, reduction="none") for a, b in pairs]
        return (each[0] + each[1]) / 2


def conv(width: int, size: int, *more: nn.Module) -> nn.Sequential:
    return nn.Sequential(nn.Conv2d(6, width, size, padding=size // 2), nn.Tanh(), *more)


def make(case: str, pair: Any = None, replicas: Any = None) -> nn.Module:
    """Make a case's model, whatever its weights."""
    stem: nn.Module = nn.Sequential(nn.Conv2d(3, 6, 3, padding=1), nn.Tanh())
    if case == "inception":
        pooled = nn.Sequential(nn.AvgPool2d(3, 1, 1), conv(2, 1))
        cell = [conv(4, 1), nn.Sequential(conv(6, 1), conv(3, 3)), conv(1, 5), pooled]
        model: nn.Module = Cell(stem, Branches(cell, join="concat"), 10)
    elif case == "dropped":
        cell = [conv(4, size, nn.Dropout(0.4)) for size in (1, 3, 5)]
        model = Cell(stem, Branches(cell, costs=[1, 2, 2]), 4)
    elif case == "one branch":
        model = Cell(stem, Branches([conv(4, 1)], join="concat"), 4)
    elif case == "raw":
        plain = [nn.Conv2d(3, 2, 1), nn.Identity(), nn.Conv2d(3, 3, 3, padding=1)]
        model = Cell(nn.Identity(), Branches(plain, join="concat"), 8)
    else:
        towers = [Tower("image", 48), Tower("text", 7)]
        model = Towers(Branches(towers, join="list", group=pair), replicas)
    return model.double()


def batch() -> dict[str, Tensor]:
    """Make the rows of a step."""
    rng = torch.Generator().manual_seed(3)
    image = torch.randn(ROWS, 3, 4, 4, generator=rng, dtype=torch.float64)
    text = torch.randn(ROWS, 7, generator=rng, dtype=torch.float64)
    return {"image": image, "text": text, "label": torch.arange(ROWS) % 5}


def train(model: nn.Module, whole: dict[str, Tensor], replicas: Any = None) -> dict[str, Any]:
    """Train two steps from a whole state."""
    model.load_state_dict(whole)
    rows, found = batch(), {}
    if replicas is not None:
        share = ROWS // dist.get_world_size(replicas)
        first = dist.get_rank(replicas) * share
        rows = {name: value[first : first + share] for name, value in rows.items()}
    torch.manual_seed(5)
    for step in range(2):
        model.zero_grad()
        losses = model(rows)
        losses.mean().backward()
        if replicas is not None:
            average_gradients(model.parameters(), replicas)
        found[f"{step} losses"] = losses.detach()
        found |= {f"{step} grad of {n}": p.grad.clone() for n, p in model.named_parameters()}  # type: ignore[union-attr]
        found[f"{step} norm"] = clip_grad_norm(model, MAX_NORM)
        torch.optim.SGD(model.parameters(), 0.5).step()
    return found | model.state_dict()


def main() -> None:
    directory = Path(sys.argv[1])
    with join():
        rank, num_ranks = dist.get_rank(), dist.get_world_size()
        pairs = [[first, first + 1] for first in range(0, num_ranks, 2)]
        across = [list(range(place, num_ranks, 2)) for place in range(2)]
        pair, replicas = (dist.new_subgroups_by_enumeration(each)[0] for each in (pairs, across))
        found = {}
        for case in CASES:
            groups = (pair, replicas if num_ranks > 2 else None)
            model = make(case, *groups)
            of_rows = groups[1] if case == "towers" else None
            found[case] = train(model, torch.load(sys.argv[2], weights_only=True)[case], of_rows)
            parts: list[Any] = [None] * num_ranks
            dist.all_gather_object(parts, model.state_dict())
            found[case]["whole"] = {k: v for part in parts for k, v in part.items()}
        torch.save(found, directory / f"{rank}.pt")
        (directory / f"{rank}.json").write_text(json.dumps({"rank": rank}))


if __name__ == "__main__":
    main()
