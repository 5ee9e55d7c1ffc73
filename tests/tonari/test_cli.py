"""A command that fails says so in one message; what nobody foresaw is raised."""

import os
import signal
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace

import pytest

from dataio.base.errors import ExchangeError, StallError, install_command
from tests.multirank import RunRanks
from tonari import cli
from tonari.errors import CommandError
from tonari.pack.shards import write_shards
from tonari.trainer.errors import ConfigError


def run(monkeypatch: pytest.MonkeyPatch, error: BaseException | None, status: int = 0) -> int:
    """Run `tonari demo --fast` with a command that raises or returns."""

    def main(argv: list[str]) -> int:
        assert argv == ["--fast"]
        if error:
            raise error
        return status

    monkeypatch.setitem(sys.modules, "tonari.demo.command", SimpleNamespace(main=main))
    return cli.main(["demo", "--fast"])


def test_help_names_every_command_and_imports_nothing_heavy() -> None:
    program = (
        "import sys; from tonari.cli import main; status = main(['--help'])\n"
        "assert status == 0 and not {'torch', 'numpy', 'mpi4py', 'tyro'} & sys.modules.keys()"
    )
    ended = subprocess.run(
        [sys.executable, "-c", program], capture_output=True, text=True, timeout=60, check=True
    )
    assert all(f"  {name} " in ended.stdout for name in cli.COMMANDS)


@pytest.mark.parametrize("columns", [80, 60])
@pytest.mark.parametrize("command", ["", "cache stage", "pack", "bench exchange", "train"])
def test_help_is_as_wide_as_the_terminal(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], command: str, columns: int
) -> None:
    monkeypatch.setenv("COLUMNS", str(columns))
    assert cli.main([*command.split(), "--help"]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert columns - 5 < max(map(len, lines)) <= columns


def test_nobody_reading_the_output_is_no_error() -> None:
    reader, writer = os.pipe()
    os.close(reader)
    ended = subprocess.run(
        [sys.executable, "-m", "tonari", "--help"],
        stdout=writer, stderr=subprocess.PIPE, text=True, timeout=60, check=False,
    )  # fmt: skip
    os.close(writer)
    assert (ended.returncode, ended.stderr) == (141, "")


def test_a_broken_connection_of_another_kind_is_raised(monkeypatch: pytest.MonkeyPatch) -> None:
    def fails() -> int:
        raise BrokenPipeError("a peer has gone")

    monkeypatch.setattr(cli, "main", fails)
    monkeypatch.setattr(sys, "stdout", sys.__stdout__)
    with pytest.raises(BrokenPipeError, match="a peer"):
        cli.run()


def test_an_unknown_command_exits_2_and_guesses(capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["pakc"]) == 2
    assert "'pakc' is not a command, expected one of demo, init, pack" in (
        err := capsys.readouterr().err
    )
    assert err.endswith("did you mean 'pack'?\n")
    assert cli.main([]) == 2
    assert "usage: tonari COMMAND" in capsys.readouterr().err


@pytest.mark.parametrize(
    "error",
    [StallError("rank 3"), ExchangeError("rank 3"), ConfigError("rank 3"), CommandError("rank 3")],
)
def test_a_known_error_is_one_message(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], error: Exception
) -> None:
    assert run(monkeypatch, error) == 1
    assert capsys.readouterr().err == "tonari demo: rank 3\n"


def test_an_unknown_error_is_raised(monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(ZeroDivisionError):
        run(monkeypatch, ZeroDivisionError("our own bug"))
    with pytest.raises(ModuleNotFoundError):
        run(monkeypatch, ModuleNotFoundError("our own bug", name="dataio.gone"))


def test_exit_statuses(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    assert run(monkeypatch, None, status=0) == 0
    assert run(monkeypatch, None, status=1) == 1
    assert run(monkeypatch, SystemExit(2)) == 2
    assert run(monkeypatch, SystemExit()) == 0
    assert run(monkeypatch, SystemExit("tonari demo: no")) == 1
    assert run(monkeypatch, KeyboardInterrupt()) == 130
    assert capsys.readouterr().err == "tonari demo: no\ntonari demo: interrupted\n"


def test_a_missing_extra_is_named(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    assert run(monkeypatch, ModuleNotFoundError("No module", name="matplotlib")) == 1
    assert f"run `{install_command('report')}`" in capsys.readouterr().err


@pytest.mark.multirank
def test_a_known_error_in_one_rank_ends_all_ranks_with_its_message(
    run_ranks: RunRanks, tmp_path: Path
) -> None:
    shards = write_shards(({"__key__": f"{n}", "cls": b"1"} for n in range(9)), tmp_path / "tars",
                          shard_samples=3)  # fmt: skip
    pattern = f"{shards[0].parent}/*.tar"
    ended = run_ranks("cli_fails", 3, pattern, timeout_s=60, check=False)
    assert ended.returncode != 0
    assert "tonari cache: " in ended.output
    assert "file/cache" in ended.output
    assert "Traceback" not in ended.output


@pytest.mark.parametrize(("command", "status"), [("train", 0), ("doctor", -signal.SIGUSR1)])
def test_a_signal_that_asks_for_a_checkpoint_waits_while_train_is_imported(
    command: str, status: int
) -> None:
    program = (
        "import os, signal, sys; from tonari import cli\n"
        f"sys.argv[1:] = [{command!r}]\n"
        "cli.main = lambda: os.kill(os.getpid(), signal.SIGUSR1) or 0\n"
        "cli.run()\n"
    )
    ended = subprocess.run([sys.executable, "-c", program], capture_output=True, timeout=60)
    assert ended.returncode == status, ended.stderr
