"""What an epoch waits for: each term has its limits, and a bound of an epoch is one."""

import itertools
from dataclasses import replace
from operator import mul
from typing import Any

import msgspec
import pytest

from tests.oracle.search.planning import load
from tests.oracle.search.test_search import CLUSTER
from tests.oracle.test_feeds import DATA
from tonari.oracle.cluster.cluster import Cluster, Host, StorageRates
from tonari.oracle.errors import OracleError
from tonari.oracle.probe.data import DataTimes
from tonari.oracle.search import search as search_module
from tonari.oracle.search.choices import Group
from tonari.oracle.search.data import read_data, untimed
from tonari.oracle.search.epoch import Epochs, GroupEpoch
from tonari.oracle.search.search import _prepare, search
from tonari.plan.search import search_words
from tonari.trainer.config.config import Config

UNTIMED = untimed(num_rows=1600, row_bytes=1000.0)
GROUP = Group((1, 4, 1, 1, 1), 4, 1)
"""Of four replicas on two nodes of two ranks, each of which trains 400 rows in 100 steps."""


def machine(*, host: Host | None = None, storage: StorageRates | None = None) -> Cluster:
    return msgspec.structs.replace(CLUSTER, host=host or Host(), storage=storage or StorageRates())


def epoch_of(
    config: Config, cluster: Cluster, data: DataTimes = UNTIMED, **given: Any
) -> GroupEpoch:
    found = Epochs(config, cluster, data, world_size=4, **given).of(GROUP)
    assert found is not None
    return found


def waits_of(
    epoch: GroupEpoch, step_s: float, *, link_s: float = 0.0, forward_s: float = 0.0
) -> dict[str, float]:
    planned, waits_s = epoch.plan(step_s, link_s, forward_s)
    assert epoch.floor_s(step_s, forward_s) <= planned.epoch_s
    return waits_s


def test_without_limits_an_epoch_is_its_steps(tmp_path):
    epoch = epoch_of(load(tmp_path, "shuffle.kind=local"), machine())
    assert epoch.job.num_steps == 100
    assert epoch.plan(0.5, 0.1, 0.1)[0].epoch_s == pytest.approx(50)
    assert not any(waits_of(epoch, 0.5, link_s=0.1, forward_s=0.1).values())
    assert epoch.settings(0.5) == ()
    epoch = epoch_of(load(tmp_path, "shuffle.kind=local"), machine(), hidden_fraction=0.5)
    assert epoch.plan(0.5, 0.0, 0.0)[0].epoch_s == pytest.approx(25)
    assert epoch.num_rows == 800


def test_rows_that_leave_pass_while_a_step_computes_and_share_the_link_with_its_messages(tmp_path):
    epoch = epoch_of(load(tmp_path, "shuffle.exchange=1"), machine())
    busy_s, num = epoch.exchange_s, epoch.job.num_steps

    def exchange_of(step_s: float, link_s: float) -> float:
        waits_s = waits_of(epoch, step_s * busy_s, link_s=link_s * busy_s)
        return waits_s["exchange"] / num / busy_s

    assert exchange_of(1.0, 0.0) == pytest.approx(0.0)
    assert exchange_of(1.7, 0.7) == pytest.approx(0.0), "they have left before the messages come"
    assert exchange_of(0.5, 0.0) == pytest.approx(0.5)
    # All of a step's messages, beside the rows of two readers each for a third of the time
    assert exchange_of(1.0, 1.0) == pytest.approx(1.0)


def test_rows_on_their_way_wait_for_the_link_of_their_node(tmp_path):
    config = load(tmp_path, "shuffle.exchange=1")
    epoch = epoch_of(config, machine())
    # 400 rows of each of a node's two replicas over 0.05e9 bytes/s
    assert epoch.exchange_s * epoch.job.num_steps == pytest.approx(2 * 400 * 1000 / 0.05e9)
    alone = load(tmp_path, "shuffle.exchange=0")
    assert epoch_of(alone, machine()).exchange_s == 0
    one_node = Epochs(config, machine(), UNTIMED, world_size=2).of(Group((1, 2, 1, 1, 1), 8, 1))
    assert one_node is not None
    assert one_node.exchange_s == 0


def test_cores_set_the_pace_of_a_loader_that_cannot_keep_up(tmp_path):
    # Two ranks and two readers a node: two of six cores are left for each of the readers
    host = Host(cores=6, decode_mbyte_s=0.001)
    epoch = epoch_of(load(tmp_path, "shuffle.kind=local"), machine(host=host))
    assert epoch.decode_s == pytest.approx(4 * 1.0 / 2)
    # The first batch is waited for whole
    assert waits_of(epoch, 1.5)["decoding"] == pytest.approx(100 * 0.5 + 1.5)
    assert epoch.settings(1.5) == ("data.workers.threads=2",)
    assert epoch.settings(4.0) == ("data.workers.threads=1",)
    assert waits_of(epoch, 4.0)["decoding"] == pytest.approx(2.0)
    mine = load(tmp_path, "shuffle.kind=local", "data.workers={threads=1}")
    epoch = epoch_of(mine, machine(host=host))
    assert epoch.decode_s == pytest.approx(4.0)
    assert epoch.settings(0.5) == ()
    # A probe's own time goes before the machine's
    core_s = DATA.core_s(batch_size=8)
    assert core_s == pytest.approx(0.5 / 8)
    epoch = epoch_of(mine, machine(host=host), DATA, core_s=core_s)
    assert epoch.decode_s == pytest.approx(4 * 0.5 / 8)


def test_a_node_s_disk_is_read_by_all_of_its_readers(tmp_path):
    storage = StorageRates(disk_read_gbyte_s=1e-6, disk_write_gbyte_s=2e-6)
    epoch = epoch_of(load(tmp_path, "shuffle.kind=local"), machine(storage=storage))
    # Of whole pages: a row of 1,000 bytes begins at any of 4,096
    of_row_s = (1000 + 4095) / 1e3
    assert epoch.disk_s == pytest.approx(2 * 4 * of_row_s)
    planned, waits_s = epoch.plan(5.0, 0.0, 0.0)
    assert waits_s["node disk"] == pytest.approx(100 * (2 * 4 * of_row_s - 5) + 5)
    assert planned.staging_s == pytest.approx(800 * 1000 / 2e3)


ROWS = replace(UNTIMED, num_rows=160_000)
IMAGES = """
[data]
train = "absent.tar"
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
"""Whose rows are of any size."""


def test_a_cache_takes_what_the_disk_has_and_the_rest_comes_in_windows(tmp_path):
    # Of 80 MB a node
    config = load(tmp_path, "shuffle.kind=local", text=IMAGES)
    small = StorageRates(disk_gbyte=0.04, node_read_gbyte_s=0.001)
    epoch = epoch_of(config, machine(storage=small), ROWS)
    assert epoch.quota == 40_000_000
    assert epoch.settings(0.1) == ("data.cache.quota=40000000",)
    assert epoch.job.rows.quota is not None
    counts, shares, _ = zip(*epoch.job.rows.quota.runs(), strict=True)
    assert sum(map(mul, counts, shares)) == pytest.approx(1.0)
    assert waits_of(epoch, 0.1)["windows"] > 0
    epoch = epoch_of(config, machine(storage=StorageRates(disk_gbyte=1)), ROWS)
    assert (epoch.quota, epoch.job.rows.quota) == (0, None)
    assert epoch.plan(0.1, 0.0, 0.0)[0].staging_s == 0


def test_an_epoch_of_a_million_million_rows_is_priced_by_a_few_windows(tmp_path):
    rows = replace(UNTIMED, num_rows=10**12)
    # Hardly more than what a node's rows are listed in: windows are small, and many
    storage = StorageRates(disk_gbyte=22_502, node_read_gbyte_s=1)
    epoch = epoch_of(
        load(tmp_path, "shuffle.kind=local", text=IMAGES), machine(storage=storage), rows
    )
    assert epoch.job.rows.quota is not None
    runs = list(epoch.job.rows.quota.runs())
    assert sum(count for count, *_ in runs) > 10_000
    assert len(runs) < 60
    assert waits_of(epoch, 1e-6)["windows"] > 0


@pytest.mark.usefixtures("traced_once")
def test_a_quota_of_the_user_s_that_no_disk_has_room_for_does_not_fit(tmp_path):
    config = load(
        tmp_path, "shuffle.kind=local", "data.cache={path='auto', quota='2GB'}", text=IMAGES
    )
    storage = StorageRates(disk_gbyte=1)
    epochs = Epochs(config, machine(storage=storage), ROWS, world_size=4)
    assert epochs.of(GROUP) is None
    tiny = Epochs(
        load(tmp_path, text=IMAGES),
        machine(storage=StorageRates(disk_gbyte=1e-6)),
        ROWS,
        world_size=4,
    )
    assert tiny.of(GROUP) is None
    small, model = machine(storage=StorageRates(disk_gbyte=1e-6)), load(tmp_path, "model.depth=1")
    with pytest.raises(OracleError, match=r"none has a cache that fits .* is 1e-06, expected room"):
        search(model, small, world_size=1, epochs=[tiny])
    roomy = Epochs(model, machine(), ROWS, world_size=1, words=("roomy",))
    full = Epochs(model, small, ROWS, world_size=1, words=("full",))
    found = search(model, small, world_size=1, epochs=[roomy, full])
    assert [each.choice for each in found.choices] == [("roomy",)]
    assert found.unfit_choices == (("full",),)
    assert "full: does not fit" in "\n".join(search_words(found, model))


def test_hidden_rows_are_scored_anew_where_their_policy_does(tmp_path):
    config = load(tmp_path, "shuffle.kind=local", "importance.kind=kakurenbo")
    epoch = epoch_of(config, machine(), hidden_fraction=0.5)
    assert epoch.scorings == 50  # of 200 rows of a replica, 4 a batch
    assert waits_of(epoch, 1.0, forward_s=0.25)["refresh"] == pytest.approx(12.5)


@pytest.fixture
def traced_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let all searches of a test, which are of one model and machine, trace it once."""
    found: list[Any] = []

    def prepare(*given: Any) -> Any:
        if not found:
            found.append(_prepare(*given))
        return found[0]

    monkeypatch.setattr(search_module, "_prepare", prepare)


def slow_machine() -> Cluster:
    return machine(
        host=Host(cores=6, decode_mbyte_s=0.5),
        storage=StorageRates(disk_gbyte=0.04, node_read_gbyte_s=0.005, disk_read_gbyte_s=0.01),
    )


def test_the_parts_sum_to_the_epoch_and_no_bound_is_above_it(tmp_path):
    config = load(tmp_path, "shuffle.exchange=0.5", "importance.kind=kakurenbo", text=IMAGES)
    epoch = epoch_of(config, slow_machine(), ROWS, hidden_fraction=0.3)
    cases = [
        (step_s, link_s * step_s, forward_s)
        for step_s, link_s, forward_s in itertools.product(
            (1e-4, 1e-3, 3e-3, 1e-2, 0.1), (0.0, 0.5, 1.0), (0.0, 0.01)
        )
    ]
    for case in cases:
        planned, waits_s = epoch.plan(*case)
        whole_s, (step_s, _, forward_s) = planned.epoch_s, case
        assert epoch.job.num_steps * step_s + sum(waits_s.values()) == pytest.approx(whole_s)
        for bound_s, _, bound_forward_s in cases:
            if bound_s <= step_s and bound_forward_s <= forward_s:
                assert epoch.floor_s(bound_s, bound_forward_s) <= whole_s


def choices_of(tmp_path, world_size: int) -> list[Epochs]:
    return [
        Epochs(
            load(tmp_path, "model.depth=2", f"shuffle.exchange={exchange}"), slow_machine(),
            replace(ROWS, num_rows=16_000), world_size=world_size, hidden_fraction=hidden,
            words=(f"shuffle.exchange={exchange}", f"{hidden:.0%} hidden"),
        )
        for exchange, hidden in ((0, 0.0), (1, 0.4))
    ]  # fmt: skip


@pytest.mark.parametrize("world_size", [2, pytest.param(4, marks=[pytest.mark.thorough])])
@pytest.mark.usefixtures("traced_once")
def test_a_search_of_epochs_that_prunes_finds_what_one_finds_that_does_not(tmp_path, world_size):
    found, whole = (
        search(
            load(tmp_path, "model.depth=2"), slow_machine(), world_size=world_size,
            global_batch_size=8, epochs=choices_of(tmp_path, world_size), prunes=prunes,
        )
        for prunes in (True, False)
    )  # fmt: skip
    assert found.candidates == whole.candidates
    assert found.choices == whole.choices
    assert found.pruned > 0
    assert found.legal == found.priced + found.unfit + found.pruned == whole.legal
    best = found.candidates[0]
    assert best.choice[-1] == "40% hidden"
    for each in found.candidates:
        assert sum(each.parts_s.values()) == pytest.approx(each.epoch_s)
        assert each.epoch_s > 0
    assert [each.choice for each in found.choices] == [
        each.words for each in choices_of(tmp_path, world_size)
    ]


def test_epochs_come_in_another_order_where_data_sets_the_pace(tmp_path):
    # Each node of a pipeline's first stage decodes for all: without a pipeline more nodes do
    data = untimed(num_rows=160, row_bytes=1000.0)
    cluster = machine(host=Host(cores=3, decode_mbyte_s=1e-4))
    epochs = Epochs(load(tmp_path, "shuffle.kind=local"), cluster, data, world_size=4)
    (best,) = search(
        load(tmp_path), cluster, world_size=4, global_batch_size=16, top=1, epochs=[epochs]
    ).candidates
    assert best.settings[0] == "mesh.pp=1"
    # Many meshes are as fast, of which the one with the shortest step comes first
    assert best.step_s < 0.2
    # 16 rows of 10 s each on the one core that each of two nodes has for it
    assert best.epoch_s == pytest.approx(10 * 16 / 2 * 10, rel=0.01)


def test_the_data_is_given_or_counted_or_refused(tmp_path):
    config = load(tmp_path)
    assert read_data("1281167x110KB", load(tmp_path, text=IMAGES)).row_bytes == 110e3
    assert read_data("100", config) == untimed(num_rows=100, row_bytes=17.0)
    with pytest.raises(OracleError, match=r"each row .* has 17 bytes; leave .*: --data 100$"):
        read_data("100x110KB", config)
    for words in ("many", "12x", "x3", "0x3"):
        with pytest.raises(
            OracleError, match=r'--data is ".*", expected rows and the bytes of one'
        ):
            read_data(words, config)
    with pytest.raises(OracleError, match=r"--data files: .*absent.txt.*; or give rows"):
        read_data("files", config)
    text = tmp_path / "text.txt"
    text.write_text("a" * (16 * 20 + 1))
    counted = read_data("files", load(tmp_path, f"data.train={str(text)!r}"))
    assert counted == untimed(num_rows=20, row_bytes=17.0)
