"""A study's file: what an arm changes of a run, and what makes another cell of it."""

import inspect
import os
from pathlib import Path

import pytest

import importance.keep_agreed
from importance import Auto, KeepAgreed, RandomPrune
from tests.tonari.ablate.study import STUDY, make_study
from tonari.ablate.controls import CONTROLS
from tonari.ablate.identity import code_key
from tonari.ablate.study import load_study
from tonari.trainer.config.config import build_config
from tonari.trainer.errors import ConfigError
from tonari.trainer.run.build import make_importance

EXAMPLES = Path(__file__).parents[3] / "examples"


@pytest.fixture
def study(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    return make_study(tmp_path)


def arms(path: Path, *overrides: str, full: bool = False):
    return {arm.name: arm for arm in load_study(path, overrides, full=full).arms}


def digests(path: Path, *overrides: str) -> dict[tuple[str, int], str]:
    study = load_study(path, overrides)
    return {(cell.arm.name, cell.seed): cell.digest for cell in study.cells()}


def test_an_arm_is_the_file_then_what_all_share_then_the_command_line_then_its_own(study):
    base = study.with_name("base.toml")
    base.write_text(
        '[data]\ntrain = "other"\n[optimizer]\nlr = 0.5\nmomentum = 0.5\n[run]\nepochs = 9\n'
    )
    study.write_text(
        STUDY.replace("seeds = 2", 'seeds = 2\nconfig = "base.toml"')
        + "optimizer.momentum = 0.25\n[train.optimizer]\nmin_lr = 0.01\n"
    )
    found = arms(study, "optimizer.momentum=0.75", "optimizer.weight_decay=0.5")
    plain, changed = (found[name].config(0) for name in ("plain", "random, half"))
    assert (plain.optimizer.lr, plain.data.train, plain.run.epochs) == (0.5, "train.parquet", 1)
    assert (plain.optimizer.momentum, changed.optimizer.momentum) == (0.75, 0.25)
    assert plain.optimizer.weight_decay == changed.optimizer.weight_decay == 0.5
    assert plain.optimizer.min_lr == 0.01
    assert found["plain"].settings["optimizer.momentum"] == 0.75


def test_another_kind_leaves_out_what_the_shared_one_takes(study):
    study.write_text(
        STUDY.replace("[arms.plain]", '[train.importance]\nkind = "kakurenbo"\ntau = 0.5\n'
                      "[arms.plain]").replace("random, half", "infobatch, half")
        .replace('kind = "random"', 'kind = "infobatch"')
    )  # fmt: skip
    found = arms(study)
    assert found["plain"].settings["importance.tau"] == 0.5
    assert "importance.tau" not in found["infobatch, half"].settings


def test_a_seed_stands_in_the_names_of_files_and_is_the_run_s(study):
    os.rename("train.parquet", "train-0.parquet")
    found = arms(study, "data.train=train-{seed}.parquet")
    for seed in (0, 1):
        config = found["plain"].config(seed)
        assert (config.data.train, config.run.seed) == (f"train-{seed}.parquet", seed)


def test_seeds_begin_where_a_study_says(study):
    cells = load_study(study, ["study.first_seed=5"]).cells()
    assert [cell.seed for cell in cells] == [5, 5, 6, 6]
    assert len({cell.digest for cell in cells}) == 4


def test_tables_below_full_are_above_the_others(study):
    study.write_text(
        STUDY + "[full.study]\nseeds = 7\n[full.train.run]\nepochs = 6\n[full.arms.more]\n"
        'control = "epochs"\n[full.train.importance]\nkind = "random"\n'
    )
    small, full = load_study(study), load_study(study, full=True)
    assert (small.study.seeds, full.study.seeds) == (2, 7)
    assert [arm.config(0).run.epochs for arm in full.arms] == [6, 6, 6]
    assert [arm.name for arm in full.arms] == ["plain", "random, half", "more"]
    assert full.arms[2].control == "epochs"
    study.write_text(STUDY + "[full.run]\nepochs = 6\n")
    with pytest.raises(ConfigError, match=r"full.run is unknown; did you mean full"):
        load_study(study, full=True)


def test_what_changes_no_result_makes_no_other_cell(study):
    before = digests(study)
    for override in (
        "study.margin_points=2", "study.cost=cost_rows", "study.keep_runs=true",
        "run.log_steps=7", "run.checkpoint_epochs=0", "run.directory=elsewhere",
        "data.cache.path=elsewhere", "data.workers.threads=3", "optimizer.momentum=0.9",
        "data.staging.readers=4",
    ):  # fmt: skip
        assert digests(study, override) == before, override
    study.write_text(STUDY.replace("[arms.plain]", '# a comment\n[arms.plain]\ncontrol = "epochs"'))
    assert digests(study) == before


def test_what_changes_a_result_makes_other_cells(study):
    before = digests(study)
    for override in (
        "optimizer.lr=0.2", "run.epochs=2", "data.batch_size=4", "model.image_size=16",
        "run.evaluate_epochs=2", "study.launch=mpiexec -n 1", "data.staging.when=overlap",
    ):  # fmt: skip
        assert not set(digests(study, override).values()) & set(before.values()), override


def test_data_is_known_by_its_content_and_not_by_its_name(study):
    before = digests(study)
    os.rename("train.parquet", "other.parquet")
    assert digests(study, "data.train=other.parquet") == before
    content = bytearray(Path("other.parquet").read_bytes())
    content[200] ^= 1
    Path("other.parquet").write_bytes(content)
    assert digests(study, "data.train=other.parquet") != before
    for name in ("a.bin", "a.idx"):
        Path(name).write_bytes(b"0")
    before = digests(study, "data.train=a.bin")
    Path("a.idx").write_bytes(b"1")
    assert digests(study, "data.train=a.bin") != before


OWN = """
from dataclasses import dataclass
from torch import nn
from dataio import Selection


@dataclass(frozen=True)
class Nothing:
    much: float = 0.5
    columns = ("loss",)

    def select(self, rows, *, epoch, num_epochs):
        return Selection()

    def due(self, hidden, *, epoch):
        return hidden[:0]


def model():
    return nn.Sequential(nn.Flatten(), nn.Linear(192, 4))
"""


@pytest.mark.parametrize("key", ["importance", "model"])
def test_code_of_ones_own_makes_cells_of_its_own_and_a_comment_none(study, monkeypatch, key):
    monkeypatch.syspath_prepend(str(study.parent))
    name = f"own_{key}"
    what = {"importance": "Nothing", "model": "model"}[key]
    Path(f"{name}.py").write_text(OWN)
    study.write_text(STUDY + f'[arms.own]\n{key}.kind = "{name}:{what}"\n')
    before = digests(study)
    real = inspect.getsource

    def change(added: str) -> dict[tuple[str, int], str]:
        def getsource(module: object) -> str:
            mine = getattr(module, "__name__", "") == name
            return real(module) + (added if mine else "")  # type: ignore[arg-type]

        monkeypatch.setattr(inspect, "getsource", getsource)
        return digests(study)

    assert change("# a comment\n") == before
    after = change("CHANGED = 1\n")
    assert {cell for cell in before if before[cell] != after[cell]} == {("own", 0), ("own", 1)}


def test_a_policy_that_hands_on_to_another_has_cells_of_both_codes(monkeypatch):
    policies = (Auto, KeepAgreed, RandomPrune)
    before = [code_key(its) for its in policies]
    source = inspect.getsource

    def changed(module: object) -> str:
        edited = "\nCHANGED = 1\n" if module is importance.keep_agreed else ""
        return source(module) + edited  # type: ignore[arg-type]

    monkeypatch.setattr(inspect, "getsource", changed)
    now = [code_key(its) for its in policies]
    assert [one != other for one, other in zip(before, now, strict=True)] == [True, True, False]


@pytest.mark.parametrize(
    ("arm", "message"),
    [
        ('importance.kind = "nowhere:Policy"', "importance.kind: .*cannot be imported"),
        ('model.kind = "nowhere:model"', r'model.kind is "nowhere:model", which cannot be'),
        (
            'importance.kind = "random"\nimportance.args = {a = 1}',
            r'importance.args is given, but importance.kind "random" takes fraction, delta only',
        ),
    ],
)
def test_an_arm_that_cannot_be_made_is_named(study, arm, message):
    study.write_text(STUDY + f"[arms.own]\n{arm}\n")
    with pytest.raises(ConfigError, match=message):
        load_study(study).cells()


@pytest.mark.parametrize("full", [False, True])
def test_the_example_holds_every_control_and_freezes_what_its_claim_is_of(full):
    study = load_study(EXAMPLES / "selection_study.toml", full=full)
    found = {arm.name: arm for arm in study.arms}
    assert {arm.control for arm in study.arms} == {"", "oracle", *CONTROLS} - {"highest"}
    claimed = found["keep agreed, half"].config(0)
    policy = make_importance(claimed)
    assert isinstance(policy, KeepAgreed)
    assert (policy.fraction, policy.begins, claimed.run.epochs) == (0.5, 8, 20)
    assert study.study.cost == "cost_rows"


@pytest.mark.parametrize("name", ["importance", "shuffle"])
def test_the_other_examples_are_studies_of_runs(name, monkeypatch):
    monkeypatch.chdir(EXAMPLES.parent)
    for full in (False, True):
        study = load_study(EXAMPLES / f"{name}_study.toml", full=full)
        for arm in study.arms:
            assert build_config(arm.tables_of(3)).run.seed == 3
        controls = {arm.control for arm in study.arms}
        assert controls == ({"", "epochs", "random"} if name == "importance" else {""})
