"""A step by equations is laid beside the parts of the same ranks' simulated step."""

from dataclasses import replace
from pathlib import Path

import pytest

from tests.oracle.test_simulate import Bench, program
from tests.oracle.test_trace import GPT
from tonari.oracle.explain import explain
from tonari.oracle.probe.messages import MessageTimes
from tonari.oracle.probe.probe import Probe
from tonari.oracle.programs import programs
from tonari.oracle.record import Message, Wait
from tonari.oracle.simulate import simulate
from tonari.trainer.config.config import Config, load_config

SIZES = (2, 2, 1, 1, 1)
SENDS = MessageTimes(
    kind="send", ranks=2, num_bytes=(256, 1 << 26), seconds=(0.5, 0.5), cores=(1, 1), spread=(1, 1)
)
PROBE = Probe(
    torch="", cores=4, ranks=4, world_size=4, settings={}, messages=(SENDS,), slowdowns=((1, 1.0),),
    steps=(
        program(0, 2.0, Message("send", (0, 2), 100, peer=2), Wait(0),
                Message("all_reduce", (0, 1), 100), Wait(1)),
        program(2, Message("receive", (0, 2), 100, peer=0), Wait(0), 3.0,
                Message("all_reduce", (2, 3), 100), Wait(1)),
    ),
)  # fmt: skip


@pytest.fixture
def config(tmp_path: Path) -> Config:
    path = tmp_path / "run.toml"
    path.write_text(GPT)
    return load_config(path, ["mesh.pp=2", "mesh.microbatches=4"])


def test_the_stage_that_the_equations_find_slowest_is_explained_by_its_own_ranks(config):
    steps = programs(PROBE.steps, 4, SIZES)
    found = explain(config, PROBE, simulate(steps, Bench(message_s=0.25), steps=1))
    assert (found.pp_rank, found.stages, found.microbatches) == (1, 2, 4)
    assert (found.terms.computation_s, found.terms.bubble_s) == (3.0, 0.75)
    assert {ring.name: ring.seconds for ring in found.terms.rings} == {
        "pp: receive": 0.25, "dp_replicate: all-reduce": 1.0
    }  # fmt: skip
    # The first stage computes for 2 s, and the message takes a quarter
    assert found.simulated_s == pytest.approx(
        {"pp: receive": 2.25, "compute": 3.0, "dp_replicate: all-reduce": 0.25}
    )


def test_the_parts_of_a_simulated_step_add_up_to_it(config):
    steps = programs(PROBE.steps, 4, SIZES)
    simulation = simulate(steps, Bench(message_s=0.25), steps=1)
    found = explain(config, PROBE, simulation)
    assert sum(found.simulated_s.values()) == pytest.approx(simulation.step_s)


def test_a_link_within_the_node_is_as_probed(config):
    simulation = simulate(programs(PROBE.steps, 4, SIZES), Bench(), steps=1)
    slower = replace(SENDS, seconds=(5.0, 5.0))
    one, ten = (
        explain(config, replace(PROBE, messages=(sends,)), simulation).terms
        for sends in (SENDS, slower)
    )
    assert [ring.seconds for ring in ten.rings] == [10 * ring.seconds for ring in one.rings]
    assert ten.computation_s == one.computation_s
