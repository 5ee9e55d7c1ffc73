"""Kill many jobs: ``python -m tests.faults.kill --seeds 0:300``."""

import argparse
import signal
import sys
import tempfile
import time
from collections import Counter
from pathlib import Path

from tests.faults.kill.harness import Harness, Result, quick_directory

SHOWN_FAULTS = 4


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m tests.faults.kill", description=__doc__)
    parser.add_argument("--seeds", default="0:100", metavar="A:B", help="from A on, before B; or A")
    parser.add_argument("--what", choices=["loader", "train"], default="loader")
    parser.add_argument(
        "--directory", type=Path, default=quick_directory(),
        help="where jobs keep their files (default: in memory, where flushing takes no time)",
    )  # fmt: skip
    given = parser.parse_args()
    # Not at once: what it started and wrote is to go with it.
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(1))
    first, colon, stop = given.seeds.partition(":")
    seeds = range(int(first), int(stop)) if colon else [int(first)]
    began, results = time.monotonic(), []
    with (
        tempfile.TemporaryDirectory(dir=given.directory, prefix="kill-") as directory,
        Harness(Path(directory)) as harness,
    ):
        for seed in seeds:
            result = harness.run(seed, what=given.what)
            results.append(result)
            _print(seed, result, what=given.what)
    _summarise(results, time.monotonic() - began)
    return any(result.faults for result in results)


def _print(seed: int, result: Result, *, what: str) -> None:
    done = "; ".join(map(str, result.done)) or "nothing"
    verdict = "WRONG" if result.faults else "right"
    print(
        f"{seed} {verdict} {result.duration_s:.1f} s [{result.launcher} {result.configuration}] "
        f"{done}", flush=True,
    )  # fmt: skip
    for fault in result.faults[:SHOWN_FAULTS]:
        print(f"  {fault[:600]}" if "\n" not in fault else f"  {fault}")
    if len(result.faults) > SHOWN_FAULTS:
        print(f"  and {len(result.faults) - SHOWN_FAULTS} more")
    if result.faults:
        print(f"  again: python -m tests.faults.kill --what {what} --seeds {seed}", flush=True)


def _summarise(results: list[Result], duration_s: float) -> None:
    wrong = [result for result in results if result.faults]
    kinds = Counter(one.part for result in results for one in result.done)
    ways = Counter(one.kill.how if one.kill else "stop" for r in results for one in r.done)
    print(f"{len(results)} seeds, {sum(kinds.values())} interruptions, {duration_s:.0f} s")
    for title, counts in (("in", kinds), ("by", ways)):
        told = ", ".join(f"{name} {count}" for name, count in counts.most_common())
        print(f"  {title}: {told}")
    for title, counts in _by_option(results).items():
        print(f"  {title}: " + ", ".join(f"{name} {n}" for name, n in counts.most_common()))
    print(f"{len(wrong)} wrong")


def _by_option(results: list[Result]) -> dict[str, Counter[str]]:
    counts: dict[str, Counter[str]] = {}
    for result in results:
        own = vars(result.configuration.options)
        names = ("shuffle", "importance", "stage", "quota", "mixed", "num_processes", "saves")
        told = {name: own[name] for name in names if name in own}
        told |= {"ranks": result.configuration.ranks, "launcher": result.launcher}
        for name, value in told.items():
            counts.setdefault(name, Counter())[str(value)] += 1
    return counts


if __name__ == "__main__":
    sys.exit(main())
