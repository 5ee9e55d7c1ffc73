"""The frameworks' own loops, fed by a loader as the examples do it."""

import importlib
import shutil
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from dataio import Array, Int, Loader
from examples import blobs, pictures
from tests.fits.drive import EPOCHS, checkpoint, find_steps, run
from tests.multirank import RunRanks

# A framework's own warnings are not ours to forbid.
pytestmark = pytest.mark.filterwarnings("default")

ALL = list(range(blobs.NUM_TRAIN))


def need(framework: str) -> None:
    """Skip the test where the framework is not whole: the Trainer of transformers runs on both."""
    whole = {"transformers": ("accelerate", "transformers"), "anemoi": ("lightning", "zarr")}
    for name in whole.get(framework, (framework,)):
        pytest.importorskip(
            name, reason=f"needs {name}; see the extras frameworks, published, zarr"
        )


@pytest.fixture(scope="module", params=["lightning", "accelerate", "transformers"])
def whole(request, tmp_path_factory):
    """A whole run: framework, shards, directory of saves, and what `run` returned."""
    framework = request.param
    need(framework)
    work = tmp_path_factory.mktemp(framework)
    blobs.write_blobs(work / "blobs")
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("TONARI_CACHE", str(work / "cache"))
        yield (
            framework,
            work / "blobs",
            work / "saved",
            run(framework, work / "blobs", work / "saved"),
        )


def test_no_sample_comes_twice_in_an_epoch_and_all_come_in_the_first(whole):
    loader = whole[-1][0]
    given = loader.by_epoch(loader.given)
    assert sorted(given[0]) == ALL
    assert list(given) == list(range(EPOCHS))
    assert all(len(ids) == len(set(ids)) for ids in given.values())


def test_reports_hide_rows_and_the_refresh_scores_them_anew(whole):
    loader = whole[-1][0]
    given, reported = loader.by_epoch(loader.given), loader.by_epoch(loader.reported)
    assert any(len(ids) < len(ALL) for ids in given.values())
    # The last epoch's hidden rows have no later epoch that would need their scores.
    assert all(sorted(set(reported[epoch])) == ALL for epoch in range(EPOCHS - 1))


def test_each_step_is_taken_at_the_rate_that_the_loader_asks_for(whole):
    loader, _, _, rates = whole[-1]
    assert any(loader.factors[epoch] > 1 for epoch, _ in loader.given)
    assert rates == pytest.approx([rates[0] * loader.factors[epoch] for epoch, _ in loader.given])


def test_every_sample_is_evaluated_once(whole):
    _, accuracy, model, _ = whole[-1]
    samples: list[Any] = list(blobs.samples(blobs.NUM_VAL, seed=1))
    points = torch.tensor(np.stack([np.frombuffer(sample["bin"], "<f4") for sample in samples]))
    labels = torch.tensor([int(sample["cls"]) for sample in samples])
    right = int((model(points).argmax(1) == labels).sum())
    assert accuracy == pytest.approx(right / blobs.NUM_VAL)


@pytest.mark.parametrize(
    "where", ["first steps", "end of an epoch", "hidden rows", "before refresh"]
)
def test_a_resumed_run_reports_the_same_losses(whole, where, tmp_path):
    framework, shards, saved, (loader, *_) = whole
    steps = find_steps(loader)[where]
    resumed, *_ = run(framework, shards, tmp_path, resume=checkpoint(saved, steps))
    assert resumed.reported == loader.reported[loader.saves[steps] :]


def write_pictures(directory: Path) -> None:
    """Write directories of pictures, one a class, as timm reads them."""
    for split, count in (("train", 64), ("val", 24)):
        samples: list[Any] = list(pictures.samples(count, seed=len(split)))
        for sample in samples:
            path = directory / split / sample["cls"].decode() / f"{sample['__key__']}.jpg"
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_bytes(sample["jpg"])


@pytest.mark.multirank
@pytest.mark.parametrize(
    "framework",
    [
        "lightning",
        "transformers",
        "timm",
        "anemoi",
        pytest.param("accelerate", marks=pytest.mark.nightly),
    ],
)
def test_two_ranks_share_the_samples_and_go_on_the_same_after_a_kill(
    framework, run_ranks: RunRanks, tmp_path
):
    need(framework)
    if framework == "anemoi":
        importlib.import_module("examples.anemoi_data").write_dataset(tmp_path / "data")
    else:
        (write_pictures if framework == "timm" else blobs.write_blobs)(tmp_path / "data")
    killed, resumed = (
        run_ranks(
            "fit", 2, framework, str(tmp_path), part, launcher="torchrun", timeout_s=240,
            env={"TONARI_RANKS_PER_NODE": "1"}, fresh=True, check=part == "resumed",
        ) for part in ("killed", "resumed")
    )  # fmt: skip
    assert killed.returncode != 0
    ranks = killed.reports
    assert len(ranks) == 2, killed.output
    assert "SIGKILL" in killed.output
    assert len({rank["accuracy"] for rank in ranks}) == 1
    assert len({rank["steps"] for rank in ranks}) == 1
    for epoch, hides in (
        (e, framework not in ("timm", "anemoi") and e < EPOCHS - 1) for e in range(EPOCHS)
    ):
        given = [i for rank in ranks for i in rank["given"].get(str(epoch), [])]
        assert len(given) == len(set(given))
        reported = [i for rank in ranks for i in rank["reported"].get(str(epoch), [])]
        assert sorted(set(reported)) == ALL or not hides
    assert any(rank["exchanged"] for rank in ranks) or framework == "timm"
    for rank, again in zip(ranks, resumed.reports, strict=True):
        assert rank["rest"][0]
        assert again["rest"] == rank["rest"]


def test_a_model_with_a_loss_of_its_own_gets_its_fields_alone_and_goes_on(tmp_path):
    need("transformers")
    import transformers

    from tonari.frameworks.transformers import Trainer

    class Model(torch.nn.Module):
        def __init__(self):
            super().__init__()
            self.layer = torch.nn.Linear(8, 3)

        def forward(self, point, labels):
            logits = self.layer(point)
            return {"loss": torch.nn.functional.cross_entropy(logits, labels), "logits": logits}

    def train(cache, **how):
        args = transformers.TrainingArguments(
            str(tmp_path / "out"), num_train_epochs=2, per_device_train_batch_size=16, use_cpu=True,
            report_to="none", disable_tqdm=True, save_steps=5,
        )  # fmt: skip
        torch.manual_seed(0)
        with Loader(
            f"{tmp_path}/blobs/train-*.tar", batch_size=16, drop_last=True, cache=tmp_path / cache,
            fields={"point": Array("bin", (8,), "float32"), "labels": Int("cls")},
        ) as loader:  # fmt: skip
            evaluation = loader.evaluation(f"{tmp_path}/blobs/val/*.tar")
            trainer = Trainer(Model(), args, loader=loader, evaluation=evaluation)
            trainer.train(**how)
            assert trainer.state.global_step == 2 * 15
            return trainer.evaluate()["eval_loss"]

    blobs.write_blobs(tmp_path / "blobs")
    whole = train("first")
    shutil.rmtree(tmp_path / "out" / "checkpoint-30")
    assert train("second", resume_from_checkpoint=True) == whole


def test_lightning_is_asked_for_new_dataloaders_in_each_epoch(tmp_path):
    need("lightning")
    import lightning

    from examples.lightning_fit import Classifier, make_data

    trainer = lightning.Trainer(max_epochs=1, accelerator="cpu", logger=False)
    data = make_data(tmp_path, tmp_path)
    with pytest.raises(ValueError, match=r"give Trainer\(reload_dataloaders_every_n_epochs=1\)"):
        trainer.fit(Classifier(), datamodule=data)


def test_prepare_of_accelerate_leaves_the_loader_as_it_is(tmp_path):
    accelerate = pytest.importorskip("accelerate", reason="pip install 'tonari[frameworks]'")
    loader = object.__new__(Loader)
    assert accelerate.Accelerator(cpu=True).prepare(loader) is loader
