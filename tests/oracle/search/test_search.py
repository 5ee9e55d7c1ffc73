"""A search finds what pricing every configuration finds, and only what the trainer would start."""

from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import msgspec
import pytest

from dataio.source.text.tokenizer import ByteTokenizer
from tests.oracle.search.planning import load
from tonari.oracle.cluster.cluster import Cluster, Device, Host, Level
from tonari.oracle.errors import OracleError
from tonari.oracle.search.choices import Choices, Group, Variant, overrides
from tonari.oracle.search.memory import MemoryOf
from tonari.oracle.search.price import Pricing
from tonari.oracle.search.search import Plans, _Fastest, _GroupSearch, _prepare, search
from tonari.oracle.search.words import why_slower
from tonari.pack.documents import Documents
from tonari.pack.text import pack_text
from tonari.plan.search import search_notes, search_words
from tonari.trainer.config.config import Config
from tonari.trainer.errors import ConfigError
from tonari.trainer.mesh.recompute import Checkpointing
from tonari.trainer.run.build import lay_out
from tonari.trainer.run.dry_run import dry_run
from tonari.trainer.run.own import Own

DEVICE = Device(tflops=1e-3, memory_gbyte_s=1, memory_gib=1, launch_us=1)
CLUSTER = Cluster(
    name="small",
    level=(
        Level(name="node", units=2, gbyte_s=0.5, latency_us=2),
        Level(name="net", units=8, gbyte_s=0.05, latency_us=20),
    ),
    device=DEVICE,
)


def with_memory(gib: float) -> Cluster:
    return msgspec.structs.replace(CLUSTER, device=msgspec.structs.replace(DEVICE, memory_gib=gib))


def choices_of(config: Config, world_size: int, rows: int) -> Choices:
    return _prepare(config, CLUSTER, DEVICE, Own(), world_size, rows)[1]


def every_variant(choices: Choices) -> Iterator[tuple[Group, Variant]]:
    """List all configurations, with each way of recomputation."""
    for group in choices.groups():
        for variant in choices.variants_of(group):
            yield group, variant
            for way in choices.lighter(group.sizes[0], variant):
                yield from ((group, each) for each in way)


THOROUGH = [pytest.mark.thorough]


@pytest.mark.parametrize(
    ("world_size", "gib"),
    [
        (1, 1), (4, 0.0007),
        *(pytest.param(*case, marks=THOROUGH) for case in ((2, 1), (4, 1), (8, 1), (8, 0.0003))),
    ],
)  # fmt: skip
def test_a_search_that_prunes_finds_what_one_finds_that_does_not(tmp_path, world_size, gib):
    config = load(tmp_path)
    found, whole = (
        search(
            config, with_memory(gib), world_size=world_size, global_batch_size=16, top=top,
            prunes=prunes,
        )
        for top, prunes in ((10, True), (10, False))
    )  # fmt: skip
    assert found.candidates == whole.candidates
    assert found.legal == whole.legal == whole.priced + whole.unfit
    assert found.legal == found.priced + found.unfit + found.pruned
    if world_size > 1:
        assert found.pruned > 0
    if gib < 1:
        assert whole.unfit > 0


@pytest.mark.thorough
def test_what_is_legal_is_what_the_trainer_lays_out(tmp_path: Path):
    world_size, rows = 4, 16
    choices = choices_of(load(tmp_path), world_size, rows)
    legal = {overrides(group, variant) for group, variant in every_variant(choices)}
    assert len(legal) > 100
    for settings in sorted(legal)[::7]:
        lay_out(load(tmp_path, *settings), world_size)
    # And what is not among them of all that could be said, it refuses
    refused = 0
    for pp in (1, 2, 4):
        for tp in (1, 2, 4):
            for microbatches in (1, 2, 3, 4, 8, 16):
                for schedule in ("gpipe", "1f1b", "zbv", "dualpipev"):
                    for checkpointing, blocks in (("none", 0), ("selective", 0), ("full", 1)):
                        if pp * tp > world_size or (pp == 1 and schedule != "1f1b"):
                            continue
                        dp = world_size // (pp * tp)
                        settings = (
                            f"mesh.pp={pp}", f"mesh.dp_replicate={dp}", "mesh.dp_shard=1",
                            "mesh.cp=1", f"mesh.tp={tp}", f"mesh.microbatches={microbatches}",
                            f"mesh.schedule={schedule}", f"mesh.checkpointing={checkpointing}",
                            f"mesh.checkpointing_blocks={blocks}", "mesh.swap_blocks=0",
                            "mesh.offload=false", "mesh.sequence_parallel=false",
                            f"data.batch_size={rows // dp}",
                        )  # fmt: skip
                        try:
                            lay_out(load(tmp_path, *settings), world_size)
                        except ConfigError:
                            refused += 1
                            assert settings not in legal
                        else:
                            # Of stages of one block, that one is all
                            every = (
                                word.replace("ing_blocks=1", "ing_blocks=0") for word in settings
                            )
                            assert settings in legal or tuple(every) in legal
    assert refused > 20


@pytest.mark.parametrize("dtype", [pytest.param("float32", marks=THOROUGH), "bfloat16"])
def test_memory_is_that_of_the_dry_run(tmp_path, dtype):
    config = load(tmp_path, f"mesh.dtype={dtype}")
    _, choices, memory_of = _prepare(config, CLUSTER, DEVICE, Own(), 4, 16)
    every = [
        (group, variant)
        for group, variant in every_variant(choices)
        if variant.checkpointing != "selective"  # the dry run leaves in what that saves
    ]
    assert len(every) > 300
    for group, variant in every[:: len(every) // 15]:
        settings = overrides(group, variant)
        ranks = dry_run(
            load(tmp_path, f"mesh.dtype={dtype}", *settings), world_size=4, num_nodes=1
        ).pipeline_ranks
        expected = max(rank.memory.total_bytes for rank in ranks)
        assert memory_of(group, variant) == pytest.approx(expected, rel=0.02), settings


def test_selective_recomputation_keeps_more_than_full_and_less_than_none(tmp_path):
    _, choices, memory_of = _prepare(load(tmp_path), CLUSTER, DEVICE, Own(), 1, 16)
    group = next(choices.groups())
    none, selective, full = (
        memory_of(group, Variant("1f1b", 1, kind, False)) for kind in ("none", "selective", "full")
    )
    assert full < selective < none
    parts: list[tuple[Checkpointing, int]] = [("selective", selective), ("full", full)]
    for kind, least in parts:
        some = [
            memory_of(group, Variant("1f1b", 1, kind, False, blocks)) for blocks in (1, 2, 3, 4)
        ]
        assert none > some[0] > some[1] > some[2] > some[3] == least


def test_of_all_ways_that_fit_the_fastest_is_found(tmp_path):
    config = load(tmp_path)
    _, choices, whole_memory_of = _prepare(config, CLUSTER, DEVICE, Own(), 1, 16)
    (group,) = [each for each in choices.groups() if each.microbatches == 1]
    every = [variant for each, variant in every_variant(choices) if each == group]
    every += [variant._replace(offload=True) for variant in every]
    parts, found_ways = whole_memory_of.parts, set()
    for rate in (0.1, 0.01):
        host = Host(memory_gbyte_s=1, device_gbyte_s=rate)
        pricing = Pricing(
            config, msgspec.structs.replace(CLUSTER, host=host), DEVICE, parts, world_size=1
        )
        memory_of = MemoryOf(config, parts, choices, pricing)
        # Between any two ways, so that each is once the last that fits
        for limit in sorted({memory_of(group, variant) for variant in every}):
            found = _Fastest(10, capacity_bytes=limit)
            _GroupSearch(group, None, choices, pricing, memory_of, found, prunes=True).add(
                choices.variants_of(group)
            )
            (chosen,) = found.best()
            assert chosen.memory_bytes <= limit
            fitting = [each for each in every if memory_of(group, each) <= limit]
            fastest_s = min(pricing.step_s(group, each) for each in fitting)
            assert chosen.step_s == pytest.approx(fastest_s, rel=1e-8)
            found_ways.add(chosen.variant[2:6])
    ways = {(kind, offload) for kind, _, _, offload in found_ways}
    assert ways == {(kind, on) for kind in ("none", "selective", "full") for on in (False, True)}
    assert {blocks for kind, _, blocks, _ in found_ways if kind == "full"} >= {0, 2, 3}


def test_what_is_offloaded_needs_room_in_the_host_and_a_rate(tmp_path):
    config = load(tmp_path, "optimizer.kind=adamw")
    tight = with_memory(0.0003)
    described = Host(memory_gbyte_s=1, device_gbyte_s=0.1)
    roomy = msgspec.structs.replace(tight, host=described)
    found = search(config, roomy, world_size=1, global_batch_size=16)
    assert all("mesh.offload=true" in each.settings for each in found.candidates)
    assert "offloads" in "\n".join(search_words(found, config))
    small = msgspec.structs.replace(described, memory_gib=1e-6)
    for host in (Host(), small):
        full = msgspec.structs.replace(tight, host=host)
        with pytest.raises(OracleError, match=r"none fits into the 0\.000\d+ GiB"):
            search(config, full, world_size=1, global_batch_size=16)


def test_rows_of_a_step_are_the_config_s_unless_given(tmp_path):
    config = load(tmp_path, "mesh.tp=2")
    assert search(config, CLUSTER, world_size=4).global_batch_size == 16
    found = search(config, CLUSTER, world_size=4, global_batch_size=32)
    assert found.global_batch_size == 32
    for each in found.candidates:
        layout = lay_out(load(tmp_path, *each.settings), 4)
        batch = int(each.settings[-1].removeprefix("data.batch_size="))
        assert batch * layout.sizes[1] * layout.sizes[2] == 32
        assert each.samples_per_s == pytest.approx(32 / each.step_s)
        assert each.node_hours == pytest.approx(1e6 / each.samples_per_s * 2 / 3600)
        assert sum(each.parts_s.values()) == pytest.approx(each.step_s)


def test_candidates_come_in_order_with_a_reason(tmp_path):
    found = search(load(tmp_path), CLUSTER, world_size=8, global_batch_size=16)
    steps = [float(f"{each.step_s:.8g}") for each in found.candidates]
    assert len(steps) == 10
    assert steps == sorted(steps)
    assert not found.candidates[0].why_slower
    slower = [each for each in found.candidates if each.step_s > steps[0] * (1 + 1e-9)]
    assert slower
    assert all(" longer, above all for " in each.why_slower for each in slower)


def test_the_reason_is_the_part_that_grew_most():
    best = {"computation": 1.0, "bubble": 0.1, "tp": 0.2}
    other = {"computation": 1.1, "bubble": 0.6, "tp": 0.0}
    assert why_slower(other, best) == (
        "It takes 400 ms longer, above all for idle ranks of the pipeline: 600 ms in place of "
        "100 ms."
    )
    assert why_slower(best, best) == ""


def test_nothing_that_fits_is_an_error_that_names_the_least_and_the_cure(tmp_path):
    with pytest.raises(
        OracleError, match=r"none fits .*: the least is .* GiB, of mesh.pp=.*; give more ranks"
    ):
        search(load(tmp_path), with_memory(1e-6), world_size=2)


def test_a_machine_without_a_device_is_refused(tmp_path):
    unknown = msgspec.structs.replace(CLUSTER, device=None)
    with pytest.raises(OracleError, match=r'"small" has no table \[device\].*; give its tflops'):
        search(load(tmp_path), unknown, world_size=2)


def test_a_batch_that_nothing_divides_is_refused(tmp_path):
    config = load(tmp_path, "model.heads=1", "data.sequence_length=15", "model.depth=1")
    with pytest.raises(OracleError, match=r"no configuration on 4 ranks divides 1 rows"):
        search(config, CLUSTER, world_size=4, global_batch_size=1)


def test_images_are_searched_too(tmp_path):
    text = """
[data]
train = "absent.tar"
test = "absent.tar"
batch_size = 8
image_size = 32
[shuffle]
exchange = 0.1
[model]
kind = "vit"
num_classes = 10
width = 32
depth = 2
heads = 4
"""
    config = load(tmp_path, text=text)
    found = search(config, CLUSTER, world_size=2)
    assert all("mesh.cp=1" in each.settings for each in found.candidates)
    words = search_words(found, config)
    assert words[0].startswith("The fastest step takes ")
    assert f"{found.legal:,} configurations are legal" in words[1]


def test_the_words_give_every_candidate_what_the_job_lacks_of_its_settings(tmp_path):
    config = load(tmp_path, "mesh.checkpointing=full")
    found: Plans = search(config, CLUSTER, world_size=2)
    assert "the first, in parts of its step: " in "\n".join(search_words(found, config))
    for each, (shown, _) in zip(found.candidates, search_notes(found, config), strict=True):
        assert "mesh.cp=1" not in shown
        assert "mesh.checkpointing=full" not in shown
        whole = load(tmp_path, "mesh.checkpointing=full", *each.settings)
        given = [] if shown == "as in the file" else shown.split()
        short = load(tmp_path, "mesh.checkpointing=full", *given)
        derived: dict[str, Any] = {"dp_replicate": whole.mesh.dp_replicate}
        if whole.mesh.pp == 1:
            derived["microbatches"] = whole.mesh.microbatches
        assert replace(short.mesh, **derived) == whole.mesh
        assert short.data == whole.data


def test_packed_text_is_searched_without_ranks_that_share_a_sequence(tmp_path: Path) -> None:
    words = tmp_path / "words.txt"
    words.write_text("a word, and another\n" * 50)
    documents = Documents((words,), "text", "file")
    pack_text(documents, tmp_path / "packed", ByteTokenizer(), shard_bytes=1 << 20)
    given = (f"data.train={tmp_path / 'packed'}", "text.packing=best_fit")
    found = search(load(tmp_path, *given), CLUSTER, world_size=4)
    assert found.candidates
    assert all("mesh.cp=1" in each.settings for each in found.candidates)


def test_meshes_that_do_not_go_with_compressed_gradients_are_no_candidates(tmp_path: Path) -> None:
    compressed = "optimizer.compress_gradients=bfloat16"
    found = search(load(tmp_path, compressed), CLUSTER, world_size=4)
    assert len(found.candidates) > 2
    for each in found.candidates:
        lay_out(load(tmp_path, compressed, *each.settings), 4)
    host = Host(memory_gbyte_s=1, device_gbyte_s=0.1)
    tight = msgspec.structs.replace(with_memory(0.0003), host=host)
    with pytest.raises(OracleError, match="none fits"):
        search(load(tmp_path, compressed), tight, world_size=1, global_batch_size=16)
