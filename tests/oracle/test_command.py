"""`tonari train --dry-run --trace`: a step as ranks would make it, printed."""

import json

import pytest

from tests.oracle.test_trace import GPT
from tonari.train.command import main

MESH = ("mesh.pp=2", "mesh.microbatches=2", "mesh.dp_shard=2")


@pytest.fixture
def settings(tmp_path):
    path = tmp_path / "run.toml"
    path.write_text(GPT)
    return str(path)


def test_a_dry_run_prints_the_traced_steps_of_each_pipeline_rank(settings, capsys):
    asked = ("--dry-run", "--world", "4", *MESH)
    assert main([settings, *asked, "--json", "--trace"]) == 0
    steps = json.loads(capsys.readouterr().out)["steps"]
    assert [(step["pp_rank"], step["rank"]) for step in steps] == [(0, 0), (1, 2)]
    for step in steps:
        assert 0 < step["kept_bytes"] < step["peak_bytes"]
        sent = {(each["kind"], *each["axes"]): each["messages"] for each in step["traffic"]}
        assert sent["send", "pp"] == sent["receive", "pp"] == 2
        assert sent["all_gather", "dp_shard"] == sent["reduce_scatter", "dp_shard"] > 0
    assert main([settings, *asked, "--trace"]) == 0
    shown = capsys.readouterr().out
    assert "A step without data, as the first rank at each pp coordinate" in shown
    assert "reduce-scatter" in shown
    assert main([settings, *asked]) == 0
    shown = capsys.readouterr().out
    assert "A step without data" not in shown
    assert "mesh.offload" not in shown
    assert main([settings, *asked, "mesh.offload=true"]) == 0
    assert "mesh.offload: of it parameters, gradients and" in capsys.readouterr().out


def test_a_trace_is_for_a_dry_run(settings, capsys):
    with pytest.raises(SystemExit):
        main([settings, "--trace"])
    assert "--trace and --json are for --dry-run; give it too" in capsys.readouterr().err
