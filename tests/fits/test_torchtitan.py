"""torchtitan's dataloader of the example, built as its trainer builds it."""

from itertools import islice

import numpy as np
import pytest
import torch

from dataio import Array, Loader
from shuffle import Partial
from tonari.pack.shards import write_shards

SEQ_LEN, BATCH, ROWS = 8, 4, 48

pytestmark = pytest.mark.filterwarnings("default")


@pytest.fixture
def example():
    for name in ("torchtitan", "triton"):  # whose kernels torchtitan imports
        pytest.importorskip(name, reason=f"pip install {name}")
    from examples import torchtitan_loader

    return torchtitan_loader.TonariDataLoader


@pytest.fixture
def shards(tmp_path):
    rng = np.random.default_rng(0)
    rows = rng.integers(1000, size=(ROWS, SEQ_LEN + 1), dtype=np.int32)
    samples = ({"__key__": f"{i:04d}", "bin": row.tobytes()} for i, row in enumerate(rows))
    write_shards(samples, tmp_path / "tokens", shard_samples=ROWS // 2)
    return f"{tmp_path}/tokens/train-{{000000..000001}}.tar"


def build(example, shards, cache, seed=3):
    config = example.Config(dataset_path=shards, seed=seed, cache=str(cache))
    return config.build(
        dp_world_size=1, dp_rank=0, tokenizer=None, seq_len=SEQ_LEN, local_batch_size=BATCH
    )


def test_it_gives_the_batches_of_a_plain_loader_and_goes_on_amid_an_epoch(
    example, shards, tmp_path
):
    ours = build(example, shards, tmp_path / "one")
    per_epoch = ROWS // BATCH
    given = list(islice(iter(ours), per_epoch + 3))
    state = ours.state_dict()
    rest = list(islice(iter(ours), per_epoch))
    order = ours.loader.order_hash()
    ours.loader.close()

    fields = {"tokens": Array("bin", (SEQ_LEN + 1,), "int32")}
    with Loader(
        shards, batch_size=BATCH, drop_last=True, fields=fields, seed=3, cache=tmp_path / "two",
        shuffle=Partial(exchange=0.1),
    ) as plain:  # fmt: skip
        whole = [batch["tokens"].long() for _ in range(3) for batch in plain]
        assert plain.order_hash() == order
    for (inputs, labels), tokens in zip([*given, *rest], whole, strict=False):
        assert torch.equal(inputs["input"], tokens[:, :-1])
        assert torch.equal(labels, tokens[:, 1:])

    again = build(example, shards, tmp_path / "three")
    again.load_state_dict(state)
    gone_on = list(islice(iter(again), per_epoch))
    again.loader.close()
    assert all(torch.equal(a[1], b[1]) for a, b in zip(gone_on, rest, strict=True))


def test_another_parallelism_than_data_parallelism_is_refused(example, shards, tmp_path):
    config = example.Config(dataset_path=shards, cache=str(tmp_path / "cache"))
    with pytest.raises(ValueError, match="rank 0 of 1 is 0 of 2 in data parallelism"):
        config.build(dp_world_size=2, dp_rank=0, seq_len=SEQ_LEN, local_batch_size=BATCH)
