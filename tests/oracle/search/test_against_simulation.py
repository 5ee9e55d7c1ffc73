"""The search plans an epoch by one rank that stands for all as a plan does by all ranks.

Both are given the same step, the same data and the same machine.
"""

from pathlib import Path

import pytest
from hypothesis import assume, example, given, settings
from hypothesis import strategies as st

from tests.oracle.search.planning import load
from tests.oracle.search.test_epoch import IMAGES
from tonari.oracle import plan as plan_module
from tonari.oracle.cluster.cluster import Cluster, Host, Level, StorageRates
from tonari.oracle.cluster.links import lay_route
from tonari.oracle.epoch import PlannedEpoch
from tonari.oracle.plan import plan_step
from tonari.oracle.probe.data import DataTimes
from tonari.oracle.probe.probe import Probe, step_settings
from tonari.oracle.record import Message, Wait
from tonari.oracle.search.choices import Group
from tonari.oracle.search.epoch import Epochs, GroupEpoch
from tonari.oracle.stopwatch import Timed
from tonari.trainer.config.config import Config

BATCH, CORES = 8, 1000
FORWARD_S = 0.02
GRADIENT_BYTES = 1_000_000


@pytest.fixture(scope="module", autouse=True)
def _without_memory():
    """Leave traces out, which only say what memory a step takes."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(plan_module, "_trace", lambda *_: ((), ""))
        yield


@pytest.fixture(scope="module")
def directory(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("settings")


def both(
    config: Config, cluster: Cluster, data: DataTimes, *, ranks: int, computing_s: float,
    hidden: float,
) -> tuple[PlannedEpoch, GroupEpoch, float]:  # fmt: skip
    """Plan a job by simulation, and price it; the last is what its gradients keep the link for."""
    world_size = cluster.world_size
    message = Message("all_reduce", tuple(range(world_size)), GRADIENT_BYTES)
    step = Timed(
        rank=0, events=(message, Wait(0)), laps_s=((computing_s, 0.0, 0.0),), step_s=(computing_s,)
    )
    evaluated = Timed(rank=0, events=(), laps_s=((FORWARD_S,),), step_s=(FORWARD_S,))
    found = Probe(
        torch="", cores=CORES, ranks=ranks, world_size=world_size, settings=step_settings(config),
        messages=(), steps=(step,), slowdowns=((1, 1.0), (CORES, 1.0)), evaluations=(evaluated,),
        data=data,
    )  # fmt: skip
    planned = plan_step(config, found, cluster=cluster, hidden_fraction=hidden).epoch
    assert planned is not None
    epochs = Epochs(
        config, cluster, data, world_size=world_size, hidden_fraction=hidden,
        core_s=data.core_s(batch_size=BATCH),
    )  # fmt: skip
    epoch = epochs.of(Group((1, world_size, 1, 1, 1), BATCH, 1))
    assert epoch is not None
    link_s = lay_route(cluster, "all_reduce", message.ranks).seconds(GRADIENT_BYTES)
    return planned, epoch, link_s


@settings(max_examples=25, deadline=None)
@given(
    nodes=st.integers(1, 3), ranks=st.integers(1, 2), rows=st.integers(2_000, 60_000),
    row_bytes=st.sampled_from([2e3, 3e4, 2e5]), exchange=st.sampled_from([0, 0.3, 1]),
    hidden=st.sampled_from([0.0, 0.4]), quota=st.sampled_from([None, 0.4, 0.9]),
    computing_s=st.floats(0.005, 0.2), batch_s=st.floats(0.001, 0.3),
    gbyte_s=st.sampled_from([0.002, 0.05, 10.0]), source_gbyte_s=st.sampled_from([0.001, 0.1]),
    disk=st.sampled_from([None, 0.001, 0.1]), accumulate=st.sampled_from([1, 2]),
)  # fmt: skip
# A refresh of 27 MB from a disk of 1 MB/s, of which a plan once gave two loaders 1.28 MB/s
@example(
    nodes=1, ranks=2, rows=11057, row_bytes=2e3, exchange=0, hidden=0.4, quota=0.9,
    computing_s=0.0625, batch_s=0.0625, gbyte_s=10.0, source_gbyte_s=0.1, disk=0.001,
    accumulate=1,
)  # fmt: skip
def test_an_epoch_is_priced_as_it_is_simulated(
    directory, nodes, ranks, rows, row_bytes, exchange, hidden, quota, computing_s, batch_s,
    gbyte_s, source_gbyte_s, disk, accumulate,
):  # fmt: skip
    assume(nodes * ranks > 1)
    overrides = [
        f"shuffle.exchange={exchange}", f"optimizer.accumulate={accumulate}",
        f"mesh.dp_replicate={nodes * ranks}", "data.workers={threads=1}",
    ]  # fmt: skip
    if quota:
        num_bytes = int(quota * rows / nodes * row_bytes)
        overrides.append(f"data.cache={{path='auto', quota={num_bytes}}}")
    if hidden:
        overrides.append("importance.kind=kakurenbo")
    config = load(directory, *overrides, text=IMAGES)
    cluster = Cluster(
        name="both",
        level=(
            Level(name="node", units=ranks),
            Level(name="net", units=nodes, gbyte_s=gbyte_s),
        ),
        host=Host(cores=CORES),
        storage=StorageRates(
            disk_read_gbyte_s=disk,
            node_read_gbyte_s=source_gbyte_s,
            read_gbyte_s=1.5 * source_gbyte_s,
        ),
    )
    data = DataTimes(
        readers=ranks, num_rows=rows, evaluated_rows=0, row_bytes=row_bytes,
        source_row_bytes=row_bytes, batch_s=batch_s, batch_cores=1.0, staging_bytes_per_s=1e9,
        epoch_end_s=0.5, write_bytes_per_s=0.0,
    )  # fmt: skip
    planned, epoch, link_s = both(
        config, cluster, data, ranks=ranks, computing_s=computing_s, hidden=hidden
    )
    step_s = computing_s + link_s
    folded, waits_s = epoch.plan(step_s, link_s, FORWARD_S)
    assert folded.steps == planned.steps
    assert folded.staging_s == pytest.approx(planned.staging_s)
    assert folded.windows_s == pytest.approx(planned.windows_s, rel=1e-4)
    assert folded.refresh_s == pytest.approx(planned.refresh_s, rel=1e-4)
    assert folded.epoch_s == pytest.approx(planned.epoch_s, rel=1e-4)
    assert folded.steps * step_s + sum(waits_s.values()) == pytest.approx(folded.epoch_s)
    assert epoch.floor_s(step_s, FORWARD_S) <= folded.epoch_s


def test_staging_beside_training_costs_as_much_in_a_price_as_in_a_plan(directory):
    for computing_s in (0.001, 1.0):
        config = load(directory, "data.staging.when=overlap", "mesh.dp_replicate=2", text=IMAGES)
        cluster = Cluster(
            name="both", level=(Level(name="node", units=2),), host=Host(cores=CORES),
            storage=StorageRates(node_read_gbyte_s=0.001),
        )  # fmt: skip
        data = DataTimes(
            readers=2, num_rows=1600, evaluated_rows=0, row_bytes=1e5, source_row_bytes=1e5,
            batch_s=1e-4, batch_cores=1.0, staging_bytes_per_s=1e9, epoch_end_s=0.0,
            write_bytes_per_s=0.0,
        )  # fmt: skip
        planned, epoch, _ = both(
            config, cluster, data, ranks=2, computing_s=computing_s, hidden=0.0
        )
        added_s = planned.staging_s + planned.late_rows_s
        assert planned.staging_s == pytest.approx(160 / 16)
        expected_s = 160.0 - 100 * computing_s * 15 / 16
        assert added_s == pytest.approx(expected_s, rel=1e-4)
        folded, _ = epoch.plan(computing_s, 0.0, FORWARD_S)
        assert folded.staging_s + folded.late_rows_s == pytest.approx(added_s, rel=1e-3)
        assert planned.run_s(3) == pytest.approx(3 * planned.epoch_s + added_s)
