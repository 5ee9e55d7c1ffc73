"""`tonari bench compare`: its exit status is what an acceptance test looks at."""

import json

import pytest

from tests.tonari.bench.storage.fabricated import make_results
from tonari import cli
from tonari.bench.compare import amount
from tonari.bench.storage.results.document import write_document


@pytest.fixture
def run_on(tmp_path, capsys):
    """Compares two results by the command line: status, stdout, stderr."""

    def run(before, after, *flags):
        paths = [tmp_path / "a.json", tmp_path / "b.json"]
        for path, results in zip(paths, (before, after), strict=True):
            if isinstance(results, str):
                path.write_text(results)
            else:
                write_document(results, path)
        status = cli.main(["bench", "compare", *map(str, paths), *flags])
        return status, *capsys.readouterr()

    return run


def test_a_planted_regression_ends_with_1_and_stands_first(run_on):
    status, out, err = run_on(make_results(1), make_results(2, speed={"random_record": 0.9}))
    assert (status, err) == (1, "")
    first = out.splitlines()[1]
    assert first.startswith("random_record")
    assert first.endswith("REGRESSION")
    assert "note: the first run is not complete" in out


def test_noise_ends_with_0(run_on):
    status, out, _ = run_on(make_results(1), make_results(2))
    assert status == 0
    assert "0 regressions in" in out
    assert "REGRESSION" not in out
    assert "p99" not in out


def test_every_figure_is_shown_when_asked(run_on):
    _, out, _ = run_on(make_results(1), make_results(2), "--all")
    assert "read p99" in out


def test_the_tolerance_is_a_share_or_a_percentage(run_on):
    slow = make_results(2, speed={"random_record": 0.8})
    assert run_on(make_results(1), slow, "--tolerance", "40%")[0] == 0
    assert run_on(make_results(1), slow, "--tolerance", "0.4")[0] == 0
    assert run_on(make_results(1), slow, "--tolerance", "0")[0] == 1


@pytest.mark.parametrize("wrong", ["a lot", "-1%", "100%", "nan"])
def test_a_tolerance_that_is_none_is_refused(run_on, wrong):
    status, out, err = run_on(make_results(1), make_results(1), f"--tolerance={wrong}")
    assert status != 0
    assert out == ""
    assert "--tolerance" in err


def test_json_is_one_document_with_all_figures(run_on):
    status, out, _ = run_on(
        make_results(1), make_results(2, speed={"random_record": 0.9}), "--json"
    )
    found = json.loads(out)
    assert (status, found["status"], found["differences"]) == (1, 1, [])
    bandwidth = next(one for one in found["changes"] if "random_record shared cold" in one["name"])
    assert bandwidth["unit"] == "bytes/s"
    assert bandwidth["repeats"] == [5, 5]
    assert bandwidth["change_fraction"] < -0.05


def test_other_clients_end_with_2_and_one_message(run_on):
    status, _, err = run_on(make_results(1), make_results(1, clients=(1, 2)))
    assert status == 2
    assert len(err.splitlines()) == 1
    assert "cannot be compared: only the first run has" in err


@pytest.mark.parametrize("text", ["", "{", '{"a": 1}', "[]", "null", '{"kind": "tonari bench io"}'])
def test_a_file_of_something_else_ends_with_2_and_one_message(run_on, text):
    status, out, err = run_on(make_results(1), text)
    assert (status, out) == (2, "")
    assert len(err.splitlines()) == 1
    assert "b.json" in err
    assert "expected" in err


def test_amounts_have_three_digits_and_a_unit():
    found = [amount(*one) for one in ((1.234e9, "bytes/s"), (2.5e-5, "s"), (0.0213, "s"))]
    assert found == ["1.23 GB/s", "25 \u00b5s", "21.3 ms"]
    assert amount(12345.6, "1/s") == "12,346 1/s"
