"""The process that others are forked from outlives whatever happens to these."""

import os
import select
import signal
import subprocess
from contextlib import closing
from typing import Any

import pytest

from tests.forked.interpreter import Forked
from tests.forked.python import ForkedPython
from tests.multirank import job_environ

SLEEP = "import time; time.sleep(600)"


def test_a_process_that_ends_as_it_is_to_be_killed_takes_nothing_along() -> None:
    with (
        open(os.devnull, "r+b") as nothing,
        ForkedPython(job_environ(), modules=("json",), zygotes=1) as zygote,
    ):
        files = {number: nothing.fileno() for number in range(3)}

        def fork(program: str) -> Forked:
            process = zygote.fork(["-c", program], environ=job_environ(), files=files)
            process.limit(60)
            return process

        with closing(fork(SLEEP)) as process:
            ended = os.pidfd_open(process.pid)
            os.kill(zygote.pids[0], signal.SIGSTOP)
            try:  # it sees both at once, the end first
                os.kill(process.pid, signal.SIGKILL)
                assert select.select([ended], [], [], 60)[0]
                process.kill()
            finally:
                os.kill(zygote.pids[0], signal.SIGCONT)
                os.close(ended)
            assert process.wait() == -signal.SIGKILL
        with closing(fork("raise SystemExit(3)")) as process:
            assert process.wait() == 3


@pytest.mark.usefixtures("heard_interrupts")
@pytest.mark.parametrize("zygote_hears", [signal.SIG_IGN, signal.default_int_handler])
def test_what_a_process_ignores_is_up_to_whoever_asks_for_it(zygote_hears: Any) -> None:
    look = "import signal, sys; sys.exit(signal.getsignal(signal.SIGINT) == signal.SIG_IGN)"
    signal.signal(signal.SIGINT, zygote_hears)
    with ForkedPython(job_environ(), modules=("json",), zygotes=1) as zygote:
        command = [*zygote.command, "-c", look]
        for hears in (signal.SIG_IGN, signal.default_int_handler):
            signal.signal(signal.SIGINT, hears)
            ended = subprocess.run(command, env=job_environ(), timeout=60, check=False)
            assert ended.returncode == (hears == signal.SIG_IGN)
