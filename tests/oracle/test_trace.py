"""A step traced on no data is the step that ranks make: what they compute, send and keep."""

import json
from collections import defaultdict
from collections.abc import Iterable
from itertools import filterfalse
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn

from tests.multirank import RunRanks
from tests.trainer.tiles.tiled_run import SETTINGS
from tonari.oracle import Message, Operator, Trace, trace_step, traffic
from tonari.trainer.config.config import Config, load_config
from tonari.trainer.errors import ConfigError
from tonari.trainer.run.build import lay_out
from tonari.trainer.run.own import Own

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
[optimizer]
kind = "adamw"
clip = 1.0
[run]
device = "cpu"
"""
OWN = """
[data]
train = "absent.tar"
test = "absent.tar"
batch_size = 4
image_size = 32
[shuffle]
exchange = 0.1
[run]
device = "cpu"
"""
IMAGES = """
[data]
train = "absent.tar"
test = "absent.tar"
batch_size = 4
[shuffle]
exchange = 0.1
[model]
kind = "small_cnn"
num_classes = 10
[run]
device = "cpu"
"""
MESHES = {
    "alone": (1, ()),
    "dp": (2, ()),
    "fsdp": (2, ("mesh.dp_shard=2",)),
    "tp": (2, ("mesh.tp=2", "mesh.sequence_parallel=true")),
    "cp": (2, ("mesh.cp=2",)),
    "pp": (2, ("mesh.pp=2", "mesh.microbatches=4")),
    "zbv": (2, ("mesh.pp=2", "mesh.microbatches=4", "mesh.schedule=zbv")),
    "hsdp": (4, ("mesh.dp_shard=2",)),
    "pp, fsdp": (4, ("mesh.pp=2", "mesh.microbatches=2", "mesh.dp_shard=2")),
    "pp, tp": (4, ("mesh.pp=2", "mesh.microbatches=2", "mesh.tp=2")),
    "fsdp, tp": (4, ("mesh.dp_shard=2", "mesh.tp=2", "model.depth=2")),
}
HARDEST = ("cp", "zbv", "pp, fsdp", "fsdp, tp")


def load(directory: Path, *overrides: str, text: str = GPT) -> Config:
    path = directory / "run.toml"
    path.write_text(text)
    return load_config(path, overrides)


def trace_all(config: Config, world_size: int) -> list[Trace]:
    return [trace_step(config, world_size=world_size, rank=rank) for rank in range(world_size)]


def flops(trace: Trace) -> int:
    return sum(event.flops for event in trace.events if isinstance(event, Operator))


def messages(trace: Trace) -> list[Message]:
    return [event for event in trace.events if isinstance(event, Message)]


def thorough_but_one(meshes: Iterable[str]) -> list[Any]:
    """Let `make test` try the mesh that has most in it, CI each axis, and `make test-all` all."""
    marks = {mesh: [pytest.mark.nightly] for mesh in MESHES if mesh not in HARDEST}
    marks |= {"pp, fsdp": [pytest.mark.smoke]}
    return [
        pytest.param(mesh, marks=[pytest.mark.thorough, *marks.get(mesh, [])]) for mesh in meshes
    ]


@pytest.mark.parametrize("mesh", thorough_but_one(MESHES))
def test_what_one_rank_sends_the_others_take_in_in_the_same_order(tmp_path, mesh):
    world_size, overrides = MESHES[mesh]
    traces = trace_all(load(tmp_path, *overrides), world_size)
    # By group, what each of its ranks says of its messages
    together: defaultdict[tuple[int, ...], dict[int, list[object]]] = defaultdict(dict)
    sent, taken = defaultdict(list), defaultdict(list)
    for trace in traces:
        for message in messages(trace):
            assert trace.rank in message.ranks
            if message.kind == "send":
                sent[trace.rank, message.peer].append(message.num_bytes)
            elif message.kind == "receive":
                taken[message.peer, trace.rank].append(message.num_bytes)
            else:
                own = together[message.ranks].setdefault(trace.rank, [])
                own.append((message.kind, message.num_bytes))
    assert sent == taken
    assert bool(sent) == ("pp" in mesh or mesh == "zbv")
    for ranks, each in together.items():
        assert sorted(each) == list(ranks)
        assert len({tuple(own) for own in each.values()}) == 1
    assert bool(together or sent) == (world_size > 1)


def test_peers_of_tp_send_a_part_each_of_what_all_of_them_hold(tmp_path):
    pp = ("mesh.pp=2", "mesh.microbatches=2")

    def sent(world_size: int, *overrides: str) -> list[int]:
        trace = trace_step(load(tmp_path, *pp, *overrides), world_size=world_size, rank=0)
        return [each.num_bytes for each in messages(trace) if each.kind in ("send", "receive")]

    whole = sent(2)
    # Two microbatches of 4 rows, forward and back, in float32
    assert whole == [4 * 16 * 32 * 4] * 4
    assert sent(4, "mesh.tp=2") == [num // 2 for num in whole]
    assert sent(4, "mesh.tp=2", "mesh.sequence_parallel=true") == [num // 2 for num in whole]


@pytest.mark.thorough
def test_ranks_of_a_pipeline_compute_together_what_one_process_does(tmp_path):
    (alone,) = trace_all(load(tmp_path, "mesh.microbatches=4"), 1)
    cut = trace_all(load(tmp_path, "mesh.pp=2", "mesh.microbatches=4"), 2)
    assert flops(alone) > 0
    assert sum(map(flops, cut)) == flops(alone)
    # Each replica computes as much on its own rows
    assert {flops(one) for one in trace_all(load(tmp_path, "mesh.dp_shard=2"), 2)} == {flops(alone)}


def test_recomputation_computes_more_and_keeps_less_at_a_time(tmp_path):
    wide = ("data.sequence_length=64", "data.batch_size=16")
    (plain,) = trace_all(load(tmp_path, *wide), 1)
    (again,) = trace_all(load(tmp_path, *wide, "mesh.checkpointing=full"), 1)
    # Products of the blocks once more: all but those of the head
    assert 1.1 < flops(again) / flops(plain) < 4 / 3
    assert again.peak_bytes < 0.8 * plain.peak_bytes
    assert again.kept_bytes == plain.kept_bytes
    one = ("mesh.checkpointing=full", "mesh.checkpointing_blocks=1")
    (some,) = trace_all(load(tmp_path, *wide, *one), 1)
    assert flops(plain) < flops(some) < flops(again)
    assert again.peak_bytes < some.peak_bytes < plain.peak_bytes


def test_blocks_that_swap_keep_what_they_have_where_there_is_no_host(tmp_path):
    swaps = ("mesh.swap_blocks=9", "run.device=auto")
    plain, found = (trace_all(load(tmp_path, *given), 1)[0] for given in ((), swaps))
    assert (found.peak_bytes, found.kept_bytes) == (plain.peak_bytes, plain.kept_bytes)
    # Of these, none compute again
    (both,) = trace_all(load(tmp_path, *swaps, "mesh.checkpointing=full"), 1)
    assert flops(both) == flops(found) == flops(plain)


@pytest.mark.thorough
def test_a_sharded_rank_keeps_its_share(tmp_path):
    (alone,) = trace_all(load(tmp_path, "model.width=128"), 1)
    for trace in trace_all(load(tmp_path, "model.width=128", "mesh.dp_shard=4"), 4):
        assert 0.25 <= trace.kept_bytes / alone.kept_bytes < 0.26


def test_a_process_is_any_rank_of_any_world_one_after_the_other(tmp_path):
    config = load(tmp_path, "mesh.pp=2", "mesh.microbatches=2", "mesh.dp_shard=2")
    first = trace_step(config, world_size=4, rank=3)
    trace_step(load(tmp_path, "mesh.tp=4"), world_size=256, rank=77)
    assert trace_step(config, world_size=4, rank=3) == first
    assert not dist.is_initialized()


def test_images_and_a_model_of_one_s_own_are_traced(tmp_path):
    trace = trace_step(load(tmp_path, "data.image_size=32", text=IMAGES), world_size=1, rank=0)
    assert any("convolution" in e.name for e in trace.events if isinstance(e, Operator))

    def mine() -> nn.Module:
        return nn.Sequential(nn.Flatten(), nn.Linear(3 * 32 * 32, 10))

    config = load(tmp_path, text=OWN)
    trace = trace_step(config, world_size=2, rank=1, own=Own(model=mine))
    # Forward, and back to the weights: the images need no gradient
    assert flops(trace) == 2 * 2 * 4 * 3 * 32 * 32 * 10


class ByValue(nn.Module):
    """Decides by what it sees."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(3 * 32 * 32, 10)

    def forward(self, images: torch.Tensor) -> torch.Tensor:
        rows = images.flatten(1)
        logits: torch.Tensor = self.layer(rows[rows.float().mean(1).tolist().index(0.0) :])
        return logits


@pytest.mark.parametrize(
    ("overrides", "rank", "message"),
    [
        (("data.image_size=32",), 1, "rank is 1, expected 0 to 0"),
        ((), 0, "its images are of any size.*; give data.image_size"),
        (("data.image_size=32", "mesh.pp=2"), 0, "mesh: pp 2 .* is 2 ranks, but the job has 1"),
    ],
)
def test_what_cannot_be_traced_is_refused_with_the_cure(tmp_path, overrides, rank, message):
    with pytest.raises(ConfigError, match=message):
        trace_step(load(tmp_path, *overrides, text=IMAGES), world_size=1, rank=rank)
    assert not dist.is_initialized()


def test_a_model_that_decides_by_values_is_refused(tmp_path):
    config = load(tmp_path, text=OWN)
    with pytest.raises(ConfigError, match=r"without data: .*; let its forward .* not decide by"):
        trace_step(config, world_size=1, rank=0, own=Own(model=ByValue))
    assert not dist.is_initialized()


@pytest.mark.multirank
@pytest.mark.parametrize(
    ("world_size", "meshes"),
    [
        pytest.param(2, ["dp", "fsdp", "tp", "cp", "zbv"], marks=pytest.mark.nightly),
        (4, ["pp, fsdp", "fsdp, tp"]),
    ],
)
def test_ranks_of_a_job_make_the_traced_step_operator_by_operator(
    tmp_path: Path, run_ranks: RunRanks, world_size: int, meshes: list[str]
) -> None:
    cases = [MESHES[mesh][1] for mesh in meshes]
    load(tmp_path)
    ended = run_ranks(
        "trainer/record_step", world_size, str(tmp_path / "run.toml"), json.dumps(cases),
        timeout_s=240,
    )  # fmt: skip
    for number, mesh in enumerate(meshes):
        config = load(tmp_path, *cases[number])
        for rank, report in enumerate(ended.reports):
            traced = trace_step(config, world_size=world_size, rank=rank)
            found = report["events"][number]
            # Gloo scatters by copies of its own; without data torch asks for each number that is
            # read at the host by an operator.
            expected, real = (
                [each for each in events if not each.startswith((*GLOO_COPIES, *HOST_READS))]
                for events in ([repr(event) for event in traced.events], found)
            )
            # Without data torch waits at once for what it would else wait for at its first use
            assert {*filter(is_wait, expected)} == {*filter(is_wait, real)}
            real, expected = ([*filterfalse(is_wait, events)] for events in (real, expected))
            if mesh == "zbv":
                # Where a schedule splits the backward pass, torch keeps weights in sets: the order
                # in which it adds up their gradients is another in every process
                real.sort()
                expected.sort()
            assert real == expected, f"{mesh}, rank {rank}"
            assert len(real) > 500


def is_wait(event: str) -> bool:
    return event.startswith("Wait(")


HOST_READS = ("Operator(name='aten.unbind.int'", "Operator(name='aten._local_scalar_dense.")
GLOO_COPIES = ("Operator(name='aten.split.Tensor'", "Operator(name='aten.copy_.default'")


TILES = ("unet", ["recipe.args.parts=[2,2]", "mesh.tiles=[2,2]"]), ("staged", [
    "recipe.args.parts=[1,2]", "mesh.tiles=[1,2]", "mesh.pp=2", "mesh.microbatches=4"
])  # fmt: skip


@pytest.mark.multirank
@pytest.mark.parametrize(
    ("model", "overrides"), [TILES[0], pytest.param(*TILES[1], marks=pytest.mark.nightly)]
)
def test_tiles_send_the_traced_bytes(
    tmp_path: Path, run_ranks: RunRanks, model: str, overrides: list[str]
) -> None:
    """Counted where tiles exchange them, on the ranks of a real job."""
    names = {"data": "absent.npz", "cache": tmp_path, "directory": tmp_path}
    text = SETTINGS.format(**names, batch_size=8, model=model, tiles=[])
    config = load(tmp_path, *overrides, text=text)
    case = json.dumps([overrides])
    ended = run_ranks("trainer/record_step", 4, str(tmp_path / "run.toml"), case, timeout_s=240)
    for rank, (trace, report) in enumerate(zip(trace_all(config, 4), ended.reports, strict=True)):
        expected = [repr(each) for each in messages(trace)]
        real = [each for each in report["events"][0] if each.startswith("Message(")]
        assert real == expected, rank
        sent = [each for each in traffic(trace, lay_out(config, 4).sizes) if each.kind == "send"]
        between = sum(each.num_bytes for each in sent if each.axes == ("cp",))
        assert between == report["sent_bytes"][0] > 0
