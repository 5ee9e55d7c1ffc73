"""What a run would be, without starting it."""

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch.distributed as dist

from tests import hub
from tests.multirank import RunRanks
from tests.trainer.digits import write_config
from tests.trainer.foreign_models import PlainImages
from tests.trainer.tiles.tiled_run import SETTINGS
from tonari.train.command import main
from tonari.trainer.config.config import Config, load_config
from tonari.trainer.errors import ConfigError
from tonari.trainer.run import dry_run as dry_run_module
from tonari.trainer.run.dry_run import dry_run

GPT = """
[data]
kind = "text"
train = "absent.txt"
sequence_length = 16
batch_size = 8
[shuffle]
exchange = 0.1
[model]
kind = "gpt"
width = 32
depth = 4
heads = 4
"""


def load(directory: Path, *overrides: str) -> Config:
    path = directory / "run.toml"
    path.write_text(GPT)
    return load_config(path, overrides)


def test_parameters_of_all_ranks_are_the_model_s(tmp_path: Path) -> None:
    alone = dry_run(load(tmp_path), world_size=1, num_nodes=1)
    (whole,) = alone.pipeline_ranks
    assert whole.parameters == whole.rank_parameters == alone.parameters
    cut = dry_run(load(tmp_path, "mesh.pp=2", "mesh.dp_shard=2"), world_size=4, num_nodes=1)
    assert sum(rank.parameters for rank in cut.pipeline_ranks) == alone.parameters
    for rank in cut.pipeline_ranks:
        assert rank.parameters / 2 <= rank.rank_parameters < 0.51 * rank.parameters
    assert not dist.is_initialized()


def test_of_tiles_a_part_of_the_activations_is_counted(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    def settings(*tiles: int) -> str:
        path = tmp_path / f"{len(tiles)}.toml"
        path.write_text(
            SETTINGS.format(
                data="absent.npz", cache=tmp_path, batch_size=8, model="unet", tiles=[*tiles],
                directory=tmp_path,
            )
        )  # fmt: skip
        return str(path)

    def activations(path: str, ranks: int) -> int:
        run = dry_run(load_config(Path(path)), world_size=ranks, num_nodes=1)
        return run.pipeline_ranks[0].memory.activations_bytes

    assert activations(settings(2, 2), 4) == activations(settings(), 1) // 4
    assert main([settings(2, 2), "--dry-run", "--world", "8", "--nodes", "4"]) == 0
    printed = capsys.readouterr().out
    assert "a group of mesh.tiles=4 spans 2 nodes" in printed
    assert "a tile's part of the whole, without halos; --trace counts these" in printed
    assert main([settings(2, 2), "--dry-run", "--world", "4", "--trace", "--json"]) == 0
    steps = json.loads(capsys.readouterr().out)["steps"]
    assert [step["rank"] for step in steps] == [0, 1, 2, 3]
    assert all({"send", "receive"} <= {each["kind"] for each in step["traffic"]} for step in steps)


def test_memory_follows_the_optimizer_the_schedule_and_recomputation(tmp_path: Path) -> None:
    def memory(*overrides: str) -> tuple[int, int, int]:
        chosen = load(tmp_path, "mesh.pp=2", "mesh.microbatches=4", *overrides)
        first = dry_run(chosen, world_size=2, num_nodes=1).pipeline_ranks[0].memory
        return first.parameters_bytes, first.optimizer_bytes, first.activations_bytes

    own, momentum, kept = memory()
    assert momentum == own
    assert memory("optimizer.kind=adamw")[1] == 2 * own
    assert memory("mesh.schedule=gpipe")[2] == 2 * kept, "4 microbatches wait in place of 2"
    assert memory("mesh.dtype=float64")[0] == 2 * own
    full = memory("mesh.checkpointing=full")[2]
    assert full < kept / 4
    assert full < memory("mesh.checkpointing=full", "mesh.checkpointing_blocks=1")[2] < kept
    swaps = [memory(f"mesh.swap_blocks={count}")[2] for count in (1, 2, 9)]
    assert kept > swaps[0] > swaps[1] == swaps[2], "one block's stay, of two microbatches"
    assert memory("mesh.swap_blocks=1", "mesh.checkpointing=full")[2] < swaps[0]


def test_copies_of_one_replica_s_pieces_are_counted(tmp_path: Path) -> None:
    for shards, live, copies in ((2, True, 6), (2, False, 0), (1, True, 0)):
        given = f"mesh.dp_shard={shards}", f"run.live={str(live).lower()}", "optimizer.ema=0.9"
        chosen = load(tmp_path, "optimizer.kind=adamw", *given)
        memory = dry_run(chosen, world_size=2, num_nodes=2).pipeline_ranks[0].memory
        assert memory.copies_bytes == copies * memory.parameters_bytes


COUNTED = ("parameters_bytes", "gradients_bytes", "optimizer_bytes")


def test_a_rank_of_tiles_has_the_weights_and_keeps_its_tile_of_activations(tmp_path: Path) -> None:
    path, model = write_config(tmp_path), ("data.image_size=8", "model.kind=vit", "model.depth=4")
    plans = [
        dry_run(load_config(path, [*model, *mesh]), world_size=world_size, num_nodes=1)
        for world_size, *mesh in ((1,), (2, "mesh.tiles=[2]"), (4, "mesh.tiles=[2]", "mesh.pp=2"))
    ]
    one, two, _ = (plan.pipeline_ranks[0] for plan in plans)
    assert two.memory.activations_bytes == one.memory.activations_bytes // 2
    assert all(plan.parameters == plans[0].parameters for plan in plans)


@pytest.mark.multirank
def test_what_is_counted_is_what_the_fullest_rank_holds_after_a_step(
    run_ranks: RunRanks, tmp_path: Path
) -> None:
    cases = [
        ("mesh.dp_shard=2", "mesh.tp=2", "optimizer.kind=adamw"),
        ("mesh.pp=2", "mesh.tp=2", "mesh.dtype=bfloat16"),
        ("mesh.dp_shard=2", "mesh.dp_replicate=2", "mesh.dtype=float64"),
        ("mesh.pp=2", "mesh.dp_shard=2", "mesh.schedule=zbv", "optimizer.kind=adamw"),
    ]
    planned = [dry_run(load(tmp_path, *case), world_size=4, num_nodes=1) for case in cases]
    joined = ["|".join(case) for case in cases]
    reports: Any = run_ranks("held_bytes", 4, str(tmp_path / "run.toml"), *joined).reports
    for number, (case, plan) in enumerate(zip(cases, planned, strict=True)):
        on_one = 4 // len(plan.pipeline_ranks)
        for held in plan.pipeline_ranks:
            expected = {name: getattr(held.memory, name) for name in COUNTED}
            expected["rank_parameters"] = held.rank_parameters
            ranks = [reports[held.pp_rank * on_one + other][number] for other in range(on_one)]
            fullest = {name: max(rank[name] for rank in ranks) for name in expected}
            assert fullest == expected, case


OWN = """
[data]
kind = "text"
train = "absent.txt"
sequence_length = 8
batch_size = 8
[shuffle]
exchange = 0.1
[model]
kind = "tests.trainer.foreign_models:text_gpt2"
"""
IMAGES = """
[data]
train = "absent"
batch_size = 8
[shuffle]
exchange = 0.1
[model]
kind = "tests.trainer.foreign_models:PlainImages"
layers = "middle"
[model.args]
num_classes = 10
"""


@pytest.mark.multirank
@pytest.mark.nightly
def test_of_a_model_of_one_s_own_what_the_fullest_rank_holds_is_counted_too(
    run_ranks: RunRanks, tmp_path: Path
) -> None:
    hub.import_or_skip()
    path, case = tmp_path / "run.toml", ("mesh.pp=2", "mesh.dp_shard=2", "optimizer.kind=adamw")
    path.write_text(OWN)
    plan = dry_run(load_config(path, case), world_size=4, num_nodes=1)
    reports: Any = run_ranks("held_bytes", 4, str(path), "|".join(case)).reports
    for held in plan.pipeline_ranks:
        ranks = [reports[2 * held.pp_rank + other][0] for other in range(2)]
        for name in COUNTED:
            assert max(rank[name] for rank in ranks) == getattr(held.memory, name), name
        assert max(rank["rank_parameters"] for rank in ranks) == held.rank_parameters
        assert held.memory.activations_bytes > 0


def test_blocks_that_differ_in_their_number_alone_are_counted_together(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    hub.import_or_skip()
    (tmp_path / "run.toml").write_text(OWN)
    counted: list[tuple[int, ...]] = []

    def count(config: Config, layout: Any, model: Any, mesh: Any, stages: tuple[int, ...]) -> Any:
        counted.append(stages)
        return count_parts(config, layout, model, mesh, stages)

    count_parts = dry_run_module._count_parts
    monkeypatch.setattr(dry_run_module, "_count_parts", count)
    config = load_config(tmp_path / "run.toml", ("mesh.pp=4", "model.args.depth=8"))
    found = dry_run(config, world_size=4, num_nodes=1)
    assert counted == [(0,), (1,), (3,)]
    assert sum(rank.parameters for rank in found.pipeline_ranks) > found.parameters, "tied"


def test_a_model_of_one_s_own_that_does_not_fit_is_refused_as_the_run_would(tmp_path: Path) -> None:
    path = tmp_path / "run.toml"
    path.write_text(IMAGES)
    sized = "data.image_size=32"
    whole = dry_run(load_config(path, (sized,)), world_size=1, num_nodes=1)
    assert whole.parameters == sum(its.numel() for its in PlainImages(10).parameters())
    cut = dry_run(load_config(path, (sized, "mesh.pp=2")), world_size=2, num_nodes=1)
    assert sum(rank.parameters for rank in cut.pipeline_ranks) == whole.parameters
    for override, message in (
        ("mesh.tp=2", "nothing says how PlainImages is split"),
        ("mesh.pp=4", "3 blocks, fewer than 4 stages"),
    ):
        with pytest.raises(ConfigError, match=message):
            dry_run(load_config(path, (sized, override)), world_size=4, num_nodes=1)
    with pytest.raises(ConfigError, match=r"shapes of the inputs .*give data\.image_size"):
        dry_run(load_config(path), world_size=1, num_nodes=1)


def test_every_rank_of_a_replica_is_fed_in_one_way(tmp_path: Path) -> None:
    found = dry_run(load(tmp_path, "mesh.pp=3", "mesh.tp=2", "data.batch_size=6"),
                    world_size=12, num_nodes=3)  # fmt: skip
    # Two replicas of 3 x 2 ranks; a node has 4 ranks: all of one coordinate of pp.
    (both,) = found.deliveries
    assert both.replicas == (0, 1)
    assert (both.reader, both.maps, both.receives) == (0, (1,), (8, 9))
    assert (both.nothing, both.scorer, both.target_reader) == ((4, 5), 8, None)


def test_replicas_that_nodes_cut_otherwise_are_fed_in_another_way(tmp_path: Path) -> None:
    # Six replicas of 4 ranks; a node has 6 ranks: the second and the fifth lie on two nodes.
    found = dry_run(load(tmp_path, "mesh.tp=4"), world_size=24, num_nodes=4)
    shown = [(each.replicas, each.reader, each.maps, each.receives) for each in found.deliveries]
    whole, half = shown
    assert whole == ((0, 2, 3, 5), 0, (1, 2, 3), ())
    assert half == ((1, 4), 4, (5,), (6, 7))


def test_a_last_stage_that_reads_its_targets_is_sent_nothing(tmp_path: Path) -> None:
    read = load(tmp_path, "mesh.pp=3", "mesh.tp=2", "data.batch_size=6", "mesh.targets=read")
    (both,) = dry_run(read, world_size=12, num_nodes=3).deliveries
    assert (both.replicas, both.reader, both.target_reader, both.scorer) == ((0, 1), 0, 8, 8)
    assert (both.maps, both.receives, both.nothing) == ((1, 9), (), (4, 5))
    assert dry_run(read, world_size=12, num_nodes=1).deliveries[0].target_reader is None
    with pytest.raises(ConfigError, match=r"nodes \(0, 0, 0, 1\) .* on \(2, 3, 3, 3\)"):
        dry_run(read, world_size=24, num_nodes=4)


@pytest.mark.parametrize(
    ("override", "message"),
    [
        ("mesh.tp=3", r"mesh.tp is 3, which does not divide GPT's 4 heads"),
        ("mesh.dp_shard=5", r"mesh: .* is 5 ranks, but the job has 6.*--dry-run --world 5"),
        ("mesh.cp=3", r"mesh.cp is 3, which does not divide sequences of 16"),
        ("mesh.pp=6", r"mesh.pp: GPT has 4 blocks, fewer than 6 stages"),
        ("mesh.microbatches=3", r"mesh.microbatches is 3, which does not divide data.batch_size"),
    ],
)
def test_what_cannot_be_divided_is_refused(tmp_path: Path, override: str, message: str) -> None:
    batch = ("data.batch_size=12",) if override == "mesh.pp=6" else ()
    with pytest.raises(ConfigError, match=message):
        dry_run(load(tmp_path, override, *batch), world_size=6, num_nodes=1)


@pytest.mark.parametrize(
    "mesh",
    [
        pytest.param(("mesh.dp_shard=8",), marks=pytest.mark.nightly),
        pytest.param(("mesh.dp_shard={world}",), marks=pytest.mark.nightly),
        ("mesh.pp=8", "mesh.tp=8", "mesh.dp_shard=16", "mesh.targets=read"),
    ],
    ids=["replicas", "shards", "every axis"],
)
def test_a_dry_run_of_65536_ranks_does_as_much_as_one_of_2048_and_takes_under_300_MB_more(
    tmp_path: Path, mesh: tuple[str, ...]
) -> None:
    (tmp_path / "run.toml").write_text(
        GPT.replace("depth = 4", "depth = 32").replace("heads = 4", "heads = 8")
    )
    # Not ru_maxrss: it begins with what the process that started this one held. More than torch
    # takes when it is imported: a build for GPUs takes over twice as much.
    code = (
        "import cProfile, pstats, re, sys, torch\n"
        "from tonari.train.command import main\n"
        "def peak():\n"
        "    return int(re.search(r'VmHWM:\\s+(\\d+)', open('/proc/self/status').read())[1])\n"
        "profile, loaded = cProfile.Profile(), peak()\n"
        "profile.runcall(main, sys.argv[1:])\n"
        "print(pstats.Stats(profile).total_calls, peak() - loaded, file=sys.stderr)"
    )
    calls = {}
    for world in (2048, 65536):
        settings = [each.format(world=world) for each in mesh]
        ended = subprocess.run(
            [
                sys.executable, "-c", code, str(tmp_path / "run.toml"), "--dry-run",
                "--world", str(world), "--nodes", str(world // 8), *settings,
            ],
            capture_output=True, text=True, check=True, timeout=300,
        )  # fmt: skip
        assert f"on {world // 8} nodes" in ended.stdout
        calls[world], kilobytes = map(int, ended.stderr.split()[-2:])
        assert kilobytes < 300e6 / 1024
    assert calls[65536] < 1.5 * calls[2048]


def test_pipeline_ranks_that_are_counted_together_are_alike(tmp_path: Path) -> None:
    held = dry_run(load(tmp_path, "mesh.pp=4"), world_size=4, num_nodes=1).pipeline_ranks
    first, second, third, last = held
    assert (second.parameters, second.rank_parameters) == (third.parameters, third.rank_parameters)
    assert first.parameters != second.parameters != last.parameters
    under_way = [rank.memory.activations_bytes for rank in (second, third)]
    assert under_way[0] / 3 == under_way[1] / 2, "1f1b keeps 3 and 2 microbatches"


def test_nodes_that_differ_are_refused(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"--nodes is 2, which does not divide --world 3"):
        dry_run(load(tmp_path), world_size=3, num_nodes=2)


def test_the_command_shows_tables_or_one_document(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    load(tmp_path)
    end = ["--dry-run", "--world", "4", "--nodes", "2", "mesh.pp=2", "mesh.tp=2"]
    assert main([str(tmp_path / "run.toml"), *end]) == 0
    shown = capsys.readouterr().out
    assert "mesh: pp 2 x dp_replicate 1 x dp_shard 1 x cp 1 x tp 2, on 2 nodes" in shown
    assert "Who holds what" in shown
    assert main([str(tmp_path / "run.toml"), *end, "--json"]) == 0
    told = json.loads(capsys.readouterr().out)
    assert told["axes"]["tp"] == 2
    assert told["deliveries"][0]["receives"] == [2, 3]
    assert not (tmp_path / "runs").exists()
    assert main([str(tmp_path / "run.toml"), *end, "mesh.targets=read"]) == 0
    assert "rank 0, targets: rank 2" in capsys.readouterr().out
