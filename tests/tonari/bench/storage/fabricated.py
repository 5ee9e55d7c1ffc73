"""Results as a run on 4 nodes and a Lustre directory might have found them, from a seed."""

import functools
from collections.abc import Mapping, Sequence

import numpy as np
from msgspec.structs import replace

from tonari.bench.storage.results.results import (
    EndToEnd,
    MeasuredLink,
    Operation,
    Phase,
    Repeat,
    Results,
    Scaling,
    TrainingWay,
)  # fmt: skip
from tonari.bench.storage.site.counters import Moved
from tonari.bench.storage.site.evidence import CacheVerdict
from tonari.bench.storage.site.layouts import Component, StripeLayout
from tonari.bench.storage.site.site import Mount, Site

NODES = ("node0", "node1", "node2", "node3")
MIB = 2**20

PATTERNS: Mapping[str, tuple[float, float, int, float]] = {
    "sequential_shard": (540e6, 2.2, MIB, 1.7e-3),
    "random_record": (210e6, 3.5, 96 * 1024, 2.6e-3),
    "file_per_sample": (95e6, 4.0, 96 * 1024, 1.1e-3),
}
"""Most bytes/s of all clients, cold; clients that get half of it; request; seconds of a read."""


def make_results(
    seed: int = 0,
    *,
    noise: float = 0.03,
    repeats: int = 5,
    speed: Mapping[str, float] | None = None,
    clients: Sequence[int] = (1, 2, 4, 8),
) -> Results:
    """Fabricate a run.

    Args:
        seed: Of the noise.
        noise: Relative standard deviation over repeats.
        repeats: Of a phase.
        speed: Factors by pattern; a planted regression is 0.9.
        clients: Of the scaling.
    """
    rng = np.random.default_rng(seed)
    phases, scalings = [], []
    for pattern, (most, half, request, read_s) in PATTERNS.items():
        factor = (speed or {}).get(pattern, 1.0)
        for wanted, times in (("cold", 1.0), ("warm", 11.0)):
            line = [
                _phase(rng, pattern, wanted, n, times * factor * most * n / (n + half), request,
                       read_s / times * (1 + n / 8), noise, repeats)
                for n in clients
            ]  # fmt: skip
            phases += line
            scalings.append(_scaling(line, half, rng))
        local = _phase(rng, pattern, "cold", 4, 5.2 * most, request, read_s / 9, noise, repeats)
        phases.append(replace(local, tier="local"))
    phases.append(_storm(rng, noise, repeats))
    return Results(
        environment=ENVIRONMENT, site=SITE, local=LOCAL, phases=phases, scalings=scalings,
        links=_links(rng, noise), end_to_end=_end_to_end(rng, noise),
        problems=("metadata storm on 4 nodes left out: no time left",), complete=False,
    )  # fmt: skip


def _phase(rng, pattern, wanted, clients, rate, request, read_s, noise, repeats):
    names = ["open", "stat", "read", "close"] if pattern == "file_per_sample" else ["read"]
    scales = {"open": 0.9, "stat": 0.35, "read": 1.0, "close": 0.02}
    return Phase(
        pattern=pattern, tier="shared", clients=clients, nodes=min(clients, 4), threads=2,
        wanted=wanted, request_bytes=request, direct=False,
        repeats=[_repeat(rng, wanted, clients, rate, noise) for _ in range(repeats)],
        operations=[
            _of_repeats(name, scales[name] * read_s, rng, noise, repeats) for name in names
        ],
    )  # fmt: skip


def _repeat(rng, wanted, clients, rate, noise):
    rate *= np.exp(noise * rng.standard_normal())
    share = np.maximum(1 + 0.08 * rng.standard_normal(clients), 0.5)
    asked = np.full(clients, 64 * MIB)
    seconds = float(asked.sum() / rate)
    verdicts = {node: _verdict(wanted, node, rng) for node in NODES[: min(clients, 4)]}
    states = {one.state for one in verdicts.values()}
    listed = ", ".join(f"{node} {one.state}" for node, one in verdicts.items())
    whole = (
        verdicts["node0"]
        if len(states) == 1
        else CacheVerdict("unknown", f"nodes differ: {listed}")
    )
    moved = Moved(client_read_bytes=int(asked.sum()) if wanted == "cold" else 0)
    return Repeat(
        seconds=seconds, bytes_of_client=asked.tolist(),
        seconds_of_client=(seconds * share / share.max()).tolist(),
        verdict=whole, verdict_of_node=verdicts, moved=moved,
    )  # fmt: skip


def _verdict(wanted, node, rng):
    if wanted == "cold":
        return CacheVerdict(
            "cold",
            "nothing was in the page cache before; lustre client: "
            f"{rng.uniform(99.5, 101):.1f}% of what was asked for was "
            "fetched; another node wrote the files; the server's cache cannot be seen",
        )
    if node == "node3":
        return CacheVerdict(
            "unknown",
            "62.0% of the files was in the page cache before; lustre client: "
            "38.4% of what was asked for was fetched",
        )
    return CacheVerdict("warm", "100.0% of the files was in the page cache before")


def _shape():
    """Seconds of 4000 operations, about 1 each, and one in a hundred much slower."""
    rng = np.random.default_rng(7)
    took = np.exp(0.45 * rng.standard_normal(4000))
    took[:40] *= rng.uniform(4, 25, 40)
    return took


SHAPE = _shape()


@functools.cache
def _operation(name, p50_s):
    took = p50_s * SHAPE
    counts, edges = np.histogram(np.log10(took), bins=60, range=(-6.5, 0.5))
    p50, p90, p99, p999 = np.quantile(took, (0.5, 0.9, 0.99, 0.999)).tolist()
    return Operation(
        name=name, count=len(took), mean_s=float(took.mean()), p50_s=p50, p90_s=p90, p99_s=p99,
        p999_s=p999, max_s=float(took.max()), p50_of_repeat_s=[p50],
        edges_s=(10**edges).tolist(), counts=counts.tolist(),
    )  # fmt: skip


def _scaling(line, half, rng):
    rates = [float(np.median([repeat.bytes_per_s for repeat in phase.repeats])) for phase in line]
    readers = [phase.clients * phase.threads for phase in line]
    most = rates[-1] * (readers[-1] + 2 * half) / readers[-1]
    return Scaling(
        pattern=line[0].pattern, wanted=line[0].wanted, readers=readers, bytes_per_s=rates,
        fairness=rng.uniform(0.97, 1, len(line)).tolist(),
        knee=next(n for n, rate in zip(readers, rates, strict=True) if rate >= 0.9 * max(rates)),
        fitted_most_bytes_per_s=most, fitted_half=2 * half, fit_error_fraction=0.031,
    )  # fmt: skip


def _of_repeats(name, p50_s, rng, noise, repeats):
    one = _operation(name, p50_s)
    medians = one.p50_s * np.exp(noise * rng.standard_normal(repeats))
    return replace(one, p50_s=float(np.median(medians)), p50_of_repeat_s=medians.tolist())


def _storm(rng, noise, repeats):
    phase = _phase(rng, "metadata_storm", "cold", 4, 1.0, 0, 6e-4, 0.05, repeats)
    quiet = [replace(repeat, bytes_of_client=[0] * 4, seconds=2.0) for repeat in phase.repeats]
    names = ("stat", "list")
    return replace(
        phase, repeats=quiet, request_bytes=0,
        operations=[
            _of_repeats(name, 6e-4 * (1 + 4 * (name == "list")), rng, noise, repeats)
            for name in names
        ],
    )  # fmt: skip


def _links(rng, noise):
    found = []
    for a, first in enumerate(NODES):
        for second in NODES[a + 1 :]:
            slow = 0.6 if "node3" in (first, second) else 1.0
            rates = (1.18e9 * slow * np.exp(noise * rng.standard_normal(5))).tolist()
            found.append(
                MeasuredLink(
                    nodes=(first, second), bytes_per_s=float(np.median(rates)),
                    round_trip_s=float(rng.uniform(1.6e-5, 2.4e-5)), repeats=rates,
                )
            )  # fmt: skip
    return found


def _end_to_end(rng, noise, epochs=10, samples=51200):
    def way(name, epoch_s, *, first_s=None, staging_s=0.0, share=1.0, shared=0, network=0, **rest):
        took = epoch_s * np.exp(0.5 * noise * rng.standard_normal(epochs))
        took[0] = first_s or took[0]
        trained = int(samples * share)
        local = None if name in ("null", "dataloader") else int(epochs * trained * 98e3)
        return TrainingWay(
            name=name, staging_s=staging_s, epoch_s=took.tolist(),
            samples_of_epoch=[trained] * epochs,
            utilisation_fraction=min(20.2 * share / float(np.median(took[1:])), 1.0),
            moved_bytes={"shared": shared, "network": network, "local": local},
            staging_bytes=int(samples * 98e3) if staging_s else None, **rest,
        )  # fmt: skip

    whole = int(epochs * samples * 98e3)
    return EndToEnd(
        step_s=0.1, step_from="given", batch_size=64, num_samples=samples, sample_bytes=98e3,
        exchange_fraction=0.1, hidden_fraction=0.3,
        ways=[
            way("null", 20.2),
            way("dataloader", 47.0, first_s=52.0, shared=whole, predicted_epoch_s=45.1,
                prediction_error_fraction=0.04),
            way("staged", 20.9, first_s=23.0, staging_s=61.0, predicted_staging_s=57.0,
                predicted_epoch_s=20.4, prediction_error_fraction=0.024, paid_after=3,
                predicted_paid_after=3),
            way("exchange", 21.4, first_s=23.5, staging_s=62.0, network=int(0.1 * whole),
                predicted_staging_s=57.0, predicted_epoch_s=20.9, prediction_error_fraction=0.023,
                paid_after=3, predicted_paid_after=3),
            way("hiding", 15.4, first_s=22.0, staging_s=61.5, share=0.72,
                network=int(0.07 * whole), predicted_staging_s=57.0, predicted_epoch_s=14.9,
                prediction_error_fraction=0.032, paid_after=2, predicted_paid_after=2),
        ],
    )  # fmt: skip


SITE = Site(
    path="/scratch/project/imagenet", name="lustre", magic=0x0BD00BD0,
    mount=Mount(
        point="/scratch", fstype="lustre", source="10.0.0.1@o2ib:/scratch",
        server="10.0.0.1@o2ib", options=("rw", "flock", "lazystatfs"),
    ),
    total_bytes=1_200 * 10**12, free_bytes=310 * 10**12, free_files=2_100_000_000,
    block_bytes=4 * MIB, is_shared=True, client_cache="page cache",
    layout=StripeLayout(
        kind="lustre", said_by="lfs", stripe_count=4, stripe_bytes=MIB, num_osts=24,
        osts=(3, 9, 15, 21),
        components=(
            Component(start_bytes=0, end_bytes=65536, on_mdt=True, stripe_count=0,
                      stripe_bytes=MIB),
            Component(start_bytes=65536, end_bytes=None, on_mdt=False, stripe_count=4,
                      stripe_bytes=MIB, osts=(3, 9, 15, 21)),
        ),
        dom_bytes=65536,
    ),
    notes=("the first 65536 bytes of a file lie on the metadata server",),
)  # fmt: skip

LOCAL = Site(
    path="/local/scratch", name="xfs", magic=0x58465342,
    mount=Mount(
        point="/local", fstype="xfs", source="/dev/nvme0n1p1", server=None, options=("rw",)
    ),
    total_bytes=1_900 * 10**9, free_bytes=1_700 * 10**9, free_files=190_000_000,
    block_bytes=4096, is_shared=False, client_cache="page cache", layout=None, notes=(),
)  # fmt: skip

ENVIRONMENT: Mapping[str, object] = {
    "date": "2026-11-20T10:00:00+00:00", "commit": "0123456789ab", "cpu": "EPYC 7763", "cores": 64,
    "memory_bytes": 256 * 2**30, "kernel": "5.14.0", "python": "3.11.9",
    "versions": {"torch": "2.13.0", "numpy": "2.4.6"},
    "ranks": 8, "nodes": 4, "hosts": list(NODES), "launcher": "srun",
    "options": {"size": "64M", "repeats": 5},
}  # fmt: skip
