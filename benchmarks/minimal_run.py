"""How many files and functions of ours does a reader pass through who follows a minimal run?

A dict of arrays, `shuffle.Partial`, `importance.Kakurenbo`, one rank: three epochs of batches,
reports and refreshed rows, from the construction of the loader until it is closed. Every function
that is called is counted once, on any thread; lambdas, comprehensions and what runs while a module
is imported are not. With ``--peers`` the same is counted of three epochs of Mosaic's and of
LitData's ``StreamingDataset`` behind torch's own ``DataLoader``. Of Mosaic 0.13.0 these are 27
files and 103 functions, of LitData 0.2.76 19 and 134.

    python -m benchmarks.minimal_run [--list] [--peers]
"""

import argparse
import importlib.util
import inspect
import sys
import tempfile
import threading
from collections import defaultdict
from collections.abc import Callable
from pathlib import Path
from types import CodeType, FrameType

import numpy as np
import torch
from numpy.typing import NDArray

ROOT = Path(__file__).parents[1]
PACKAGES = ("dataio", "shuffle", "importance")
PEERS = {"streaming": "mosaicml-streaming", "litdata": "litdata"}
NUM_SAMPLES, BATCH_SIZE, NUM_EPOCHS, NUM_CLASSES = 256, 32, 3, 4
IMPORTING = ("<frozen importlib._bootstrap>", "_find_and_load")


def called(run: Callable[[], object]) -> set[CodeType]:
    """Collect the code of all that is called while something runs, imports excepted."""
    codes: set[CodeType] = set()
    imports: defaultdict[int, int] = defaultdict(int)  # by thread: how deep it is in imports

    def note(frame: FrameType, event: str, _: object) -> None:
        code = frame.f_code
        if (code.co_filename, code.co_name) == IMPORTING:
            imports[threading.get_ident()] += {"call": 1, "return": -1}.get(event, 0)
        elif event == "call" and not imports[threading.get_ident()]:
            codes.add(code)

    threading.setprofile(note)
    sys.setprofile(note)
    try:
        run()
    finally:
        sys.setprofile(None)
        threading.setprofile(None)
    return codes


def by_file(codes: set[CodeType], roots: list[Path]) -> dict[str, list[str]]:
    """List the named functions of the files below some directories, by file, in their order."""
    found = defaultdict(set)
    for code in codes:
        is_function = code.co_flags & inspect.CO_OPTIMIZED and not code.co_name.startswith("<")
        path = Path(code.co_filename)
        for root in roots:
            if is_function and path.is_relative_to(root):
                name = str(path.relative_to(root.parent))
                found[name].add((code.co_firstlineno, code.co_qualname))
    return {path: [name for _, name in sorted(names)] for path, names in sorted(found.items())}


def count_ours() -> dict[str, list[str]]:
    """Train the minimal run, and list what of ours was called."""
    import importance
    import shuffle
    from dataio import Array, Int, Loader

    rng = np.random.default_rng(0)
    arrays: dict[str, NDArray[np.generic]] = {
        "image": rng.integers(0, 256, (NUM_SAMPLES, 1, 16, 16)).astype(np.uint8),
        "label": rng.integers(0, NUM_CLASSES, NUM_SAMPLES),
    }

    def run() -> None:
        loader = Loader(
            arrays,
            fields={"image": Array("image", (1, 16, 16), "uint8"), "label": Int("label")},
            batch_size=BATCH_SIZE,
            cache=cache,
            shuffle=shuffle.Partial(exchange=0.1),
            importance=importance.Kakurenbo(0.3),
        )
        for _ in loader.epochs(NUM_EPOCHS):
            for batches in (loader, loader.refresh()):
                for batch in batches:
                    # A network that learns: it is right of most rows, so that some are hidden.
                    logits = 4 * torch.nn.functional.one_hot(batch["label"], NUM_CLASSES).float()
                    logits[batch["sample_id"] % 4 == 0] = 0
                    loss = torch.nn.functional.cross_entropy(
                        logits, batch["label"], reduction="none"
                    )
                    loader.report(batch, loss, *importance.outcome(logits, batch["label"]))
        loader.close()

    with tempfile.TemporaryDirectory() as cache:
        return by_file(called(run), [ROOT / package for package in PACKAGES])


def count_mosaic() -> dict[str, list[str]]:
    """Read what Mosaic's own writer wrote, and list what of it was called."""
    import streaming
    from streaming.base.util import clean_stale_shared_memory

    clean_stale_shared_memory()
    with tempfile.TemporaryDirectory() as directory:
        with streaming.MDSWriter(
            out=directory, columns={"image": "ndarray:uint8:1,16,16", "label": "int"}
        ) as writer:
            for sample in peers_samples():
                writer.write(sample)

        def run() -> None:
            dataset = streaming.StreamingDataset(
                local=directory, batch_size=BATCH_SIZE, shuffle=True
            )
            read(torch.utils.data.DataLoader(dataset, batch_size=BATCH_SIZE))

        return by_file(called(run), [Path(streaming.__file__).parent])


def count_litdata() -> dict[str, list[str]]:
    """Read what LitData's own writer wrote, and list what of it was called."""
    import litdata
    from litdata.streaming.cache import Cache

    with tempfile.TemporaryDirectory() as directory:
        cache = Cache(directory, chunk_size=NUM_SAMPLES // 2)
        for index, sample in enumerate(peers_samples()):
            cache[index] = sample
        cache.done()
        cache.merge()

        def run() -> None:
            dataset = litdata.StreamingDataset(directory, shuffle=True)
            read(torch.utils.data.DataLoader(dataset, batch_size=BATCH_SIZE))

        return by_file(called(run), [Path(litdata.__file__).parent])


def peers_samples() -> list[dict[str, object]]:
    """Make the samples of the minimal run."""
    rng = np.random.default_rng(0)
    return [
        {"image": rng.integers(0, 256, (1, 16, 16)).astype(np.uint8), "label": index % NUM_CLASSES}
        for index in range(NUM_SAMPLES)
    ]


def read(loader: torch.utils.data.DataLoader[dict[str, torch.Tensor]]) -> None:
    """Loop over the epochs of a run."""
    for _ in range(NUM_EPOCHS):
        for _ in loader:
            pass


def main() -> None:
    """Print how many files and functions were passed through."""
    parser = argparse.ArgumentParser(description="Count the files and functions of a minimal run.")
    parser.add_argument("--list", action="store_true", help="each file, with its functions")
    parser.add_argument("--peers", action="store_true", help="count Mosaic's and LitData's instead")
    options = parser.parse_args()
    counts = {"tonari": count_ours}
    if options.peers:
        missing = [package for name, package in PEERS.items() if not importlib.util.find_spec(name)]
        if missing:
            parser.error(f"--peers needs them: pip install numpy torch {' '.join(missing)}")
        counts = {"mosaic": count_mosaic, "litdata": count_litdata}
    for name, count in counts.items():
        found = count()
        if options.list:
            for path, functions in found.items():
                print(f"{path}: {len(functions)}", *functions, sep="\n    ")
        print(f"{name}: {len(found)} files, {sum(map(len, found.values()))} functions")


if __name__ == "__main__":
    main()
