"""Packed documents on several meshes: rows and losses of one process, and on from any other."""

from pathlib import Path
from typing import Any

import pytest

from dataio.base.lines import read_checked_lines
from tests.multirank import RunRanks
from tests.trainer.packed_text import write_config
from tests.trainer.watch.watched import merged, train_watched

pytestmark = [pytest.mark.multirank, pytest.mark.timeout(900)]

ON_TWO = {
    "dp2": ("mesh.dp_shard=2", "data.batch_size=8"),
    "replicas": ("mesh.dp_replicate=2", "data.batch_size=8"),
    "tp2": ("mesh.tp=2",),
    "sp2": ("mesh.tp=2", "mesh.sequence_parallel=true", "mesh.loss_parallel=true"),
    "pp2": ("mesh.pp=2", "mesh.microbatches=4"),
    "pp2 zbv": ("mesh.pp=2", "mesh.microbatches=4", "mesh.schedule=zbv", "model.depth=4"),
}
DEEP = ("model.depth=4", "mesh.microbatches=4")
ON_MORE: dict[int, dict[str, tuple[str, ...]]] = {
    2: {
        **{name: ("mesh.pp=2", f"mesh.schedule={name}", *DEEP)
           for name in ("gpipe", "interleaved", "zero_bubble", "dualpipev")},
        "recomputed": (
            "mesh.dp_shard=2", "data.batch_size=8", "mesh.checkpointing=full", "model.depth=4",
        ),
    },
    4: {
        "dp2 pp2": ("mesh.dp_shard=2", "mesh.pp=2", "data.batch_size=8", *DEEP),
        "pp2 tp2": ("mesh.tp=2", "mesh.pp=2", "mesh.sequence_parallel=true", *DEEP),
        "dp2 tp2": ("mesh.dp_replicate=2", "mesh.tp=2", "data.batch_size=8", "model.depth=4"),
    },
}  # fmt: skip
"""Ranks, then meshes of these."""
LLAMA = ("model.kind=llama", "model.kv_heads=2")


def losses(directory: Path) -> list[float]:
    """Read the losses of all steps, and of the evaluations."""
    lines = read_checked_lines(directory / "metrics.jsonl")
    return [line["loss" if line["kind"] == "step" else "evaluation_loss"] for line in lines]


def settings(config: Path, name: str, *more: str) -> tuple[str, ...]:
    directory = config.parent / name
    return f"run.directory={directory}", f"data.cache={directory}/cache", *more


def on_ranks(
    run_ranks: RunRanks, num_ranks: int, config: Path, *cases: tuple[str, ...]
) -> list[list[dict[str, Any]]]:
    joined = ["|".join([str(config), *case]) for case in cases]
    reports: Any = run_ranks("trainer/meshes", num_ranks, *joined, timeout_s=600).reports
    return [list(ranks) for ranks in zip(*reports, strict=True)]


@pytest.mark.parametrize("model", [pytest.param("gpt", marks=pytest.mark.nightly), "llama"])
def test_every_mesh_trains_packed_documents_as_one_process(
    run_ranks: RunRanks, tmp_path: Path, model: str
) -> None:
    config = write_config(tmp_path)
    # The sizes that tp divides are those of the vocabulary too.
    kind = LLAMA if model == "llama" else ()
    whole = {
        depth: train_watched(config, *settings(config, f"1 {depth}", f"model.depth={depth}", *kind))
        for depth in (2, 4)
    }
    cases = [settings(config, name, *kind, *given) for name, given in ON_TWO.items()]
    for name, reports in zip(ON_TWO, on_ranks(run_ranks, 2, config, *cases), strict=True):
        depth = 4 if "model.depth=4" in ON_TWO[name] else 2
        assert merged(reports) == whole[depth]["steps"], name
        expected = pytest.approx(losses(tmp_path / f"1 {depth}"), rel=1e-9)
        assert losses(tmp_path / name) == expected, name


def test_so_they_do_by_the_mean_over_all_tokens_of_several_batches(
    run_ranks: RunRanks, tmp_path: Path
) -> None:
    config = write_config(tmp_path, num_documents=70)
    by_tokens = ("text.mean=tokens", "optimizer.accumulate=2")
    train_watched(config, *settings(config, "1", *by_tokens))
    train_watched(config, *settings(config, "rows", "optimizer.accumulate=2"))
    names = ("dp2", "tp2", "pp2")
    cases = [settings(config, name, *by_tokens, *ON_TWO[name]) for name in names]
    on_ranks(run_ranks, 2, config, *cases)
    assert losses(tmp_path / "1") != pytest.approx(losses(tmp_path / "rows"), rel=1e-4)
    for name in names:
        assert losses(tmp_path / name) == pytest.approx(losses(tmp_path / "1"), rel=1e-6), name


@pytest.mark.nightly
@pytest.mark.parametrize("num_ranks", [2, pytest.param(4, marks=pytest.mark.slow)])
def test_more_meshes_and_every_schedule_do_too(
    run_ranks: RunRanks, tmp_path: Path, num_ranks: int
) -> None:
    config = write_config(tmp_path)
    whole = train_watched(config, *settings(config, "1", DEEP[0]))
    given = ON_MORE[num_ranks]
    cases = [settings(config, name, *its) for name, its in given.items()]
    for name, reports in zip(given, on_ranks(run_ranks, num_ranks, config, *cases), strict=True):
        assert merged(reports) == whole["steps"], name
        assert losses(tmp_path / name) == pytest.approx(losses(tmp_path / "1"), rel=1e-9), name


@pytest.mark.nightly
def test_a_run_goes_on_in_mid_epoch_on_other_ranks_exactly(
    run_ranks: RunRanks, tmp_path: Path
) -> None:
    config = write_config(tmp_path, num_documents=300)
    whole = train_watched(config, *settings(config, "1"))
    # Caches are those of a mesh; what goes on is the run.
    links = [
        ("data.batch_size=8", "mesh.dp_shard=2", "stop=5"),
        ("mesh.pp=2", "mesh.microbatches=4", "stop=6"),
    ]
    steps = []
    for number, link in enumerate(links):
        given = settings(config, "chain", *link, f"data.cache={tmp_path}/cache {number}")
        (reports,) = on_ranks(run_ranks, 2, config, given)
        assert not any(report["finished"] for report in reports)
        steps += merged(reports)
        # In the middle of an epoch.
        assert whole["steps"][len(steps)][0] == steps[-1][0]
    last = train_watched(config, *settings(config, "chain", f"data.cache={tmp_path}/cache 2"))
    assert last["finished"]
    assert [tuple(step) for step in (*steps, *last["steps"])] == [tuple(s) for s in whole["steps"]]
    assert losses(tmp_path / "chain") == pytest.approx(losses(tmp_path / "1"), rel=1e-9)
