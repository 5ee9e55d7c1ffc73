"""`tonari bench importance`: its figures are there, and what is wrong is told."""

import json

import pytest

from importance import policies
from importance.threshold import lowest
from tonari import cli
from tonari.bench.importance.command import table

SMALL = "bench importance --rows 20000 --pools 3 --repeats 1 --steps 3 --step 0.001".split()


def test_every_policy_is_timed_and_pools_choose_as_sorting_would(capsys):
    assert cli.main([*SMALL, "--json"]) == 0
    document = json.loads(capsys.readouterr().out)
    assert document["machine"]["cores"] >= 1
    found = document["results"]
    timed = [row["policy"] for row in found if row["question"] == "selection"]
    assert timed == list(policies())
    hiding = {row["policy"] for row in found if row.get("hidden_fraction")}
    assert {"auto", "kakurenbo", "keep_agreed", "infobatch", "random"} <= hiding
    threshold, feedback = found[-2:]
    assert threshold["lowest_wrong_rows"] == 0
    assert threshold["percentiles_error"] < 1e-3
    assert 1 <= threshold["lowest_totals"] <= 4
    assert threshold["lowest_bytes"] == 2**15 * threshold["lowest_totals"]
    assert (feedback["device"], feedback["repeats"]) == ("cpu", 3)
    assert feedback["ratio"] > 0
    assert feedback["report_cpu_us"] > 0
    lines = table(found).splitlines()
    assert len(lines) == len(found)
    assert all(name in line for name, line in zip(timed, lines, strict=False))


def test_rows_that_sorting_would_not_choose_end_in_a_failure(capsys, monkeypatch):
    def one_less(keys, count, total, *, num_bits):
        return lowest(keys, count, total, num_bits=num_bits)[1:]

    monkeypatch.setattr("tonari.bench.importance.questions.lowest", one_less)
    assert cli.main([*SMALL, "--questions", "threshold"]) == 1
    assert "pools chose 3 rows otherwise than sorting" in capsys.readouterr().err


@pytest.mark.parametrize("wrong", ["--rows 5", "--repeats 0", "--step 0"])
def test_settings_out_of_range_are_refused(wrong, capsys):
    assert cli.main([*"bench importance".split(), *wrong.split()]) != 0
    assert wrong.split()[0] in capsys.readouterr().err
