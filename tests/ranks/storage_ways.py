"""Run every way on real ranks, DataLoader workers included; each rank reports what it found."""

import sys
from pathlib import Path

import msgspec

from dataio import discover_world
from tonari.bench.storage.results.results import Results
from tonari.bench.storage.site.site import describe_site
from tonari.bench.storage.training.pipeline import PipelineOptions, run_ways


def main() -> None:
    reports, shared, scratch = (Path(argument) for argument in sys.argv[1:4])
    options = PipelineOptions(
        step_s=0.002, batch_size=8, num_samples=160, sample_bytes=4096, workers=1, epochs=2,
        dataloader_epochs=2,
    )  # fmt: skip
    with discover_world() as world:
        results = Results(environment={}, site=describe_site(shared), local=describe_site(scratch))
        found = run_ways(world, shared, scratch, options, results, lambda _: None)
        (reports / f"{world.rank}.json").write_bytes(msgspec.json.encode(found))


if __name__ == "__main__":
    main()
