"""However many replicas share a step, and however they change: the same rows, step by step."""

import pytest

import shuffle
from dataio import Loader, Reports, Workers
from dataio.world import run_threads, thread_worlds
from importance import InfoBatch, Kakurenbo, RandomPrune, Weighted
from tests.cases import diagonal
from tests.dataio.loaders import loss_of
from tests.memory_source import FIELDS, MemorySource

NUM_SAMPLES = 211
EPOCHS = 4
ROWS_A_STEP = 24
KAKURENBO = Kakurenbo(0.4, drops=(), alphas=(1.0,))
POLICIES = {
    "none": None, "kakurenbo": KAKURENBO, "infobatch": InfoBatch(), "random": RandomPrune(),
    "weighted": Weighted([1.0 + 9 * (i % 7 == 0) for i in range(NUM_SAMPLES)]),
}  # fmt: skip


def train(root, layout, policy, importance, *, stop=None, at=None, save=None):
    """Train to the end or for some steps: the samples and weights of each, over all replicas."""
    batch_size = ROWS_A_STEP // sum(layout)

    def leg(world):
        seen = []
        with Loader(
            MemorySource(NUM_SAMPLES), batch_size=batch_size, fields=FIELDS, cache=root,
            shuffle=policy, importance=importance, world=world, workers=Workers(threads=0), seed=3,
            reports=Reports(progress=False),
        ) as loader:  # fmt: skip
            if at is not None:
                loader.restore(at)
            for epoch in loader.epochs(EPOCHS):
                for kind, batches in (("train", loader), ("refresh", loader.refresh())):
                    for batch in batches:
                        ids, weight = batch["sample_id"].tolist(), batch["weight"].tolist()
                        seen.append((epoch, kind, list(zip(ids, weight, strict=True))))
                        loader.report(batch, *loss_of(batch["sample_id"], epoch))
                        if len(seen) == stop:
                            loader.save(save)
                            return seen
        return seen

    everyone = run_threads(thread_worlds(list(layout)), leg)
    merged = []
    for steps in zip(*everyone, strict=True):
        rows = [row for _, _, rows in steps for row in rows if row[0] >= 0]
        merged.append((*steps[0][:2], sorted((i, round(w, 5)) for i, w in rows)))
    return merged


@diagonal(name=POLICIES, policy=[shuffle.Partial(0.3), shuffle.Global()])
def test_any_number_of_replicas_on_a_node_trains_the_same_rows_in_a_step(tmp_path, name, policy):
    one, two, four = (
        train(tmp_path / f"{width}", (width,), policy, POLICIES[name]) for width in (1, 2, 4)
    )
    assert one == two
    assert one == four


@pytest.mark.parametrize("name", POLICIES)
@pytest.mark.parametrize(
    ("policy", "layouts"),
    [
        (shuffle.Partial(0.3), ((2,), (1,), (4,), (3,), (2,))),
        (shuffle.Global(), ((2, 1), (1,), (1, 2, 1), (2,))),
        (shuffle.Local(), ((1, 1), (2, 2), (1, 1))),
    ],
)
def test_a_run_goes_on_step_by_step_under_other_replicas(tmp_path, name, policy, layouts):
    whole = train(tmp_path / "whole", layouts[0], policy, POLICIES[name])
    part, at = [], None
    for number, layout in enumerate(layouts):
        last = number + 1 == len(layouts)
        save = tmp_path / f"saved{number}"
        part += train(
            tmp_path / f"cache{number}", layout, policy, POLICIES[name],
            stop=None if last else 7, at=at, save=save,
        )  # fmt: skip
        at = save
    assert part == whole
