"""Replicas of a study's cell, all in one process: one model on averaged gradients, or one each.

Averaged gradients are exact: without batch statistics the mean loss over the concatenated batches
has the mean of the replicas' gradients, and `ReplicaBatchNorm` keeps batch statistics apart.
Replicas that train apart are one set of parameters with a leading axis: SGD works element by
element, so that one optimizer stands for one each.
"""

import copy
from typing import Literal, Protocol, cast

import torch
from torch import Tensor, nn
from torch.func import functional_call, vmap

from dataio.base.seeding import generator, key
from tonari.ablate.study.tasks import losses_of_places
from tonari.trainer.run.ema import WeightAverage

ADAMW_BETAS = (0.9, 0.95)
"""As GPTs are trained: Brown et al., Language models are few-shot learners, 2020, appendix B."""

ModelExchange = Literal["average", "average_partner", "swap_partner"]


class Replicas(Protocol):
    """Replicas that train together, and the one model that is tested."""

    optimizer: torch.optim.Optimizer

    def step(self, inputs: Tensor, labels: Tensor, weight: Tensor) -> Tensor:
        """Take one step of every replica.

        Args:
            inputs: floating[replicas, batch, channels, height, width]; or, of text,
                int64[replicas, batch, places].
            labels: int64[replicas, batch]; or, of text, int64[replicas, batch, places].
            weight: floating[replicas, batch]: As a loader scales it.

        Returns:
            Mean weighted loss, detached.
        """
        ...

    def tested_model(self) -> nn.Module:
        """Give the model whose accuracy counts."""
        ...


class OneModel:
    """Replicas that average their gradients in every step.

    Args:
        model: What is trained.
        lr: Until it is set.
        momentum: Of SGD; AdamW's is its first beta, 0.9, with 0.95 as the second.
        weight_decay: Of the optimizer.
        adamw: Whether it is AdamW instead of SGD.
        gce_q: Of the generalised cross entropy; None: cross entropy. Losses of rows, which
            policies go by, are cross entropy in either case.
        ema: What a step keeps of the averaged weights, which are tested; 0: none.
    """

    def __init__(
        self,
        model: nn.Module,
        *,
        lr: float,
        momentum: float,
        weight_decay: float,
        adamw: bool = False,
        gce_q: float | None = None,
        ema: float = 0.0,
    ):
        self.model, self._gce_q = model, gce_q
        self._average = WeightAverage([model], decay=ema) if ema else None
        self._steps = 0
        self.optimizer: torch.optim.Optimizer = (
            torch.optim.AdamW(
                model.parameters(), lr=lr, betas=ADAMW_BETAS, weight_decay=weight_decay
            )
            if adamw
            else torch.optim.SGD(
                model.parameters(), lr=lr, momentum=momentum, weight_decay=weight_decay
            )
        )

    def step(self, inputs: Tensor, labels: Tensor, weight: Tensor) -> Tensor:
        """Take one step; see `Replicas.step`."""
        return self.step_rows(inputs, labels, weight)[0]

    def step_rows(
        self, inputs: Tensor, labels: Tensor, weight: Tensor
    ) -> tuple[Tensor, Tensor, Tensor]:
        """Take one step, and tell of its rows.

        Returns:
            Mean weighted loss; loss floating[replicas * batch], of a sequence its mean; logits
            floating[replicas * batch, classes], or with places before the classes: all detached.
        """
        self.model.train()
        # A replica's rows stay together: [replicas * batch, *shape of a row]
        logits = self.model(laid_out(inputs.flatten(0, 1)))
        # floating[replicas * batch, places]
        losses = losses_of_places(logits, labels.flatten(0, 1))
        loss = (self._pulling(losses).mean(dim=1) * weight.flatten()).mean()
        self.optimizer.zero_grad()
        loss.backward()  # type: ignore[no-untyped-call]
        self.optimizer.step()
        self._steps += 1
        if self._average:
            self._average.update(self._steps)
        return loss.detach(), losses.detach().mean(dim=1), logits.detach()

    def pass_rows(self, inputs: Tensor, labels: Tensor) -> tuple[Tensor, Tensor]:
        """Pass rows forward only, as for testing; shapes are those of `step_rows`.

        Returns:
            Loss floating[rows]; logits.
        """
        self.model.eval()
        with torch.no_grad():
            logits = self.model(laid_out(inputs))
            return losses_of_places(logits, labels).mean(dim=1), logits

    def tested_model(self) -> nn.Module:
        """Give the only one, or a copy with the averaged weights."""
        if self._average is None:
            return self.model
        averaged = copy.deepcopy(self.model)
        # By names in a list of one stage
        nn.ModuleList([averaged]).load_state_dict(self._average.state, strict=False)
        return averaged

    def _pulling(self, losses: Tensor) -> Tensor:
        """Of floating[rows, places], cross entropies, what gradients are taken of."""
        if self._gce_q is None:
            return losses
        # The probability of the label is exp(-loss)
        return (1 - torch.exp(-self._gce_q * losses)) / self._gce_q


class ManyModels:
    """Replicas that train apart, and meet every few steps.

    Args:
        model: The weights that all begin with; without batch statistics.
        replicas: How many.
        exchange: What happens when they meet: all models become their mean; pairs become their
            mean; or models change hands along a drawn cycle through all replicas, so that each
            sees another's rows. Momentum goes with the weights.
        local_steps: Steps between.
        seed: Of the partners.
    """

    def __init__(
        self,
        model: nn.Module,
        *,
        replicas: int,
        exchange: ModelExchange,
        local_steps: int,
        seed: int,
        lr: float,
        momentum: float,
        weight_decay: float,
    ):
        self.model, self.replicas, self.seed = model, replicas, seed
        self.exchange, self.local_steps, self.steps = exchange, local_steps, 0
        # floating[replicas, ...] each
        self.parameters = {
            name: nn.Parameter(p.detach().repeat(replicas, *(1 for _ in p.shape)))
            for name, p in model.named_parameters()
        }
        self.optimizer: torch.optim.Optimizer = torch.optim.SGD(
            self.parameters.values(), lr=lr, momentum=momentum, weight_decay=weight_decay
        )

    def step(self, inputs: Tensor, labels: Tensor, weight: Tensor) -> Tensor:
        """Take one step of each; see `Replicas.step`."""
        # floating[replicas, batch, classes]
        logits = vmap(lambda p, x: functional_call(self.model, p, (x,)))(self.parameters, inputs)
        losses = losses_of_places(logits.flatten(0, 1), labels.flatten(0, 1))
        means = (losses.view_as(weight) * weight).mean(dim=1)
        self.optimizer.zero_grad()
        # The sum leaves each replica the gradient of its own mean
        means.sum().backward()  # type: ignore[no-untyped-call]
        self.optimizer.step()
        self.steps += 1
        if self.steps % self.local_steps == 0:
            self._meet()
        return means.mean().detach()

    def tested_model(self) -> nn.Module:
        """Give the mean of all models."""
        with torch.no_grad():
            for name, p in self.model.named_parameters():
                p.copy_(self.parameters[name].mean(dim=0))
        return self.model

    def _meet(self) -> None:
        order = generator(key(self.seed, "model partners", step=self.steps)).permutation(
            self.replicas
        )
        with torch.no_grad():
            for p in self.parameters.values():
                state = self.optimizer.state[p]
                for values in (p, cast(Tensor | None, state.get("momentum_buffer"))):
                    if values is not None:
                        _exchange(values, self.exchange, torch.from_numpy(order).to(values.device))


def laid_out(rows: Tensor) -> Tensor:
    """Lay images out as their convolutions are fastest; other rows stay as they are."""
    return rows.contiguous(memory_format=torch.channels_last) if rows.ndim == 4 else rows


def _exchange(values: Tensor, exchange: ModelExchange, order: Tensor) -> None:
    """Let replicas meet; ``values`` is floating[replicas, ...], changed in place."""
    if exchange == "average":
        values.copy_(values.mean(dim=0, keepdim=True).expand_as(values))
    elif exchange == "swap_partner":
        values[order] = values[order.roll(1)]
    else:
        pairs = len(order) // 2
        left, right = order[:pairs], order[pairs : 2 * pairs]
        mean = (values[left] + values[right]) / 2
        values[left], values[right] = mean, mean
