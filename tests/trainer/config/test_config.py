import dataclasses
from pathlib import Path

import numpy as np
import pytest
from numpy.typing import NDArray

import dataio
import shuffle
from dataio.plan.history import Candidates, ScoreColumn
from dataio.plan.policies import Selection, refresh_every
from importance import (
    Forgetting,
    Full,
    InfoBatch,
    Kakurenbo,
    KeepAgreed,
    Learnable,
    RandomPrune,
    SelectiveBackprop,
    SeTa,
    StoppedLearning,
    Weighted,
    policies,
)
from tonari.trainer.config.config import Config, load_config
from tonari.trainer.config.settings import ELSEWHERE
from tonari.trainer.errors import ConfigError
from tonari.trainer.run.build import lay_out, make_importance

SMALLEST = '[data]\ntrain = "a.parquet"\n[model]\nnum_classes = 10\n'


def load(directory: Path, text: str = "", overrides: tuple[str, ...] = ()) -> Config:
    path = directory / "run.toml"
    path.write_text(SMALLEST + text)
    return load_config(path, overrides)


def test_what_the_file_leaves_out_has_a_default(tmp_path: Path) -> None:
    config = load(tmp_path)
    assert config.data.train == "a.parquet"
    assert config.run.epochs == 10
    assert config.mesh.dp_replicate is None


def test_an_override_wins_over_the_file(tmp_path: Path) -> None:
    overrides = ("run.epochs=3", "data.train=/b/c.parquet", "optimizer.milestones=[1, 2]")
    config = load(tmp_path, "[run]\nepochs = 7\n", overrides)
    assert config.run.epochs == 3
    assert config.data.train == "/b/c.parquet"
    assert config.optimizer.milestones == (1, 2)


def test_a_list_of_patterns_is_taken(tmp_path: Path) -> None:
    assert load(tmp_path, "", ('data.train=["a", "b"]',)).data.train == ("a", "b")


@pytest.mark.parametrize(
    ("override", "message"),
    [
        ("run.epocs=3", r"run.toml: run.epocs is unknown; did you mean run.epochs\? Known here"),
        ("runn.epochs=3", r"runn is unknown; did you mean run\?"),
        *((f"{theirs}=1", rf"did you mean {ours}\?") for theirs, ours in ELSEWHERE.items()),
        ("run.epochs=0", r"run.epochs is 0, expected a whole number >= 1; correct it in the file"),
        ("run.epochs=1.5", r"run.epochs is 1.5, expected a whole number >= 1"),
        ("run.epochs=true", r"run.epochs is True, expected a whole number >= 1"),
        ("run.epochs=many", r"run.epochs is 'many', expected a whole number"),
        (
            "shuffle.exchange=1.5",
            r"run.toml: shuffle.exchange is 1.5, expected a number in \[0, 1\]; correct",
        ),
        (
            "shuffle.exchange=most",
            r"shuffle.exchange is 'most', expected a number in .*; correct it",
        ),
        ("shuffle.exchang=0.5", r"shuffle.exchang is unknown; did you mean shuffle.\w+\? Known"),
        ("optimizer.lr=0", r"optimizer.lr is 0, expected a number > 0"),
        ("optimizer.lr=inf", r"optimizer.lr is inf, expected a number > 0"),
        ("optimizer.milestones=[0]", r"milestones is \(0,\), expected a list, each a whole number"),
        ("shuffle.kind=ring", r"kind is .ring., expected one of 'local', 'partial', .*; did you"),
        ("data.channels=true", r"data.channels is True, expected one of 1, 3"),
        ("shuffle.moves=1", r"shuffle.moves is 1, expected true or false"),
        (
            "importance.kind=kakurenba",
            r"kind is .kakurenba., expected one of .*package.module:Name .*; did you mean .kakur",
        ),
        ("importance.tau=0.5", r'importance.tau is given, but .*"full" takes columns only; leave'),
        ("importance.drops=fast", r'drops is given, but importance.kind "full" takes columns only'),
        ("importance.drops=lr", r'drops is given, but importance.kind "full" takes columns only;'),
        ("importance.fractoin=1", r"importance.fractoin is unknown; did you mean importance.\w+\?"),
        (
            "importance.columns=['los']",
            r"columns is \('los',\), expected a list, each one of 'loss'",
        ),
        ("model.depth=21", r'model.depth is given, but model.kind "small_cnn" takes num_classes,'),
        ("model.num_clases=10", r"model.num_clases is unknown; did you mean model.num_classes\?"),
        ("model.image_size=0", r"model.image_size is 0, expected a whole number >= 1; correct it"),
        ("data.decoded=true", r"data.decoded is true, but nothing brings all pictures to one size"),
        ("model.in_channels=1", r"model.in_channels is given, but it is set by data.channels; lea"),
        ("model.args={a = 1}", r"model.args is given, .* takes num_classes, image_size only, each"),
        ("model.rope={theta = 2}", r'rope is given, but model.kind "small_cnn" takes num_classes'),
        ("mesh.schedule=2f2b", r"mesh.schedule is '2f2b', expected one of 'gpipe', '1f1b'"),
        ("mesh.dtype=float16", r"mesh.dtype is 'float16', expected one of 'float32', 'bfloat16'"),
        ("mesh.microbatches=0", r"mesh.microbatches is 0, expected a whole number >= 1 or leaving"),
        ("optimizer.betas=[0.9]", r"betas is \(0.9,\), expected two numbers in \[0, 1\); give"),
        ("optimizer.clip=-1", r"optimizer.clip is -1, expected a number >= 0"),
        ("optimizer.accumulate=0", r"optimizer.accumulate is 0, expected a whole number >= 1"),
        ("run.profile_steps=[5]", r"profile_steps is \(5,\), expected a first and a last step"),
        ("run.profile_steps=[5, 4]", r"profile_steps is \(5, 4\), expected a first and a last"),
        ("data.kind=text", r'model.kind is "small_cnn" and data.kind is "text", expected a gpt'),
        ("data.test_fraction=0.1", r"test_fraction is 0.1, expected 0 where data.kind is"),
        ("run=3", r"override 'run=3', expected section.key=value"),
        ("run.epochs", r"override 'run.epochs', expected section.key=value"),
    ],
)
def test_a_wrong_setting_names_field_value_range_and_cure(
    tmp_path: Path, override: str, message: str
) -> None:
    with pytest.raises(ConfigError, match=message):
        load(tmp_path, "", (override,))


@pytest.mark.parametrize(
    ("overrides", "expected"),
    [
        (("shuffle.kind=global", "shuffle.moves=true"), shuffle.Global(moves=True)),
        (("shuffle.kind=global",), shuffle.Global()),
        (("shuffle.kind=partial",), shuffle.Partial()),
        (("shuffle.exchange=0.2",), shuffle.Partial(0.2)),
        (("shuffle.moves=true",), shuffle.Global(moves=True)),
        ((), shuffle.Local()),
    ],
)
def test_a_shuffle_is_made_as_it_is_set(
    tmp_path: Path, overrides: tuple[str, ...], expected: object
) -> None:
    assert load(tmp_path, "", overrides).shuffle.make() == expected


def test_another_kind_on_the_command_line_leaves_out_what_only_the_file_s_takes(
    tmp_path: Path,
) -> None:
    text = '[shuffle]\nexchange = 0.2\n[importance]\nkind = "kakurenbo"\nfraction = 0.1\ntau = 0.5'
    kinds = ("shuffle.kind=global", "importance.kind=random", "model.kind=resnet")
    config = load(tmp_path, text, kinds)
    assert config.shuffle.make() == shuffle.Global()
    assert make_importance(config) == RandomPrune(0.1)
    assert config.model.settings == {"num_classes": 10}
    with pytest.raises(ConfigError, match=r'moves is given, .*kind "partial" takes exchange, comp'):
        load(tmp_path, text, ("shuffle.moves=true", "shuffle.kind=partial"))
    with pytest.raises(ConfigError, match=r'tau is given, .*kind "random" takes fraction, delta'):
        load(tmp_path, text.replace("kakurenbo", "random"), ("shuffle.kind=local",))


def test_a_setting_that_the_shuffle_does_not_take_is_named(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r'exchange is given, .*kind "global" takes moves only'):
        load(tmp_path, "", ("shuffle.kind=global", "shuffle.exchange=0.2"))


class Odd:
    """A policy of one's own: hides every other sample."""

    def __init__(self, first: int = 0) -> None:
        self.first = first

    @property
    def columns(self) -> tuple[ScoreColumn, ...]:
        return ("loss",)

    def select(self, rows: Candidates, *, epoch: int, num_epochs: int | None) -> Selection:
        return Selection(hidden=np.flatnonzero(rows.sample_id % 2 == self.first))

    def due(self, hidden: NDArray[np.int64], *, epoch: int) -> NDArray[np.int64]:
        return hidden[:0]


def test_a_policy_of_ones_own_is_made_with_its_own_keys(tmp_path: Path) -> None:
    kind = f"importance.kind={__name__}:Odd"
    made = make_importance(load(tmp_path, "", (kind, "importance.args.first=1")))
    assert isinstance(made, Odd)
    assert made.first == 1


@pytest.mark.parametrize(
    ("overrides", "message"),
    [
        (("kind=nowhere:Policy",), r"importance.kind: .*'nowhere:Policy' cannot be .*PYTHONPATH"),
        (("kind=dataio:Loader",), "is a class without columns, select, due, expected a class"),
        (("kind=math:pi",), "is a float without columns"),
        (
            (f"kind={__name__}:Odd", "args.fist=1"),
            r"args.fist is unknown; did you mean .*args.first",
        ),
        (("kind=random", "args.first=1"), r"args is given, .*\"random\" takes fraction, delta"),
        ((f"kind={__name__}:Odd", "fraction=0.5"), "fraction is given, .* takes args only"),
    ],
)
def test_a_policy_of_ones_own_that_cannot_be_made_is_named(
    tmp_path: Path, overrides: tuple[str, ...], message: str
) -> None:
    given = tuple(f"importance.{override}" for override in overrides)
    with pytest.raises(ConfigError, match=message):
        make_importance(load(tmp_path, "", given))


@pytest.mark.parametrize(
    ("overrides", "expected"),
    [
        ((), None),
        (("kind=full", 'columns=["loss", "forgotten"]'), Full(columns=("loss", "forgotten"))),
        (("kind=kakurenbo",), Kakurenbo(warmup_epochs=2)),
        (
            (
                "kind=kakurenbo", "fraction=0.1", "tau=0.9", "drops=[4, 8]", "alphas=[1, 0.5]",
                "threshold=pool", "rate=realised", "refresh_every=0",
            ),
            Kakurenbo(
                0.1, tau=0.9, drops=(4, 8), alphas=(1, 0.5), threshold="pool", rate="realised",
                warmup_epochs=2, refresh_every=None,
            ),
        ),
        (("kind=infobatch", "fraction=0.4", "delta=0.9"), InfoBatch(0.4, delta=0.9)),
        (("kind=selective_backprop", "refresh_every=3"), SelectiveBackprop(refresh_every=3)),
        (("kind=random", "delta=1"), RandomPrune(delta=1)),
        (
            ("kind=weighted", "balance=label", "num_samples=500", "over=pool"),
            Weighted(balance="label", num_samples=500, over="pool"),
        ),
        (("kind=weighted", "weights=label"), Weighted("label")),
        (("kind=learnable", "least_fall=0.2", "begins=5"), Learnable(least_fall=0.2, begins=5)),
        (("kind=keep_agreed", "label=kind", "begins=4"), KeepAgreed(label="kind", begins=4)),
        (("kind=forgetting", "fraction=0.1", "begins=4"), Forgetting(0.1, begins=4)),
        (
            ("kind=seta", "fraction=0.1", "groups=5", "window=0.9", "delta=1"),
            SeTa(0.1, groups=5, window=0.9, delta=1),
        ),
        (("kind=stopped_learning", "below=0.01"), StoppedLearning(0.01)),
    ],
)  # fmt: skip
def test_importance_is_made_as_it_is_set(
    tmp_path: Path, overrides: tuple[str, ...], expected: object
) -> None:
    given = tuple(f"importance.{override}" for override in overrides)
    assert make_importance(load(tmp_path, "", ("optimizer.warmup_epochs=2", *given))) == expected


def test_policies_that_mixing_does_not_go_with_are_those_that_score_hidden_rows_again() -> None:
    slots = np.arange(3)
    again = {name for name, made in policies().items() if len(made().due(slots, epoch=0))}
    assert again == {name for name, made in policies().items() if refresh_every(made())}
    never = [its(refresh_every=None) for name, its in policies().items() if name in again]  # type: ignore[call-arg]
    assert not any(refresh_every(made) or len(made.due(slots, epoch=0)) for made in never)


def test_kakurenbo_drops_where_the_learning_rate_does(tmp_path: Path) -> None:
    chosen = ("importance.kind=kakurenbo", "importance.drops=lr", "run.epochs=9")
    steps = ("optimizer.schedule=steps", "optimizer.milestones=[3, 6]")
    policy = make_importance(load(tmp_path, "", (*chosen, *steps)))
    assert policy == Kakurenbo(drops=(3, 6), alphas=(1.0, 0.8, 0.6), warmup_epochs=0)
    policy = make_importance(load(tmp_path, "", (*chosen, "optimizer.schedule=steps")))
    assert policy == Kakurenbo(drops=(), alphas=(1.0,), warmup_epochs=0)


@pytest.mark.parametrize(
    ("kind", "setting", "takes"),
    [
        ("random", "tau=0.5", "fraction, delta only"),
        ("weighted", "fraction=0.5", "weights, balance, num_samples, over only"),
        ("infobatch", "refresh_every=2", "fraction, delta only"),
        ("selective_backprop", "delta=0.5", "fraction, refresh_every only"),
        ("kakurenbo", 'columns=["loss"]', "fraction, tau, drops, alphas, threshold, rate"),
    ],
)
def test_a_setting_that_the_kind_does_not_take_is_named(
    tmp_path: Path, kind: str, setting: str, takes: str
) -> None:
    given = (f"importance.kind={kind}", f"importance.{setting}")
    name = setting.split("=")[0]
    with pytest.raises(
        ConfigError, match=rf'importance\.{name} is given, .*"{kind}" takes {takes}'
    ):
        load(tmp_path, "", given)


def test_settings_that_do_not_go_together_name_their_table(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"run.toml: \[importance\]: Kakurenbo: 4 alphas for 1"):
        load(tmp_path, "", ("importance.kind=kakurenbo", "importance.drops=[0.5]"))


@pytest.mark.parametrize(
    ("setting", "message"),
    [
        (
            "fraction=1",
            r"run.toml: importance.fraction is 1, expected a number in \[0, 1\); correct it",
        ),
        (
            "fraction=half",
            r"run.toml: importance.fraction is 'half', expected a number in .*; correct it",
        ),
        ("drops=fast", r"drops is 'fast', expected a list, each a number or one of 'lr'; correct"),
        ("alphas=[true]", r"alphas is \(True,\), expected a list, each a number in \[0, 1\]; cor"),
        ("rate=caps", r"rate is 'caps', expected one of 'cap', 'realised', 'none'; correct it"),
        ("refresh_every=1.5", r"refresh_every is 1.5, expected a whole number >= 1 or leaving it"),
        ("refresh_every=-1", r"importance.refresh_every is -1, expected a whole number >= 1 or"),
        ("taus=0.5", r"importance.taus is unknown; did you mean importance.tau\? Known here"),
        ("budget=0.5", r'budget is given, .*"kakurenbo" takes fraction, tau, .*; leave it out'),
    ],
)
@pytest.mark.parametrize("more", [(), ("importance.drops=lr",)])
def test_a_wrong_setting_of_a_policy_names_file_key_and_cure(
    tmp_path: Path, more: tuple[str, ...], setting: str, message: str
) -> None:
    given = ("importance.kind=kakurenbo", *more, f"importance.{setting}")
    with pytest.raises(ConfigError, match=message):
        load(tmp_path, "", given)


@pytest.mark.parametrize(
    ("setting", "message"),
    [
        ("norm_eps=0", r"model.norm_eps is 0, expected a number > 0; correct it in the file"),
        ("depth=2.5", r"model.depth is 2.5, expected a whole number >= 1; correct it in the file"),
        ("kv_heads=0", r"model.kv_heads is 0, expected a whole number >= 1 or leaving it out"),
        ("tied=1", r"model.tied is 1, expected true or false"),
        ("rope=3", r"model.rope is 3, expected a table; write \[model.rope\] above its keys"),
        ("rope={theta = 0}", r"model.rope.theta is 0, expected a number > 0; correct it"),
        ("rope={factor = 2, low_freq_factor = 4}", r"is 4, expected less than high_freq_f"),
        ("rope={thetta = 2}", r"model.rope.thetta is unknown; did you mean model.rope.theta"),
        ("sequence_length=8", r"sequence_length is given, but it is set by data.sequence_length"),
    ],
)
def test_a_wrong_setting_of_a_model_names_file_key_and_cure(
    tmp_path: Path, setting: str, message: str
) -> None:
    path = tmp_path / "run.toml"
    path.write_text('[data]\ntrain = "a.txt"\nkind = "text"\n[model]\nkind = "llama"\n')
    with pytest.raises(ConfigError, match=message):
        load_config(path, (f"model.{setting}",))


@pytest.mark.parametrize("schedule", ["zero_bubble", "zbv", "dualpipev"])
def test_selective_recomputation_needs_one_way_back(tmp_path: Path, schedule: str) -> None:
    given = (f"mesh.schedule={schedule}", "mesh.checkpointing=selective")
    with pytest.raises(ConfigError, match=r'"selective" with mesh\.schedule .*; choose mesh\.chec'):
        load(tmp_path, "", given)
    assert load(tmp_path, "", (given[0], "mesh.checkpointing=full")).mesh.schedule == schedule


def test_products_of_compiled_blocks_cannot_be_kept(tmp_path: Path) -> None:
    given = ("mesh.compile=true", "mesh.checkpointing=selective")
    with pytest.raises(ConfigError, match=r'"selective" with mesh.compile=true, .*; give'):
        load(tmp_path, "", given)
    assert load(tmp_path, "", (given[0], "mesh.checkpointing=full")).mesh.compile


def test_blocks_that_compute_again_need_a_way_to_do_so(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"checkpointing_blocks is 2, but .*; leave it out, or"):
        load(tmp_path, "", ("mesh.checkpointing_blocks=2",))


@pytest.mark.parametrize(
    ("given", "message"),
    [
        (
            "mesh.schedule=zbv",
            r'with mesh.schedule "zbv", .*; leave mesh.swap_blocks out, or choose',
        ),
        ("mesh.compile=true", r"with mesh.compile=true, .*; leave one of them out"),
        ("run.device=cpu", r'but run.device is "cpu", .*; leave mesh.swap_blocks out, or train on'),
    ],
)
def test_blocks_swap_on_a_gpu_with_one_way_back(tmp_path: Path, given: str, message: str) -> None:
    with pytest.raises(ConfigError, match=f"mesh.swap_blocks is 2,? {message}"):
        load(tmp_path, "", ("mesh.swap_blocks=2", given))
    some = ("mesh.swap_blocks=2", "mesh.checkpointing=selective", "mesh.schedule=interleaved")
    assert load(tmp_path, "", (*some, "mesh.offload=true")).mesh.swap_blocks == 2


def test_a_resnet_has_a_depth_of_its_kind(tmp_path: Path) -> None:
    resnet = load(tmp_path, "", ("model.kind=resnet", "model.depth=14"))
    assert lay_out(resnet, 1).num_stages == 1
    with pytest.raises(ConfigError, match=r"\[model\]: ResNet: depth is 21, .*; choose 20"):
        lay_out(load(tmp_path, "", ("model.kind=resnet", "model.depth=21")), 1)


def test_text_has_no_joined_shards(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r'data.joined is true, expected false where .* "text"'):
        load(tmp_path, "", ("data.kind=text", "data.joined=true"))
    with pytest.raises(ConfigError, match=r'data.decoded is for data.kind "images", .*; remove it'):
        load(tmp_path, "", ("data.kind=text", "data.decoded=auto"))


def test_classes_must_be_given_but_for_text(tmp_path: Path) -> None:
    path = tmp_path / "run.toml"
    path.write_text('[data]\ntrain = "a.parquet"\n[model]\n')
    with pytest.raises(ConfigError, match=r"model.num_classes is missing; set it in the file or"):
        load_config(path)
    assert load_config(path, ("data.kind=text", "model.kind=gpt")).model.settings == {}


def test_a_missing_setting_is_named(tmp_path: Path) -> None:
    path = tmp_path / "run.toml"
    path.write_text("[model]\nnum_classes = 10\n")
    with pytest.raises(ConfigError, match=r"data.train is missing; set it in the file or give"):
        load_config(path)


def test_a_section_must_be_a_table(tmp_path: Path) -> None:
    path = tmp_path / "run.toml"
    path.write_text("run = 3\n" + SMALLEST)
    with pytest.raises(ConfigError, match=r"run is 3, expected a table; write \[run\]"):
        load_config(path)


def test_a_file_that_is_not_toml_is_an_error(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"run.toml: cannot be read as TOML"):
        load(tmp_path, "[[[")
    with pytest.raises(ConfigError, match=r"cannot be read as TOML: .*No such file"):
        load_config(tmp_path / "absent.toml")


@pytest.mark.parametrize("name", ["cifar10", "vit_cifar10", "gpt_shakespeare", "llama_shakespeare"])
def test_the_shipped_examples_are_valid_on_their_mesh(name: str) -> None:
    config = load_config(Path(__file__).parents[3] / "examples" / f"{name}.toml")
    assert lay_out(config, 4).sizes[1:3] == ((4, 1) if name == "cifar10" else (2, 1))


def test_settings_cannot_change(tmp_path: Path) -> None:
    with pytest.raises(dataclasses.FrozenInstanceError):
        load(tmp_path).run.epochs = 3  # type: ignore[misc]


@pytest.mark.parametrize(
    ("data", "overrides"),
    [
        ('cache = {path = "/disk", quota = "1KB"}', ()),
        ('cache = "/disk"', ("data.cache.quota=1KB",)),
        ('cache.quota = "1KB"', ("data.cache=/disk",)),
        ("", ("data.cache.quota=1KB", "data.cache.path=/disk")),
        ("", ("data.cache=/disk", "data.cache.quota=1KB")),
        ("", ('data.cache={path="/disk", quota="1KB"}',)),
    ],
)
def test_a_group_is_the_same_object_in_python_in_the_file_and_on_the_command_line(
    tmp_path: Path, data: str, overrides: tuple[str, ...]
) -> None:
    path = tmp_path / "run.toml"
    path.write_text(SMALLEST.replace("[model]", f"{data}\n[model]"))
    assert load_config(path, overrides).data.cache == dataio.NodeCache("/disk", quota="1KB")


def test_groups_that_are_not_named_are_the_loader_s_own(tmp_path: Path) -> None:
    data = load(tmp_path, "", ("data.staging.readers=3", "data.workers.threads=0")).data
    assert data.cache == dataio.NodeCache()
    assert data.staging == dataio.Staging(readers=3)
    assert data.workers == dataio.Workers(threads=0)


@pytest.mark.parametrize(
    ("override", "message"),
    [
        ("data.cache.qota=1", r"data.cache.qota is unknown; did you mean data.cache.quota\?"),
        ("data.cache.quota=much", r"\[data.cache\]: NodeCache: quota: found 'much', expected a si"),
        ("data.staging=overlap", r"data.staging is 'overlap', expected a table; write \[data.stag"),
        ("data.staging.when=after", r"when is 'after', expected one of 'before', 'overlap'; corr"),
        ("data.staging.readers=0", r"staging.readers is 0, expected a whole number >= 1; corr"),
        ("data.workers.threads=two", r"workers.threads is 'two', expected a whole number >= 0 or"),
        ("data.workers=2", r"data.workers is 2, expected a table; write \[data.workers\] above"),
    ],
)
def test_a_wrong_setting_of_a_group_names_group_field_and_cure(
    tmp_path: Path, override: str, message: str
) -> None:
    with pytest.raises(ConfigError, match=message):
        load(tmp_path, "", (override,))
