import torch
import torch.nn.functional as F

from tests.trainer.fake_loader import NUM_CLASSES, FakeLoader
from trainer.launch import join
from trainer.models import ResNet, SmallCNN, seeded
from trainer.step import evaluate, rescore, train_step


def make_loader(steps: int = 1) -> FakeLoader:
    return FakeLoader(replica=0, num_replicas=1, global_batch_size=12, steps=steps)


def make_model() -> SmallCNN:
    return seeded(lambda: SmallCNN(NUM_CLASSES, 3, 8), seed=0)


def test_a_step_descends_the_weighted_mean_and_reports_every_row() -> None:
    loader, model, reference = make_loader(), make_model(), make_model()
    batch = loader.batch(0)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.5)
    loss = train_step(model, optimizer, loader, batch)
    rows = F.cross_entropy(reference(batch["image"]), batch["label"], reduction="none")
    expected = sum(row * weight for row, weight in zip(rows, batch["weight"], strict=True)) / 12
    assert isinstance(expected, torch.Tensor)
    torch.testing.assert_close(loss, expected.detach())
    name = "head.linear.weight"
    (gradient,) = torch.autograd.grad(expected, reference.get_parameter(name))
    expected_weight = reference.get_parameter(name) - 0.5 * gradient
    torch.testing.assert_close(model.get_parameter(name), expected_weight)
    assert loader.reported == [(12, 12, 12)]


def test_training_lowers_the_loss() -> None:
    loader, model = make_loader(), make_model()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    losses = [float(train_step(model, optimizer, loader, loader.batch(0))) for _ in range(30)]
    assert losses[-1] < 0.7 * losses[0]


def test_rescoring_reports_but_changes_neither_weights_nor_batch_statistics() -> None:
    loader, model = (
        make_loader(),
        seeded(lambda: ResNet(NUM_CLASSES, depth=8, norm="batch"), seed=0),
    )
    before = {name: value.clone() for name, value in model.state_dict().items()}
    rescore(model, loader)
    assert loader.reported == [(12, 12, 12)]
    assert model.training
    assert all(torch.equal(before[name], value) for name, value in model.state_dict().items())


def test_accuracy_counts_valid_rows_only() -> None:
    model, batch = make_model(), make_loader().batch(0)
    with torch.no_grad():
        batch["label"] = model(batch["image"]).argmax(dim=1)
    batch["label"][:3] += 1
    half = batch | {"valid": torch.arange(12) < 6}
    full = batch | {"valid": torch.ones(12, dtype=torch.bool)}
    with join(device="cpu") as job:
        assert evaluate(model, [half], job.device) == 0.5
        assert evaluate(model, [half, full], job.device) == 12 / 18
    assert model.training
