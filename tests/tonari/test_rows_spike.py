"""Rows that spoil a run are found by the steps at which its loss rose, and left out from there."""

from pathlib import Path

import numpy as np
import torch

import shuffle
from dataio import Array, Loader, NumpySource, Reports, Workers
from dataio.world import run_threads, thread_worlds
from tonari import rows

NUM_SAMPLES, NUM_POISONED, BATCH, EPOCHS = 600, 5, 6, 4
RANKS = 2


def make_data() -> tuple[dict[str, np.ndarray], set[int]]:
    """Points of a plane, some of them far off it: the inputs and targets, and those far off."""
    rng = np.random.default_rng(0)
    x = rng.normal(size=(NUM_SAMPLES, 4)).astype(np.float32)
    y = x.sum(axis=1, keepdims=True)
    poisoned = rng.permutation(NUM_SAMPLES)[:NUM_POISONED]
    y[poisoned] += 1000
    return {"x": x, "y": y.astype(np.float32)}, set(poisoned.tolist())


def run(root: Path, data, *, save_at=None, restore=None, exclude=None):
    """Train on two ranks; return weights, and the loss of each step, by (epoch, step)."""

    def on_rank(world):
        weight = torch.zeros(4, 1)
        losses = {}
        with Loader(
            NumpySource(data, name="plane"), batch_size=BATCH, cache=root / "cache", world=world,
            fields={"x": Array("x", (4,), "float32"), "y": Array("y", (1,), "float32")},
            shuffle=shuffle.Partial(0.2), exclude=exclude, workers=Workers(threads=0), seed=5,
            reports=Reports(progress=False, rows=root / "rows"),
        ) as loader:  # fmt: skip
            if restore is not None:
                loader.restore(restore / "loader")
                weight = torch.load(restore / f"weight{world.rank}.pt", weights_only=True)
            for epoch in loader.epochs(EPOCHS):
                for batch in loader:
                    step = (epoch, loader._run.position.num_steps - 1)
                    error = batch["x"] @ weight - batch["y"]
                    mine = (error.squeeze(1) ** 2 * batch["weight"]).mean()
                    gradient = 2 * batch["x"].T @ (error * batch["weight"][:, None]) / BATCH
                    both = np.stack([mine.numpy()[None], *gradient.numpy()])
                    both = world.allreduce(both, op="sum", doing="average") / RANKS
                    losses[step] = float(both[0, 0])
                    weight = weight - 0.001 * torch.from_numpy(both[1:])
                    if step == save_at:
                        (root / "saved").mkdir(exist_ok=True)
                        loader.save(root / "saved" / "loader")
                        torch.save(weight, root / "saved" / f"weight{world.rank}.pt")
        return weight, losses

    return run_threads(thread_worlds([1] * RANKS, timeout_s=60), on_rank)[0]


def test_what_spoils_a_run_is_found_by_its_losses_and_left_out_from_there_on(tmp_path) -> None:
    data, poisoned = make_data()
    _, losses = run(tmp_path / "a", data, save_at=(1, 9))
    median = float(np.median([*losses.values()]))
    found: set[int] | None = None
    answered = rows.open(tmp_path / "a" / "rows")
    for epoch in range(EPOCHS):
        spikes = [step for (e, step), loss in losses.items() if e == epoch and loss > 100 * median]
        tables = [answered.at(epoch=epoch, steps=step) for step in spikes]
        seen = {i for table in tables for i in table["sample_id"].to_pylist()}
        found = seen if found is None else found & seen
    assert found == poisoned
    after = run(tmp_path / "a", data, restore=tmp_path / "a" / "saved", exclude=sorted(found))
    # The same as of a run that had left them out from that step on
    run(tmp_path / "b", data, save_at=(1, 9))
    other = run(tmp_path / "b", data, restore=tmp_path / "b" / "saved", exclude=sorted(poisoned))
    assert after[1] == other[1]
    assert torch.equal(after[0], other[0])
    assert max(after[1].values()) < 100 * median
    again = rows.open(tmp_path / "a" / "rows").of(sample_id=poisoned)
    last = [(r["epoch"], r["what"]) for r in again.to_pylist() if r["kept"] and r["epoch"] == 3]
    assert last == [(3, "excluded")] * NUM_POISONED
