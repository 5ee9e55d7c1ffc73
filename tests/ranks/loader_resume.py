"""Train with a save after every step, or go on from each save: two thread ranks a process.

Arguments: "whole" or "rest", work directory, name of a policy. Prints what was seen as JSON.
"""

import json
import sys
from pathlib import Path

import shuffle
from dataio import Workers
from tests.dataio.loaders import EPOCHS, POLICIES, jitter
from tests.resumes import JobEnd, ResumedRun, RunJob, in_memory

part, work = sys.argv[1], Path(sys.argv[2])
options = {
    "importance": POLICIES[sys.argv[3]], "transform": jitter, "shuffle": shuffle.Partial(0.3)
}  # fmt: skip
run = ResumedRun(work, in_memory(61, EPOCHS), options, EPOCHS)


def digests(ended: JobEnd) -> list[list[str]]:
    """Of all batches of each rank."""
    return [[batch.digest for batch in seen] for seen in ended.batches]


if part == "whole":
    print(json.dumps(digests(run.start(RunJob((1, 1), save_each=True)))))
else:
    ends = {}
    for save in work.glob("at-*"):
        number = int(save.name.split("-")[1])
        # Another thread count; a cache that stands at another epoch than the save.
        threads = {"workers": Workers(threads=number % 3)}
        ends[number] = digests(run.start(RunJob((1, 1), options=threads), save))
    print(json.dumps(ends))
