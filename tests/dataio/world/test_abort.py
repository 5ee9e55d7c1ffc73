"""What the hooks do with errors and exits; that they end real jobs is in test_ranks.py."""

import atexit
import sys
import threading
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest

from dataio.base.errors import CacheStagingError, QuotaError, WorldError
from dataio.world import World, single_world, thread_worlds
from dataio.world.abort import PATIENCE_S, install_abort_hooks, wait_for_rank_0


@pytest.fixture
def world(monkeypatch: pytest.MonkeyPatch) -> World:
    """Rank 1 of 2, hooks installed for one test."""
    monkeypatch.setattr(sys, "excepthook", sys.excepthook)
    monkeypatch.setattr(sys, "exit", sys.exit)
    monkeypatch.setattr(threading, "excepthook", threading.excepthook)
    kept: list[Callable[..., object]] = []
    monkeypatch.setattr(atexit, "register", lambda hook, *_: kept.append(hook))
    ranks = thread_worlds([2])
    install_abort_hooks(ranks[1])
    return ranks[1]


def test_an_uncaught_error_is_printed_with_its_rank_and_aborts(
    world: World, capsys: pytest.CaptureFixture[str]
) -> None:
    error = OSError("disk on fire")
    with pytest.raises(
        WorldError, match=r"\[rank 1\] uncaught OSError: disk on fire; ending all 2"
    ):
        sys.excepthook(OSError, error, None)
    assert capsys.readouterr().err == "[rank 1] OSError: disk on fire\n"


def test_a_rank_waits_for_rank_0_only_with_an_error_that_all_ranks_raise(
    world: World, monkeypatch: pytest.MonkeyPatch
) -> None:
    waited: list[float] = []
    monkeypatch.setattr("dataio.world.abort.time.sleep", waited.append)
    wait_for_rank_0(world, QuotaError("too few bytes", on_all_ranks=True))
    assert waited == [PATIENCE_S]
    for error in (QuotaError("too few bytes"), CacheStagingError("busy", Path()), OSError()):
        wait_for_rank_0(world, error)
    wait_for_rank_0(single_world(), QuotaError("too few bytes", on_all_ranks=True))
    assert waited == [PATIENCE_S]


def test_an_exit_of_a_thread_ends_nothing(world: World) -> None:
    thread = threading.Thread(target=lambda: sys.exit(3))
    thread.start()
    thread.join()
    world.isend(np.zeros(1, np.uint8), dest=0, tag=0)


def test_an_exit_keeps_its_code(world: World) -> None:
    for code in (None, 0, 3, "words"):
        with pytest.raises(SystemExit) as caught:
            sys.exit(code)
        assert caught.value.code == code


def test_a_world_of_one_keeps_the_interpreters_hooks() -> None:
    before = (sys.excepthook, sys.exit, threading.excepthook)
    install_abort_hooks(single_world())
    assert before == (sys.excepthook, sys.exit, threading.excepthook)
