"""The last message of a rank is read before the job ends."""

import io
import os
import subprocess
import threading
from concurrent.futures import ThreadPoolExecutor
from typing import IO, cast

import pytest

from dataio.world.abort import flush_to_reader, keep_lines_whole
from tests.multirank import ROOT, job_environ, launch_command

JOBS = 24


def test_it_waits_until_the_pipe_is_read():
    reading, writing = os.pipe()
    with os.fdopen(writing, "w") as stream, os.fdopen(reading, "rb") as reader:
        print("the last words", file=stream)
        waiter = threading.Thread(target=flush_to_reader, args=(stream,), kwargs={"limit_s": 60})
        waiter.start()
        waiter.join(0.05)
        assert waiter.is_alive(), "nobody has read it"
        assert reader.readline() == b"the last words\n"
        waiter.join(60)
        assert not waiter.is_alive()


def test_a_line_of_an_unbuffered_stream_is_written_at_once():
    # As ``python -u`` opens standard error: nothing between the text and the descriptor.
    pieces: list[str] = []

    class Descriptor(io.RawIOBase):
        def writable(self) -> bool:
            return True

        def write(self, data) -> int:
            pieces.append(bytes(data).decode())
            return len(data)

    stream = io.TextIOWrapper(cast(IO[bytes], Descriptor()), write_through=True)
    print("OSError", "the disk", sep=": ", file=stream)
    assert pieces == ["OSError", ": ", "the disk", "\n"]
    pieces.clear()
    keep_lines_whole(stream)
    print("OSError", "the disk", sep=": ", file=stream)
    assert pieces == ["OSError: the disk\n"]
    keep_lines_whole(io.StringIO("of a notebook"))


@pytest.mark.parametrize("closed", [False, True])
def test_what_is_no_pipe_is_only_flushed(tmp_path, closed):
    with open(tmp_path / "out", "w") as stream:
        print("to a file", file=stream)
        if closed:
            stream.close()
        flush_to_reader(stream, limit_s=60)
        assert (tmp_path / "out").read_text() == "to a file\n"
    flush_to_reader(io.StringIO("of a notebook"), limit_s=60)


@pytest.mark.multirank
def test_no_launcher_drops_the_message_of_the_rank_that_fails(tmp_path):
    program = [str(ROOT / "tests/ranks/world_fails.py"), str(tmp_path), "error"]
    command = [*launch_command("mpiexec", 2), *program]

    def said(number: int) -> str:
        job = subprocess.run(
            command, env=job_environ(), stderr=subprocess.PIPE, text=True, timeout=60, check=False
        )
        return job.stderr

    # Side by side: with a processor to itself the launcher is quick enough almost always.
    with ThreadPoolExecutor(4) as jobs:
        told = list(jobs.map(said, range(JOBS)))
    message = "[rank 1] uncaught OSError: the disk of rank 1 is on fire; ending all 2 ranks"
    assert [message in text for text in told] == [True] * JOBS
