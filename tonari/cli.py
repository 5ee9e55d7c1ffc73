"""Find the command, run it, and end with one readable message when it fails."""

import contextlib
import difflib
import importlib
import io
import os
import select
import shutil
import signal
import sys
from collections.abc import Iterator, Sequence
from typing import NoReturn

from tonari import __version__
from tonari.terminal import fill, join_lines, list_commands

COMMANDS = {
    "demo": ("tonari.demo.command", "train the same model three ways on this machine, and compare"),
    "init": ("tonari.init.command", "write a config, a loop and a batch script to begin with"),
    "pack": ("tonari.pack.command", "turn Parquet or images into tar shards, text into tokens"),
    "train": ("tonari.train.command", "train a model as a TOML file says, alone or on many ranks"),
    "evaluate": (
        "tonari.evaluate",
        "evaluate a run's weights beside it, on another node, or after its end",
    ),
    "feed": ("tonari.feed", "decode and transform for ranks that train, on another node"),
    "runs": ("tonari.runs.command", "list runs: how far they are, what they cost; a page of one"),
    "verify": (
        "tonari.verify.command",
        "compare some steps on a mesh with one process of plain torch, tensor by tensor",
    ),
    "ablate": ("tonari.ablate.command", "compare ways to train, by accuracy over seeds"),
    "hardest": (
        "tonari.hardest.command",
        "show the rows that never become easy: wrong labels, broken samples",
    ),
    "rows": (
        "tonari.rows.command",
        "list which rows a run trained when, and when a sample was trained",
    ),
    "certify": (
        "tonari.certify.command",
        "write, or check, a certificate of what a run trained",
    ),
    "export": ("tonari.export", "write a checkpoint's weights as one plain file"),
    "cache": ("tonari.cache.command", "stage a dataset into the node's cache, or look into one"),
    "stats": ("tonari.stats.command", "find mean, deviation and range of pictures and arrays"),
    "bench": (
        "tonari.bench.command",
        "measure the loader beside others; the exchange; what a shared filesystem costs",
    ),
    "simulate": (
        "tonari.simulate.command",
        "say what an exchange would do at any scale, moving no data",
    ),
    "probe": (
        "tonari.plan.probe_command",
        "time this node, and a step of a job on it, for plan",
    ),
    "plan": ("tonari.plan.command", "say what a step of a job takes, before it runs"),
    "rehearse": (
        "tonari.rehearse.command",
        "say whether a long run ends in time, while its nodes fail",
    ),
    "search": (
        "tonari.plan.search_command",
        "list the fastest meshes for a job on a cluster that a file describes",
    ),
    "doctor": ("tonari.doctor", "check this machine: MPI, torch, cache directory, limits"),
}

# By name: importing the classes would import torch, and `tonari --help` must answer at once.
KNOWN_ERRORS = frozenset(
    {
        "tonari.bench.errors.BenchError",
        "dataio.base.errors.DataioError",
        "tonari.errors.CommandError",
        "tonari.trainer.torch_range.TorchVersionError",
    }
)
EXTRAS = {
    "tyro": "cli",
    "rich": "cli",
    "msgspec": "cli",
    "scipy": "cli",
    "matplotlib": "report",
    "jinja2": "report",
    "safetensors": "export",
    "transformers": "hf",
    "tokenizers": "text",
    "google_crc32c": "tfrecord",
    "h5py": "hdf5",
    "zarr": "zarr",
}

FAILED, WRONG_ARGUMENTS, INTERRUPTED, READER_GONE = 1, 2, 130, 141


def run() -> NoReturn:
    """Run the command line and end the process.

    ``sys.exit`` is looked up after the command ran: under MPI it may by then be the hook that ends
    the other ranks too, who would wait for this one for ever.
    """
    if sys.argv[1:2] == ["train"]:
        # Schedulers ask by them for a checkpoint before the time limit. While torch is imported
        # they would end this rank: they wait until the run looks for them (StopRequest).
        signal.pthread_sigmask(signal.SIG_BLOCK, (signal.SIGUSR1, signal.SIGUSR2))
    try:
        status = main()
        sys.stdout.flush()
    except BrokenPipeError:
        if not _reader_is_gone():
            raise
        # What is still in the buffer has nobody to read it: `tonari ... | head` ends quietly.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        status = READER_GONE
    sys.exit(status)


def _reader_is_gone() -> bool:
    """Whether it is the standard output that nobody reads, and not a peer's connection."""
    poll = select.poll()
    poll.register(sys.stdout.fileno(), 0)
    return any(events & select.POLLERR for _, events in poll.poll(0))


def main(argv: Sequence[str] | None = None) -> int:
    """Run ``tonari COMMAND ...``.

    Args:
        argv: Arguments, the process's own if left out.

    Returns:
        The exit status: 0, 1 (it failed), 2 (wrong arguments) or 130 (interrupted). An error that
        nobody foresaw is raised, so that the hooks of a rank see it and end the job.
    """
    name, *rest = (sys.argv[1:] if argv is None else [*argv]) or [""]
    if name in ("-h", "--help", "help"):
        print(_help())
        return 0
    if name == "--version":
        print(f"tonari {__version__}")
        return 0
    if name not in COMMANDS:
        print(_unknown(name), file=sys.stderr)
        return WRONG_ARGUMENTS
    return _run(name, rest)


def _run(name: str, rest: list[str]) -> int:
    try:
        with _wrapped() if {"-h", "--help"} & {*rest} else contextlib.nullcontext():
            status: int = importlib.import_module(COMMANDS[name][0]).main(rest)
    except SystemExit as end:
        return _exit_status(end)
    except KeyboardInterrupt:
        print(f"tonari {name}: interrupted", file=sys.stderr)
        return INTERRUPTED
    except ModuleNotFoundError as error:
        extra = EXTRAS.get(error.name or "")
        if extra is None:
            raise
        from dataio.base.errors import install_command

        need = f"needs {error.name}, which is not installed; run `{install_command(extra)}`"
        print(f"tonari {name}: {need}", file=sys.stderr)
        return FAILED
    except Exception as error:
        if not _is_known(error):
            raise
        print(f"tonari {name}: {error}", file=sys.stderr)
        return FAILED
    return status


class _Printed(io.StringIO):
    """What is printed, by code that looks where it prints."""

    encoding = property(lambda self: sys.__stdout__ and sys.__stdout__.encoding)

    def isatty(self) -> bool:
        return sys.__stdout__ is not None and sys.__stdout__.isatty()


@contextlib.contextmanager
def _wrapped() -> Iterator[None]:
    """Wrap long lines of prose that are printed meanwhile at the terminal's width, else at 80."""
    width = shutil.get_terminal_size().columns
    printed = _Printed()
    with contextlib.suppress(ModuleNotFoundError):
        import tyro._strings as of_tyro

        # Its own takes a line that begins with anything but a letter for a new paragraph.
        vars(of_tyro)["remove_single_line_breaks"] = join_lines
    try:
        with contextlib.redirect_stdout(printed):
            yield
    finally:
        for line in printed.getvalue().splitlines():
            # A box's lines are as wide as they should be, with codes of colours on top.
            print(line if line.startswith(("\x1b", "│")) else fill(line, width))


def _exit_status(end: SystemExit) -> int:
    if end.code is None or isinstance(end.code, int):
        return end.code or 0
    print(end.code, file=sys.stderr)
    return FAILED


def _is_known(error: BaseException) -> bool:
    names = {f"{kind.__module__}.{kind.__qualname__}" for kind in type(error).__mro__}
    return not KNOWN_ERRORS.isdisjoint(names)


def _help() -> str:
    about = "Feeds distributed training from next door instead of from the shared filesystem."
    commands = {name: words for name, (_, words) in COMMANDS.items()}
    more = "; tonari --version prints the version"
    return "\n".join(list_commands("tonari", about, commands, more=more))


def _unknown(name: str) -> str:
    if not name:
        return _help()
    near = difflib.get_close_matches(name, COMMANDS, n=1)
    guess = f"; did you mean {near[0]!r}?" if near else ""
    return f"tonari: {name!r} is not a command, expected one of {', '.join(COMMANDS)}{guess}"
