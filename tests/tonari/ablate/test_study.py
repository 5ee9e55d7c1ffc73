"""A study's replicas in one process train what a job of as many ranks would."""

import copy
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from torch.func import functional_call

import dataio
from dataio.plan.layout import Layout
from dataio.world import run_threads, thread_worlds
from shuffle import Global, Local, Partial
from tests.cases import diagonal
from tests.memory_source import FIELDS, MemorySource
from tonari.ablate.study.config import SettingsConfig, load_study
from tonari.ablate.study.corrupt import as_found
from tonari.ablate.study.data import LabelledImages, draw_subset, load_images
from tonari.ablate.study.model import LEAST_CHANNELS, StudyResNet, _Block
from tonari.ablate.study.order import (
    class_skew,
    epoch_batches,
    number_samples,
)
from tonari.ablate.study.replicas import ManyModels, OneModel
from tonari.ablate.study.run import train_cell
from tonari.ablate.study.training import Point
from tonari.trainer.errors import ConfigError

EXAMPLE = Path(__file__).parents[3] / "examples" / "shuffle_study.toml"
SGD: dict[str, Any] = {"lr": 0.1, "momentum": 0.9, "weight_decay": 0.01}


def blobs(num_samples: int, *, seed: int = 0) -> LabelledImages:
    """Images of four classes, each of a brightness of its own."""
    rng = np.random.default_rng(seed)
    labels = rng.integers(4, size=num_samples)
    noise = rng.integers(40, size=(num_samples, 3, 8, 8))
    return LabelledImages((noise + 60 * labels[:, None, None, None]).astype(np.uint8), labels)


def drawn(replicas: int, batch: int, dtype: torch.dtype = torch.float64):
    """A step's images, labels and weights, the last rows padding."""
    numbers = torch.Generator().manual_seed(3)
    images = torch.randn(replicas, batch, 3, 8, 8, generator=numbers, dtype=dtype)
    labels = torch.randint(4, (replicas, batch), generator=numbers)
    weight = torch.rand(replicas, batch, generator=numbers, dtype=dtype)
    weight[:, -1] = 0
    return images, labels, weight


def small_model(**settings) -> StudyResNet:
    torch.manual_seed(1)
    model = StudyResNet(4, width=4, **settings).double()
    for p in model.parameters():  # nothing may be zero, or gradients would be
        torch.nn.init.normal_(p, std=0.3)
    return model


@pytest.mark.parametrize("width", [4, 8])
def test_a_block_that_shrinks_images_passes_them_on_as_a_strided_convolution_would(width):
    torch.manual_seed(1)
    block = _Block(width, 2 * width, torch.nn.Identity(), torch.nn.Identity())
    features = torch.randn(3, width, 9, 9)
    # Its second convolution begins at nothing
    shortcut = block.shortcut
    assert isinstance(shortcut, torch.nn.Conv2d)
    passed = F.relu(F.conv2d(features, shortcut.weight, stride=2))
    torch.testing.assert_close(block(features), passed)
    # The kernel that writes past its buffer (see `LEAST_CHANNELS`) is left alone
    assert (shortcut.stride == (1, 1)) == (width < LEAST_CHANNELS)


def loader_batches(world, root, policy, *, num_samples, batch_size, seed, epochs):
    """What a real loader of this rank delivers: ids and weights, epoch by epoch."""
    with dataio.Loader(
        MemorySource(num_samples), batch_size=batch_size, fields=FIELDS, cache=root / "cache",
        shuffle=policy, seed=seed, world=world, workers=dataio.Workers(threads=0),
        reports=dataio.Reports(progress=False),
    ) as loader:  # fmt: skip
        return [
            [(batch["sample_id"].tolist(), batch["weight"].tolist()) for batch in loader]
            for _ in loader.epochs(epochs)
        ]


@diagonal(replicas=[(1, 1, 1, 1), (2, 2), (3, 1, 2)], policy=[Local(), Partial(0.3), Global()])
def test_replicas_train_the_very_batches_of_real_loaders(tmp_path, replicas, policy):
    num_samples, batch_size, seed, epochs = 53, 4, 7, 4
    delivered = run_threads(
        thread_worlds(list(replicas), timeout_s=20),
        lambda world: loader_batches(
            world, tmp_path, policy,
            num_samples=num_samples, batch_size=batch_size, seed=seed, epochs=epochs,
        ),
    )  # fmt: skip
    layout = Layout(replicas, num_samples)
    for epoch in range(epochs):
        computed = epoch_batches(policy, layout, seed=seed, epoch=epoch, batch_size=batch_size)
        for replica, by_epoch in enumerate(delivered):
            assert len(by_epoch[epoch]) == len(computed.sample_id)
            for step, (ids, weight) in enumerate(by_epoch[epoch]):
                assert computed.weight[step, replica].tolist() == weight
                trained = np.array(weight) > 0
                assert (computed.sample_id[step, replica][trained] == np.array(ids)[trained]).all()
        valid = computed.sample_id[computed.weight > 0]
        assert sorted(valid.tolist()) == list(range(num_samples))


def test_nodes_of_one_class_are_as_far_from_the_whole_as_can_be():
    labels = np.arange(8) // 2
    apart = [np.array([2 * node, 2 * node + 1]) for node in range(4)]
    assert class_skew(apart, labels) == pytest.approx(0.75)
    assert class_skew([np.arange(8)], labels) == 0
    assert class_skew([np.array([0, 2, 4, 6]), np.array([1, 3, 5, 7])], labels) == 0


@pytest.mark.parametrize("norm", ["none", "group", "batch"])
def test_one_step_has_the_mean_of_the_gradients_of_separate_replicas(norm):
    images, labels, weight = drawn(replicas=4, batch=5)
    together = small_model(norm=norm, replicas=4)
    alone = [small_model(norm=norm, replicas=1) for _ in range(4)]
    apart = []
    for model, x, y, w in zip(alone, images, labels, weight, strict=True):
        loss = (F.cross_entropy(model(x), y, reduction="none") * w).mean()
        apart.append(torch.autograd.grad(loss, list(model.parameters())))
    replicas = OneModel(together, **SGD)
    replicas.step(images, labels, weight)
    for p, *gradients in zip(together.parameters(), *apart, strict=True):
        torch.testing.assert_close(p.grad, sum(gradients) / 4)
        assert p.grad.abs().max() > 1e-4


@pytest.mark.parametrize("running", ["mean", "first"])
def test_running_statistics_are_the_mean_over_replicas_or_the_first_one_s(running):
    images, labels, weight = drawn(replicas=3, batch=4)
    together = small_model(norm="batch", replicas=3, running=running)
    alone = [small_model(norm="batch", replicas=1) for _ in range(3)]
    for model, x in zip(alone, images, strict=True):
        model.train()(x)
    OneModel(together, **SGD).step(images, labels, weight)
    kept = alone if running == "mean" else alone[:1]
    for name, values in together.named_buffers():
        theirs = torch.stack([dict(model.named_buffers())[name] for model in kept])
        torch.testing.assert_close(values, theirs.mean(dim=0))


def test_models_that_are_averaged_after_every_step_are_one_model():
    # Weight decay and momentum are linear: averaging after each step is averaging gradients.
    one = OneModel(small_model(), **SGD)
    many = ManyModels(small_model(), replicas=4, exchange="average", local_steps=1, seed=0, **SGD)
    for _ in range(3):
        data = drawn(replicas=4, batch=5)
        torch.testing.assert_close(one.step(*data), many.step(*data))
    averaged = many.tested_model().parameters()
    for p, q in zip(one.tested_model().parameters(), averaged, strict=True):
        torch.testing.assert_close(p, q)


def test_models_that_never_meet_train_as_if_alone():
    images, labels, weight = drawn(replicas=3, batch=5)
    many = ManyModels(small_model(), replicas=3, exchange="average", local_steps=9, seed=0, **SGD)
    for _ in range(2):
        many.step(images, labels, weight)
    for replica in range(3):
        alone, part = OneModel(small_model(), **SGD), slice(replica, replica + 1)
        for _ in range(2):
            alone.step(images[part], labels[part], weight[part])
        for name, p in alone.model.named_parameters():
            torch.testing.assert_close(p, many.parameters[name][replica])


def meet(exchange):
    """One step of five models, without and with a meeting after it: weights and momentum."""
    found = []
    for local_steps in (2, 1):
        many = ManyModels(
            small_model(), replicas=5, exchange=exchange, local_steps=local_steps, seed=0, **SGD
        )
        many.step(*drawn(replicas=5, batch=4))
        p = many.parameters["head.weight"]
        found.append((p.detach(), many.optimizer.state[p]["momentum_buffer"]))
    return zip(*found, strict=True)


def test_swapped_models_are_the_same_models_each_elsewhere():
    for before, after in meet("swap_partner"):
        origin = [[bool(torch.equal(a, b)) for b in before].index(True) for a in after]
        assert sorted(origin) == list(range(5))
        assert all(origin[replica] != replica for replica in range(5))


def test_a_drawn_partner_s_model_is_averaged_with_one_s_own():
    for before, after in meet("average_partner"):
        torch.testing.assert_close(before.mean(dim=0), after.mean(dim=0))
        alike = [sum(bool(torch.equal(a, b)) for b in after) for a in after]
        assert sorted(alike) == [1, 2, 2, 2, 2]
        assert sum(bool(torch.equal(a, b)) for a, b in zip(before, after, strict=True)) == 1


def test_sorted_partitions_list_one_class_after_the_other_and_random_ones_mix_them():
    labels = np.random.default_rng(0).integers(4, size=200)
    in_order = number_samples(labels, "sorted", seed=1)
    mixed = number_samples(labels, "random", seed=1)
    assert (np.diff(labels[in_order]) >= 0).all()
    assert all(len(set(labels[mixed][start : start + 50])) == 4 for start in range(0, 200, 50))
    for rows in (in_order, mixed):
        assert sorted(rows.tolist()) == list(range(200))
    assert (number_samples(labels, "random", seed=2) != mixed).any()


@pytest.mark.parametrize(
    "arm",
    [{"shuffle": "local"}, {"norm": "batch"}, {"update": "swap_partner", "partition": "random"}],
    ids=str,
)
def test_a_cell_learns_and_depends_on_its_seed_alone(arm):
    settings = SettingsConfig(
        replicas=4,
        batch_size=4,
        width=4,
        epochs=4,
        lr=0.05,
        local_steps=3,
        norm="group",
        shuffle="global",
    )
    settings = SettingsConfig(**{**vars(settings), **arm})
    train, test = as_found(blobs(130)), blobs(200, seed=1)
    points: list[Point] = []
    first, again, other = (
        train_cell(settings, train, test, num_classes=4, seed=seed, on_point=points.append)
        for seed in (0, 0, 1)
    )
    assert first.points == again.points
    assert first.points != other.points
    assert points[:4] == list(first.points)
    assert [point.accuracy is None for point in first.points] == [True, True, True, False]
    assert first.accuracy > 0.5, "four classes by brightness: guessing gives 0.25"


def test_arms_of_one_seed_begin_with_the_same_weights_and_samples():
    data = blobs(60)
    one, two = (draw_subset(data, 20, seed=4) for _ in range(2))
    assert np.array_equal(one.images, two.images)
    assert not np.array_equal(one.images, draw_subset(data, 20, seed=5).images)
    settings = SettingsConfig(replicas=1, batch_size=60, width=4, epochs=1, evaluate_epochs=1)
    losses = [
        train_cell(
            SettingsConfig(**{**vars(settings), "shuffle": policy}),
            as_found(data), data, num_classes=4, seed=0,
        ).points[0].loss
        for policy in ("local", "global")
    ]  # fmt: skip
    # One step over all rows, whatever their order: the loss of the first weights
    assert losses[0] == pytest.approx(losses[1], rel=1e-5)


def test_a_batch_larger_than_a_replica_s_rows_is_refused():
    settings = SettingsConfig(replicas=4, batch_size=16, shuffle="global")
    with pytest.raises(ConfigError, match=r"batch_size is 16, .* 20 training .* lower it"):
        train_cell(settings, as_found(blobs(20)), blobs(9), num_classes=4, seed=0)


def test_more_samples_than_there_are_are_refused():
    with pytest.raises(ConfigError, match="train_samples is 9, but there are 8; take fewer"):
        draw_subset(blobs(8), 9, seed=0)


def test_the_example_is_a_study_of_five_paired_seeds_in_both_sizes():
    small, full = load_study(EXAMPLE), load_study(EXAMPLE, full=True)
    assert {cell.seed for cell in small.cells()} == set(range(5))
    assert [arm.name for arm in small.arms] == [arm.name for arm in full.arms]
    assert full.study.device == "cuda"
    assert full.arms[0].settings.epochs > small.arms[0].settings.epochs
    assert not {c.digest for c in small.cells()} & {c.digest for c in full.cells()}
    assert {arm.baseline for arm in small.arms} <= {arm.name for arm in small.arms}


def test_cifar_10_is_decoded_from_parquet():
    path = Path(__file__).parents[4] / "shared" / "data" / "cifar10-test.parquet"
    if not path.exists():
        pytest.skip(f"CIFAR-10 as Parquet is not at {path}")
    data = load_images(str(path), image="jpg", label="cls", image_size=16)
    assert data.images.shape == (10000, 3, 16, 16)
    assert np.bincount(data.labels).tolist() == [1000] * 10


def test_the_model_of_a_cell_takes_vmap_and_plain_calls_alike():
    model = small_model(norm="group")
    images = drawn(replicas=1, batch=3)[0][0]
    state = {name: p.detach() for name, p in model.named_parameters()}
    torch.testing.assert_close(
        functional_call(copy.deepcopy(model), state, (images,)), model(images)
    )
