"""A study's arms hide, weigh and remember what real loaders of as many ranks would."""

import dataclasses
import inspect
import os
from pathlib import Path

import numpy as np
import pytest
import torch

import dataio
import importance.kakurenbo
from dataio.plan.layout import Layout
from dataio.plan.policies import Importance
from dataio.world import run_threads, thread_worlds
from importance import (
    Auto,
    InfoBatch,
    Kakurenbo,
    KeepAgreed,
    Learnable,
    RandomPrune,
    SelectiveBackprop,
)
from shuffle import Global, Local, Partial
from tests.memory_source import FIELDS, MemorySource
from tests.tonari.ablate.test_study import blobs
from tonari.ablate.study.config import SettingsConfig, load_study
from tonari.ablate.study.corrupt import as_found
from tonari.ablate.study.importance import EpochReports, Memory
from tonari.ablate.study.order import epoch_batches
from tonari.ablate.study.run import CellResult, train_cell
from tonari.ablate.study.training import Training
from tonari.trainer.config.settings import build_section
from tonari.trainer.errors import ConfigError

EXAMPLE = Path(__file__).parents[3] / "examples" / "importance_study.toml"
NUM_SAMPLES, EPOCHS, BATCH, SEED = 101, 5, 3, 7
POLICIES: dict[str, Importance] = {
    "kakurenbo": Kakurenbo(0.4, tau=0.3, rate="realised"),
    "kakurenbo of each pool": Kakurenbo(0.5, tau=0.2, threshold="pool", refresh_every=2),
    "infobatch": InfoBatch(0.6),
    "selective backprop": SelectiveBackprop(0.4, refresh_every=2),
    "random": RandomPrune(0.3),
    "auto": Auto(0.5, begins=2, second_guess=0.9, refresh_every=2),
    "keep agreed": KeepAgreed(0.5, begins=1, refresh_every=2),
    "learnable": Learnable(0.4, least_fall=0.6, begins=3, refresh_every=2),
}


def told(ids, epoch):
    """What a model might say of some samples: loss, correct, confidence."""
    draw = np.random.default_rng(epoch).random((3, NUM_SAMPLES))[:, np.asarray(ids)]
    loss, right, confidence = torch.from_numpy(draw.astype(np.float32))
    return 4 * loss**2, right < 0.8, confidence


def loader_epochs(world, root, shuffle, policy):
    """What a real loader of this rank delivers and remembers, epoch by epoch."""
    found = []
    with dataio.Loader(
        MemorySource(NUM_SAMPLES), batch_size=BATCH, fields=FIELDS, cache=root / "cache",
        shuffle=shuffle, importance=policy, seed=SEED, world=world,
        workers=dataio.Workers(threads=0), reports=dataio.Reports(progress=False),
    ) as loader:  # fmt: skip
        for epoch in loader.epochs(EPOCHS):
            trained: list[tuple[list[int], list[float]]] = []
            refreshed: list[tuple[list[int], list[float]]] = []
            scores: dict[int, tuple[float, ...]] = {}
            for pass_, batches in ((trained, loader), (refreshed, loader.refresh())):
                for batch in batches:
                    ids = batch["sample_id"].clamp(min=0)
                    loader.report(batch, *told(ids, epoch))
                    valid = batch["slot"] >= 0
                    loader._session.feedback.flush()
                    entries = loader._session.pool.scores[batch["slot"][valid].numpy()]
                    scores |= zip(ids[valid].tolist(), entries.tolist(), strict=True)
                    pass_.append((ids[valid].tolist(), batch["weight"][valid].tolist()))
            found.append((trained, refreshed, scores, loader.lr_factor))
    return found


def study_epochs(shuffle, layout, policy):
    """The same of all replicas, as a study computes it."""
    # As MemorySource has it
    memory = Memory(policy, NUM_SAMPLES, EPOCHS, {"label": np.arange(NUM_SAMPLES) % 10})
    for epoch in range(EPOCHS):
        batches = epoch_batches(
            shuffle, layout, seed=SEED, epoch=epoch, batch_size=BATCH, memory=memory
        )
        reports = EpochReports()
        if memory.keeps_scores:
            for ids, valid in zip(batches.sample_id, batches.valid, strict=True):
                loss, correct, confidence = (part.ravel() for part in told(ids, epoch))
                # What is said of padding must not count
                loss[torch.from_numpy(~valid.ravel())] = 0.0
                reports.add(ids, valid, loss, correct, confidence)
            reports.add(batches.due, np.ones(len(batches.due), bool), *told(batches.due, epoch))
            reports.write(memory.scores, epoch=epoch)
        yield batches, memory


@pytest.mark.parametrize("policy", POLICIES)
@pytest.mark.parametrize(
    ("replicas", "shuffle"),
    [
        ((2, 2), Partial(0.3)),
        ((1, 1, 1), Local()),
        ((2, 1), Global()),
    ],
    ids=["partial", "local", "global"],
)
def test_a_study_hides_weighs_and_remembers_as_real_loaders(tmp_path, replicas, shuffle, policy):
    ranks = run_threads(
        thread_worlds(list(replicas), timeout_s=20),
        lambda world: loader_epochs(world, tmp_path, shuffle, POLICIES[policy]),
    )
    most_hidden = 0
    computed = study_epochs(shuffle, Layout(replicas, NUM_SAMPLES), POLICIES[policy])
    for epoch, (batches, memory) in enumerate(computed):
        now = [rank[epoch] for rank in ranks]
        for replica, (trained, _, scores, lr_factor) in enumerate(now):
            assert lr_factor == batches.lr_factor
            assert len(trained) == len(batches.sample_id)
            for step, (ids, weight) in enumerate(trained):
                valid = batches.valid[step, replica]
                assert batches.sample_id[step, replica][valid].tolist() == ids
                assert batches.weight[step, replica][valid].tolist() == weight
                assert (batches.weight[step, replica][~valid] == 0).all()
            if memory.keeps_scores:
                assert memory.scores[list(scores)].tolist() == list(scores.values())
        refreshed = [i for _, batches_, *_ in now for ids, _ in batches_ for i in ids]
        assert sorted(refreshed) == sorted(batches.due.tolist())
        trained = batches.sample_id[batches.valid]
        assert sorted([*batches.hidden, *trained]) == list(range(NUM_SAMPLES))
        most_hidden = max(most_hidden, len(batches.hidden))
    assert most_hidden >= 5


def settings(**changed) -> SettingsConfig:
    common = {"replicas": 2, "batch_size": 8, "width": 4, "norm": "batch", "lr": 0.05, "epochs": 8}
    common |= {"shuffle": "global"}
    return build_section(SettingsConfig, {**common, **changed})


def cell(**changed) -> CellResult:
    return train_cell(
        settings(**changed), as_found(blobs(200)), blobs(90, seed=1), num_classes=4, seed=0
    )


def test_an_exchange_brings_the_classes_of_nodes_nearer_to_those_of_all():
    skews = [point.class_skew for point in cell(replicas=4, shuffle="partial").points]
    assert skews[0] > 0.5
    assert skews[-1] < skews[0] / 2
    assert cell(replicas=4, shuffle="global").points[0].class_skew == 0


def test_hidden_rows_are_not_trained_and_cost_one_forward_pass_where_refreshed():
    full, hiding = cell(), cell(importance="kakurenbo", fraction=0.5, tau=0.2)
    never = cell(importance="kakurenbo", fraction=0.5, tau=0.2, refresh_every=0)
    assert full.rows_trained == 8 * 200
    assert full.hidden_fraction == full.rows_refreshed == never.rows_refreshed == 0
    for result in (hiding, never):
        hidden = round(result.hidden_fraction * 8 * 200)
        assert hidden > 100
        assert result.rows_trained == 8 * 200 - hidden
    assert hiding.rows_refreshed == round(hiding.hidden_fraction * 8 * 200)
    passes = (3 * hiding.rows_trained + hiding.rows_refreshed) / (3 * full.rows_trained)
    assert hiding.flops / full.flops == pytest.approx(passes)
    last = hiding.points[-1]
    assert (last.rows_trained, last.flops) == (hiding.rows_trained, hiding.flops)
    assert last.train_s == hiding.train_s < hiding.cpu_s


@pytest.mark.parametrize("rate", ["cap", "none"])
def test_the_learning_rate_grows_by_the_factor_of_what_is_hidden(rate):
    arm = settings(
        importance="kakurenbo", fraction=0.5, tau=0.0, alphas=(1.0,), drops=(), rate=rate, lr=0.01
    )
    training, plain = (
        Training(which, as_found(blobs(90)), num_classes=4, seed=0, device="cpu")
        for which in (arm, settings(lr=0.01))
    )
    for epoch in range(3):
        point = training.train_epoch(epoch)
        assert plain.train_epoch(epoch).lr_factor == 1
        factor = 2 if epoch and rate == "cap" else 1
        assert point.lr_factor == factor
        assert point.hidden_cap == (0.5 if epoch else 0)
        used, base = (t.replicas.optimizer.param_groups[0]["lr"] for t in (training, plain))
        assert used == pytest.approx(factor * base)


def test_a_random_arm_of_weighted_rows_learns_as_well():
    result = cell(importance="random", fraction=0.5, epochs=16, delta=1.0)
    assert result.hidden_fraction == 0.5
    assert result.accuracy > 0.5


def test_a_refresh_leaves_the_statistics_of_the_model_alone():
    # Of the rows that it passes; only those trained change what is tested.
    arms = [
        cell(importance="kakurenbo", fraction=0.5, tau=0.0, epochs=2, refresh_every=every)
        for every in (1, 0)
    ]
    # Epoch 1 is the first that hides, and its refresh comes after the last training step
    assert [arm.rows_refreshed > 0 for arm in arms] == [True, False]
    assert arms[0].points[-1].loss == arms[1].points[-1].loss
    assert arms[0].accuracy == arms[1].accuracy


def test_hidden_rows_have_a_score_of_this_epoch_only_where_they_are_refreshed():
    for every, refreshed in ((1, True), (0, False)):
        arm = settings(importance="kakurenbo", fraction=0.5, tau=0.0, refresh_every=every)
        training = Training(arm, as_found(blobs(90)), num_classes=4, seed=0, device="cpu")
        points = [training.train_epoch(epoch) for epoch in range(3)]
        hidden = round(points[-1].hidden_fraction * 90)
        fresh = int((training._memory.scores["epoch"] == 2).sum())
        assert hidden > 5
        assert fresh == (90 if refreshed else 90 - hidden)


def test_fewer_epochs_have_the_whole_schedule():
    whole, part = settings(epochs=20), settings(epochs=20, epochs_fraction=0.6, warmup_epochs=5)
    assert (whole.num_epochs, part.num_epochs) == (20, 12)
    assert part.num_warmup_epochs == 3
    assert len(cell(epochs=10, epochs_fraction=0.7).points) == 7


def test_tests_on_the_way_may_be_of_fewer_images_than_the_last(monkeypatch):
    seen = []

    def tested(model, task, test, device):
        seen.append(len(test.labels))
        return 0.5, 1.0

    monkeypatch.setattr("tonari.ablate.study.run._tested", tested)
    cell(epochs=5, evaluate_epochs=2, evaluate_samples=30)
    assert seen == [30, 30, 90]


@pytest.mark.parametrize(
    ("arm", "message"),
    [
        (
            {"tau": 0.5},
            r"arm 'a': settings.tau is given, but .* \"full\" takes columns only; leave",
        ),
        (
            {"importance": "random", "fractoin": 0.5},
            r"arm 'a': settings.fractoin is unknown; did you mean settings.fraction\?",
        ),
        (
            {"importance": "random", "fraction": "half"},
            r"arm 'a': settings.fraction is 'half', expected a number in .*; correct it",
        ),
        (
            {"importance": "infobatch", "refresh_every": 2},
            r"arm 'a': settings.refresh_every is given, .* takes fraction, delta only; leave",
        ),
        (
            {"importance": "kakurenbo", "update": "average"},
            r"arm 'a': settings.importance is 'kakurenbo' with .* 'average', expected 'gradients'",
        ),
        (
            {"importance": "kakurenbo", "drops": [0.5, 0.2]},
            r"arm 'a': \[settings\]: Kakurenbo: drops are \(0.5, 0.2\)",
        ),
        (
            {"importance": "kakurenbos"},
            r"arm 'a': settings.importance is \"kakurenbos\", .*; did you mean 'kakurenbo'\?",
        ),
    ],
)
def test_what_a_policy_cannot_do_is_refused_with_arm_and_key(tmp_path, arm, message):
    with pytest.raises(ConfigError, match=message):
        load_study(write(tmp_path, f"[arms]\na = {inline(arm)}"))


def inline(table) -> str:
    values = [f"{k} = {v!r}" for k, v in table.items()]
    return f"{{{', '.join(values)}}}"


def write(directory: Path, text: str) -> Path:
    path = directory / "study.toml"
    head = '[study]\nbaseline = "a"\n[data]\ntrain = "x"\ntest = "y"\nimage_size = 8\n'
    path.write_text(head + text)
    return path


def test_what_an_arm_is_called_and_shown_as_makes_no_other_cell(tmp_path):
    plain, labelled = (
        load_study(write(tmp_path, f"[arms.a]\ncontrol = {control!r}")).cells()[0]
        for control in ("", "random")
    )
    assert plain.digest == labelled.digest
    assert dataclasses.replace(plain.arm.settings, control="random") == labelled.arm.settings


def digest_of(tmp_path: Path, text: str = "") -> str:
    return load_study(write(tmp_path, f"[arms.a]\n{text}")).cells()[0].digest


def test_data_of_the_same_name_and_size_makes_other_cells(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    for name in ("train", "test"):
        study = tmp_path / f"{name}.parquet"
        study.write_bytes(b"three rows")
    seen: list[str] = []
    for content in (b"three rows", b"other rows", b"three rows"):
        # Two draws of wrong labels, say: nothing tells them apart but what is in them.
        (tmp_path / "train.parquet").write_bytes(content)
        os.utime(tmp_path / "train.parquet", ns=(len(seen), len(seen)))
        digests = load_study(
            write(tmp_path, "[arms.a]"), ("data.train=train.parquet", "data.test=test.parquet")
        )
        seen.append(digests.cells()[0].digest)
    assert seen[0] != seen[1]
    assert seen[0] == seen[2]
    # Wherever it lies, and in a folder or by a pattern too.
    (tmp_path / "elsewhere").mkdir()
    (tmp_path / "train.parquet").rename(tmp_path / "elsewhere" / "moved.parquet")
    moved = ("data.train=elsewhere/*.parquet", "data.test=test.parquet")
    assert load_study(write(tmp_path, "[arms.a]"), moved).cells()[0].digest == seen[0]
    (tmp_path / "elsewhere" / "moved.parquet").write_bytes(b"wrong rows")
    assert load_study(write(tmp_path, "[arms.a]"), moved).cells()[0].digest != seen[0]


def test_a_setting_at_its_default_and_a_comment_make_no_other_cell_and_code_does(
    tmp_path, monkeypatch
):
    assert digest_of(tmp_path) == digest_of(tmp_path, 'shuffle = "local"\nlr = 0.1')
    assert digest_of(tmp_path) != digest_of(tmp_path, "lr = 0.2")
    hidden = 'importance = "kakurenbo"\nfraction = 0.3'
    code = inspect.getsource(importance.kakurenbo)
    before = digest_of(tmp_path, hidden)
    plain = digest_of(tmp_path)
    for text, is_same in ((f"# said\n{code}", True), (f"{code}\nOTHER = 1\n", False)):
        monkeypatch.setattr(
            "tonari.ablate.study.identity.inspect.getsource", lambda module, text=text: text
        )
        assert (digest_of(tmp_path, hidden) == before) is is_same
        assert digest_of(tmp_path) == plain


def test_other_seeds_are_other_cells(tmp_path):
    path = write(tmp_path, "[arms.a]")
    tried = load_study(path, ("study.seeds=2",)).cells()
    shown = load_study(path, ("study.seeds=3", "study.first_seed=2")).cells()
    assert [cell.seed for cell in shown] == [2, 3, 4]
    whole = load_study(path, ("study.seeds=5",)).cells()
    assert [cell.digest for cell in (*tried, *shown)] == [cell.digest for cell in whole]


def test_the_example_has_both_controls_in_both_sizes():
    for full in (False, True):
        study = load_study(EXAMPLE, full=full)
        controls = [arm.settings.control for arm in study.arms]
        assert {name: controls.count(name) >= 3 for name in ("epochs", "random")} == {
            "epochs": True, "random": True
        }  # fmt: skip
        assert {arm.settings.importance for arm in study.arms} == {
            "full", "kakurenbo", "infobatch", "selective_backprop", "random"
        }  # fmt: skip
        assert study.study.seeds == 5
    small, large = (
        {arm.name for arm in load_study(EXAMPLE, full=full).arms} for full in (False, True)
    )
    assert small < large, "the full size has arms of its own beside the same"
