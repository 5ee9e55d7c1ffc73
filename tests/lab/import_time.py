"""How long do many processes import for, when Python lies on a busy shared filesystem?

    python -m tests.lab.import_time --work DIRECTORY --modules torch --processes 1 4 16 64

A Python with the modules is copied, and packed by `packaging/squashfs.sh`. The shared filesystem is
`tests/slowfs.py`: limits that all nodes share, and a mount a node, so that every node has a page
cache of its own that begins cold, and its processes share it. Real processes import; ways:

- ``local``: from this machine's own disk, warm: what its processors take, whatever the filesystem;
- ``tree``: from the directory tree on the shared filesystem, as of an environment there;
- ``image``: from the squashfs image there, mounted on each node by squashfuse;
- ``scratch``: each node copies the image to its own disk first, and mounts the copy.

A line of JSON each: seconds until the last process has imported, mounting and copying among them,
and what reached the shared filesystem. Any user may run it who may mount by FUSE.
"""

import argparse
import compileall
import contextlib
import json
import math
import os
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from pathlib import Path

from tests.slowfs import ROOT, SlowDirectory, slowfs, unmount
from tonari.report.machine import describe_machine

WAYS = ("local", "tree", "image", "scratch")
TIMEOUT_S = 560.0
REMEMBER_S = 3600.0  # as a client under a lock that nobody takes away
LEFT_OUT = ("site-packages", "test", "idlelib", "tkinter", "ensurepip", "lib2to3", "config-*")
IMAGE = "python.sqsh"
# What belongs to a module but lies beside it.
FOUND = """
import importlib, json, sys
for name in sys.argv[1:]: importlib.import_module(name)
names = {name.partition(".")[0] for name in sys.modules} - sys.stdlib_module_names
files = {name: getattr(sys.modules.get(name), "__file__", None) for name in sorted(names)}
print(json.dumps({name: file for name, file in files.items() if file}))
"""


def copy_python(to: Path, modules: Sequence[str]) -> None:
    """Copy this interpreter, its library, and what modules import, into one directory."""
    base, version = Path(sys.base_prefix), f"python3.{sys.version_info.minor}"
    (to / "bin").mkdir(parents=True)
    shutil.copy2(base / "bin" / version, to / "bin/python")
    library = to / "lib" / version
    shutil.copytree(base / "lib" / version, library, ignore=shutil.ignore_patterns(*LEFT_OUT))
    for path in (base / "lib").glob(f"lib{version}.so.*"):
        shutil.copy2(path, to / "lib")
    found = subprocess.run(
        [sys.executable, "-c", FOUND, *modules], cwd=ROOT, check=True, capture_output=True,
        env={**os.environ, "PYTHONPATH": str(ROOT)},
    ).stdout  # fmt: skip
    packages = library / "site-packages"
    packages.mkdir()
    for name, file in json.loads(found).items():
        path = Path(file)
        if path.name != "__init__.py":
            shutil.copy2(path, packages)
            continue
        for own in (path.parent, path.parent.with_name(f"{name}.libs")):
            if own.exists():
                shutil.copytree(own, packages / own.name)
    compileall.compile_dir(library, quiet=2, workers=1)


def start(python: Path, modules: Sequence[str]) -> "subprocess.Popen[bytes]":
    """Start a process that imports modules, all of it from one directory."""
    env = {
        "PYTHONHOME": str(python), "LD_LIBRARY_PATH": str(python / "lib"), "PATH": "/usr/bin:/bin",
        "PYTHONDONTWRITEBYTECODE": "1", "PYTHONNOUSERSITE": "1", "OMP_NUM_THREADS": "1",
    }  # fmt: skip
    check = f"import sys, {', '.join(modules)}; sys.exit(not sys.prefix == {str(python)!r})"
    command = [str(python / "bin/python"), "-c", check]
    return subprocess.Popen(command, cwd="/", env=env, stdin=subprocess.DEVNULL)


def await_all(processes: "Sequence[subprocess.Popen[bytes]]", deadline: float) -> None:
    """Wait until all have ended well; end them if not."""
    try:
        for process in processes:
            if process.wait(max(0.0, deadline - time.monotonic())):
                raise RuntimeError(f"{process.args!r} ended with {process.returncode}, expected 0")
    finally:
        for process in processes:
            process.kill()
            process.wait()


@contextlib.contextmanager
def pythons(way: str, slow: SlowDirectory, local: Path, own: Path) -> Iterator[list[Path]]:
    """Have a Python on each node; what a node mounts and copies happens on all at once."""
    if way in ("local", "tree"):
        yield [local / "python" if way == "local" else path / "python" for path in slow.paths]
        return
    nodes = [own / f"node{number}" for number in range(len(slow.paths))]
    jobs = []
    for node, shared in zip(nodes, slow.paths, strict=True):
        (node / "python").mkdir(parents=True)
        image, copy = shared / IMAGE, node / IMAGE
        steps = [f"cp {image} {copy}"] if way == "scratch" else []
        steps += [f"squashfuse -o ro {copy if way == 'scratch' else image} {node / 'python'}"]
        jobs.append(subprocess.Popen(["sh", "-ec", "; ".join(steps)], stdin=subprocess.DEVNULL))
    try:
        await_all(jobs, time.monotonic() + TIMEOUT_S)
        yield [node / "python" for node in nodes]
    finally:
        for node in nodes:
            unmount(node / "python")


def measure(way: str, place: Path, args: argparse.Namespace, num: int) -> dict[str, object]:
    """Import on cold nodes, each with its share of the processes."""
    num_nodes = math.ceil(num / args.per_node)
    with contextlib.ExitStack() as stack:
        own = Path(stack.enter_context(tempfile.TemporaryDirectory(dir=place, prefix=f"{way}-")))
        slow = stack.enter_context(
            slowfs(
                place / "shared",
                num_mounts=num_nodes,
                remember_s=REMEMBER_S,
                bytes_per_s=args.bytes_per_s,
                read_latency_s=args.latency_s,
                metadata_latency_s=args.latency_s,
                metadata_ops_per_s=args.ops_per_s,
            )
        )
        before, started = slow.counts(), time.monotonic()
        on_nodes = stack.enter_context(pythons(way, slow, place / "shared", own))
        ready_s = time.monotonic() - started
        processes = [start(on_nodes[rank // args.per_node], args.modules) for rank in range(num)]
        await_all(processes, started + TIMEOUT_S)
        wall_s = time.monotonic() - started
        counts = {kind: count - before[kind] for kind, count in slow.counts().items()}
    metadata = sum(counts[kind] for kind in ("getattr", "open", "readdir", "statfs"))
    return {
        "way": way, "processes": num, "nodes": num_nodes, "wall_s": round(wall_s, 2),
        "ready_s": round(ready_s, 2), "metadata_ops": metadata, **counts,
    }  # fmt: skip


def main() -> None:
    """Print one line of JSON for each way and number of processes."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--work", type=Path, required=True, help="made, and kept for another run")
    parser.add_argument("--modules", nargs="+", default=["torch"])
    parser.add_argument("--processes", type=int, nargs="+", default=[1, 4, 16, 64])
    parser.add_argument("--per-node", type=int, default=4)
    parser.add_argument("--ways", choices=WAYS, nargs="+", default=WAYS)
    parser.add_argument("--latency-s", type=float, default=0.001, help="of each operation")
    parser.add_argument("--ops-per-s", type=float, default=2000.0, help="of metadata, all nodes")
    parser.add_argument("--bytes-per-s", type=float, default=500e6, help="of all nodes")
    args = parser.parse_args()
    place = args.work.resolve()
    shared = place / "shared"
    if not (shared / IMAGE).exists():
        shutil.rmtree(shared, ignore_errors=True)
        copy_python(shared / "python", args.modules)
        pack = [str(ROOT / "packaging/squashfs.sh"), "pack", shared / "python", shared / IMAGE]
        subprocess.run(pack, check=True, stdout=subprocess.DEVNULL)
    files = [path for path in (shared / "python").rglob("*") if path.is_file()]
    await_all([start(shared / "python", args.modules)], time.monotonic() + TIMEOUT_S)
    about = {
        "question": "imports from a busy shared filesystem", "modules": args.modules,
        "files": len(files), "bytes": sum(path.stat().st_size for path in files),
        "image_bytes": (shared / IMAGE).stat().st_size, "per_node": args.per_node,
        "latency_s": args.latency_s, "ops_per_s": args.ops_per_s, "bytes_per_s": args.bytes_per_s,
        **describe_machine(place),
    }  # fmt: skip
    print(json.dumps(about), flush=True)
    for num in args.processes:
        for way in args.ways:
            print(json.dumps(measure(way, place, args, num)), flush=True)


if __name__ == "__main__":
    main()
