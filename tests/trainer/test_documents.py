"""Documents in one sequence do not see one another."""

import warnings
from typing import Any

import pytest
import torch
from torch import Tensor

from tonari.trainer.models import GPT, Llama
from tonari.trainer.models.documents import (
    DocumentModel,
    attend_in_blocks,
    document_mask,
    positions_of,
)
from tonari.trainer.models.transformer import attend
from tonari.trainer.run.packed import NO_TARGET, NextTokenInDocument

SIZES: dict[str, Any] = {"width": 16, "depth": 2, "heads": 2}
DOCUMENTS = torch.tensor([[1, 1, 1, 2, 2, 3, 3, 3, 3, 0, 0], [1, 2, 2, 2, 2, 2, 2, 2, 2, 2, 2]])


@pytest.fixture(params=["gpt", "llama"])
def model(request: pytest.FixtureRequest) -> DocumentModel:
    """A small model in float64."""
    torch.manual_seed(3)
    made = GPT if request.param == "gpt" else Llama
    return made(40, DOCUMENTS.shape[1] - 1, **SIZES).double()


def batch() -> dict[str, Tensor]:
    generator = torch.Generator().manual_seed(5)
    tokens = torch.randint(0, 40, DOCUMENTS.shape, generator=generator)
    return {"tokens": tokens.to(torch.uint16), "document": DOCUMENTS.to(torch.uint16)}


def test_positions_begin_anew_with_each_document() -> None:
    assert positions_of(DOCUMENTS).tolist() == [
        [0, 1, 2, 0, 1, 0, 1, 2, 3, 0, 1], [0, *range(10)]
    ]  # fmt: skip


def test_targets_are_the_next_tokens_of_the_same_document() -> None:
    given = batch()
    found = NextTokenInDocument().target(given)
    tokens = given["tokens"].long()
    no = NO_TARGET
    a, b = tokens.tolist()
    assert found.tolist() == [
        [a[1], a[2], no, a[4], no, a[6], a[7], a[8], no, no],
        [no, *b[2:]],
    ]


def test_no_document_has_a_gradient_of_anothers_loss(model: DocumentModel) -> None:
    task, given = NextTokenInDocument(), batch()
    inputs, target = task.input(given), task.target(given)
    assert isinstance(inputs, tuple)
    made: list[Tensor] = []

    def keep(module: Any, args: Any, output: Tensor) -> Tensor:
        made.append(output.requires_grad_())
        return output

    assert model.stem is not None
    model.stem.tokens.register_forward_hook(keep)  # type: ignore[union-attr]
    for number in (1, 2, 3):
        made.clear()
        own = inputs[1] == number
        only = torch.where(own, target, NO_TARGET)
        loss = task.losses(model(*inputs), only)
        (gradient,) = torch.autograd.grad(loss.sum(), made)
        # bool[batch, places]
        touched = (gradient != 0).any(dim=-1)
        assert not (touched & ~own).any()
        assert touched[0].any()


def test_a_document_gets_the_losses_that_it_gets_alone(model: DocumentModel) -> None:
    task, given = NextTokenInDocument(), batch()
    inputs = task.input(given)
    assert isinstance(inputs, tuple)
    logits = model(*inputs)
    for row, number in ((0, 1), (0, 2), (0, 3), (1, 2)):
        own = inputs[1][row] == number
        alone = model(inputs[0][row, own][None])
        assert torch.allclose(alone[0], logits[row, own], rtol=1e-12)


def test_a_rows_loss_is_the_mean_of_its_targets(model: DocumentModel) -> None:
    task, given = NextTokenInDocument(), batch()
    target = task.target(given)
    logits = model(task.input(given))
    each = torch.nn.functional.cross_entropy(
        logits.flatten(0, 1), target.flatten(), reduction="none"
    ).view(target.shape)
    expected = [row[kept].mean() for row, kept in zip(each, target != NO_TARGET, strict=True)]
    assert torch.allclose(task.losses(logits, target), torch.stack(expected))
    right, confidence = task.outcome(logits, target)
    hits = logits.argmax(dim=2) == target
    kept = target != NO_TARGET
    assert torch.allclose(right, (hits & kept).sum(1).double() / kept.sum(1))
    assert ((confidence > 1 / 40) & (confidence < 1)).all()


def test_a_row_without_a_target_has_no_loss(model: DocumentModel) -> None:
    task, given = NextTokenInDocument(), batch()
    given["document"] = torch.zeros_like(given["document"])
    losses = task.losses(model(task.input(given)), task.target(given))
    assert losses.tolist() == [0, 0]
    losses.sum().backward()
    assert all(p.grad is None or p.grad.isfinite().all() for p in model.parameters())


def test_blocks_for_flex_attention_say_what_the_dense_mask_says() -> None:
    generator = torch.Generator().manual_seed(1)
    q, k, v = torch.randn(3, 2, 4, 11, 16, generator=generator).unbind()
    k, v = k[:, :2], v[:, :2]
    blocks = document_mask(DOCUMENTS, blocks=True)
    dense = attend(q, k, v, causal=True, mask=document_mask(DOCUMENTS))
    assert not isinstance(blocks, Tensor)
    with warnings.catch_warnings():
        # On a CPU it is not compiled here, and warns that this is slow.
        warnings.simplefilter("ignore")
        found = attend_in_blocks(q, k, v, blocks)
    assert torch.allclose(found, dense, atol=1e-6)


def test_tokens_alone_are_one_document(model: DocumentModel) -> None:
    tokens = torch.randint(0, 40, (2, 10))
    one = torch.ones_like(tokens)
    assert torch.allclose(model(tokens), model(tokens, one), rtol=1e-12)
