from collections.abc import Iterator

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from dataio.job.launch import join
from tests.trainer.deliver.fake_loader import NUM_CLASSES
from tests.trainer.run.alone import Told, one_stage, step_loss
from tonari.trainer.models import ResNet, SmallCNN, seeded
from tonari.trainer.run.step import evaluate, rescore, train_step
from tonari.trainer.run.tasks import Classify


@pytest.fixture(autouse=True)
def _group() -> Iterator[None]:
    with join(device="cpu"):
        yield


def make_model() -> SmallCNN:
    return seeded(lambda: SmallCNN(NUM_CLASSES, 3, 8), seed=0)


def row_losses(model: nn.Module, batch: dict[str, Tensor]) -> Tensor:
    return F.cross_entropy(model(batch["image"]), batch["label"], reduction="none")


def weights(model: nn.Module) -> list[Tensor]:
    return [parameter.detach().clone() for parameter in model.parameters()]


def sgd(model: nn.Module, lr: float = 0.5) -> torch.optim.Optimizer:
    return torch.optim.SGD(model.parameters(), lr=lr)


@pytest.mark.parametrize("microbatches", [1, 3])
def test_a_step_descends_the_weighted_mean_and_reports_every_row(microbatches: int) -> None:
    loader, model, reference = Told(batch_size=12), make_model(), make_model()
    batch = loader.batch(0)
    pipeline = one_stage(model, batch_size=12, microbatches=microbatches)
    train_step(pipeline, sgd(model), loader, [batch])
    rows = row_losses(reference, batch)
    (rows * batch["weight"]).mean().backward()
    for found, before in zip(model.parameters(), reference.parameters(), strict=True):
        assert before.grad is not None
        torch.testing.assert_close(found, before - 0.5 * before.grad)
    assert loader.reported == [(12, 12, 12)]
    # The loss that is reported is not weighted.
    assert len(batch["weight"].unique()) > 1
    torch.testing.assert_close(loader.told[0][0], rows.detach())


@pytest.mark.parametrize("microbatches", [1, 3])
def test_answers_are_judged_only_where_the_loader_needs_it(microbatches: int) -> None:
    class Counting(Classify):
        judged = 0

        def outcome(self, logits: Tensor, target: Tensor) -> tuple[Tensor, Tensor]:
            self.judged += 1
            return super().outcome(logits, target)

    ends = []
    for needs_outcome in (False, True):
        loader, model, task = Told(batch_size=12), make_model(), Counting()
        loader.needs_outcome = needs_outcome
        pipeline = one_stage(model, batch_size=12, microbatches=microbatches, task=task)
        train_step(pipeline, sgd(model), loader, [loader.batch(0)])
        rescore(pipeline, loader, loader.refresh())
        assert task.judged == 2 * microbatches * needs_outcome
        assert loader.reported == 2 * [(12, 12, 12) if needs_outcome else (12,)]
        ends.append([*weights(model), *(loss for loss, _, _ in loader.told)])
    assert all(map(torch.equal, *ends))


def test_a_step_of_several_batches_is_the_step_of_all_their_rows() -> None:
    loader, model, reference = Told(batch_size=12), make_model(), make_model()
    batches = [loader.batch(0), loader.batch(1), loader.batch(2)]
    train_step(one_stage(model, batch_size=12), sgd(model), loader, batches)
    whole = {name: torch.cat([batch[name] for batch in batches]) for name in batches[0]}
    train_step(one_stage(reference, batch_size=36), sgd(reference), Told(batch_size=36), [whole])
    for found, expected in zip(model.parameters(), reference.parameters(), strict=True):
        torch.testing.assert_close(found, expected)
    assert loader.reported == 3 * [(12, 12, 12)]


def test_a_step_of_several_batches_is_the_mean_of_their_rows_however_many_are_padding() -> None:
    loader, model, reference = Told(batch_size=10), make_model().double(), make_model().double()
    full, last = loader.batch(0), loader.batch(1)
    for batch in (full, last):
        batch["weight"] = torch.ones(10)
    # As a loader pads: 2 rows that weigh as much as 10, and 8 that weigh nothing.
    last["sample_id"] = torch.where(torch.arange(10) < 2, last["sample_id"], -1)
    last["weight"] = torch.where(torch.arange(10) < 2, 5.0, 0.0)
    train_step(one_stage(model, batch_size=10), sgd(model), loader, [full, last])
    rows = torch.cat([row_losses(reference, full), row_losses(reference, last)[:2]])
    rows.mean().backward()
    for found, before in zip(model.parameters(), reference.parameters(), strict=True):
        assert before.grad is not None
        torch.testing.assert_close(found, before - 0.5 * before.grad, rtol=1e-12, atol=1e-12)


def test_a_step_forgets_the_gradients_of_the_one_before() -> None:
    loader, model, reference = Told(batch_size=12), make_model(), make_model()
    pipeline, optimizer, plain = one_stage(model, batch_size=12), sgd(model), sgd(reference)
    for number in range(2):
        batch = loader.batch(number)
        train_step(pipeline, optimizer, loader, [batch])
        plain.zero_grad()
        (row_losses(reference, batch) * batch["weight"]).mean().backward()
        plain.step()
    for found, expected in zip(model.parameters(), reference.parameters(), strict=True):
        torch.testing.assert_close(found, expected)


def test_a_step_is_no_longer_than_the_norm_it_is_clipped_to() -> None:
    loader, model = Told(batch_size=12), make_model()
    before, pipeline = weights(model), one_stage(model, batch_size=12)
    step = train_step(pipeline, sgd(model, lr=1), loader, [loader.batch(0)], clip=0.01)
    moved = [new - old for new, old in zip(weights(model), before, strict=True)]
    length = torch.cat([part.flatten() for part in moved]).norm()
    assert not step.skipped
    assert step.norm is not None
    assert step.norm > 0.01
    torch.testing.assert_close(length, torch.tensor(0.01), rtol=1e-3, atol=0)


def test_a_norm_that_is_not_finite_leaves_the_weights_only_where_asked_to() -> None:
    loader, model = Told(batch_size=12), make_model()
    before, pipeline = weights(model), one_stage(model, batch_size=12)
    batch = loader.batch(0)
    batch["weight"][0] = float("inf")
    step = train_step(pipeline, sgd(model), loader, [batch], skip_nonfinite=True)
    assert step.skipped
    assert step.norm is not None
    assert not step.norm.isfinite()
    assert all(map(torch.equal, weights(model), before))
    assert train_step(pipeline, sgd(model), loader, [batch]) == (None, False)
    assert not all(map(torch.equal, weights(model), before))


def test_training_lowers_the_loss() -> None:
    loader, model = Told(batch_size=12), make_model()
    pipeline, optimizer = one_stage(model, batch_size=12), sgd(model, lr=0.1)
    losses = [float(step_loss(pipeline, optimizer, loader, loader.batch(0))) for _ in range(30)]
    assert losses[-1] < 0.7 * losses[0]


def test_rescoring_reports_but_changes_neither_weights_nor_batch_statistics() -> None:
    model = seeded(lambda: ResNet(NUM_CLASSES, depth=8, norm="batch"), seed=0)
    loader = Told(batch_size=12)
    before = {name: value.clone() for name, value in model.state_dict().items()}
    rescore(one_stage(model, batch_size=12), loader, loader.refresh())
    assert loader.reported == [(12, 12, 12)]
    assert model.training
    assert all(torch.equal(before[name], value) for name, value in model.state_dict().items())
    assert all(parameter.grad is None for parameter in model.parameters())


def test_accuracy_and_loss_count_valid_rows_only() -> None:
    model, batch = make_model(), Told(batch_size=12).batch(0)
    with torch.no_grad():
        batch["label"] = model(batch["image"]).argmax(dim=1)
        batch["label"][:3] += 1
        batch["label"] %= NUM_CLASSES
        rows = row_losses(model, batch).double()
    half = batch | {"valid": torch.arange(12) < 6}
    full = batch | {"valid": torch.ones(12, dtype=torch.bool)}
    pipeline = one_stage(model, batch_size=12)
    some = evaluate(pipeline, [half])
    assert some.accuracy == 0.5
    assert some.loss == pytest.approx(float(rows[:6].mean()))
    both = float(torch.cat([rows[:6], rows]).mean())
    every = evaluate(pipeline, [half, full])
    assert every.accuracy == 12 / 18
    assert every.loss == pytest.approx(both)
    assert model.training


class Quarters(Classify):
    """Says that a quarter of each row's answers are right, and of the first row's all."""

    def outcome(self, logits: Tensor, target: Tensor) -> tuple[Tensor, Tensor]:
        right = torch.full((len(target),), 0.25)
        right[0] = 1
        return right, torch.ones(len(target))


def test_accuracy_is_the_share_of_right_answers_and_the_loader_hears_of_right_rows() -> None:
    loader, model = Told(batch_size=12), make_model()
    batch = loader.batch(0) | {"valid": torch.arange(12) < 6}
    pipeline = one_stage(model, batch_size=12, task=Quarters())
    assert evaluate(pipeline, [batch]).accuracy == (1 + 5 * 0.25) / 6
    train_step(pipeline, sgd(model), loader, [batch])
    rescore(pipeline, loader, loader.refresh())
    for _, correct, _ in loader.told:
        assert correct is not None
        assert correct.tolist() == [True] + 11 * [False]
