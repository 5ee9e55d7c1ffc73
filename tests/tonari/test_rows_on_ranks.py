"""What `tonari rows` lists of a run on several ranks is the order that the ranks hashed."""

import hashlib
from pathlib import Path

import numpy as np
import pyarrow.compute as pc
import pytest

from dataio.base.lines import read_checked_lines
from dataio.base.seeding import digest
from tests.multirank import launch_command, run_job
from tests.trainer.digits import write_config
from tonari import rows


@pytest.mark.thorough
@pytest.mark.multirank
def test_rows_are_in_the_order_that_the_ranks_had(tmp_path: Path) -> None:
    config, directory = write_config(tmp_path), tmp_path / "run"
    for num_ranks, epochs, *more in ((4, 1, "mesh.pp=2"), (3, 3)):
        ended = run_job(
            [
                *launch_command("mpiexec", num_ranks),
                "-m", "tonari", "train", str(config), f"run.directory={directory}",
                f"run.epochs={epochs}", "importance.kind=random", "importance.fraction=0.25",
                "data.batch_size=6", "data.image_size=16", "model.image_size=16", *map(str, more),
            ],
            env=None, timeout_s=200,
        )  # fmt: skip
        assert ended[0] == 0, ended[1]
    run = rows.open(directory)
    lines = [*read_checked_lines(directory / "metrics.jsonl")]
    hashes = [line["order_hash"] for line in lines if line["kind"] == "epoch"]
    assert len(hashes) == 3
    for epoch, expected in enumerate(hashes):
        table = run.at(epoch=epoch)
        table = table.sort_by([("step", "ascending"), ("position", "ascending")])
        replicas = range(2 if epoch == 0 else 3)
        each = [
            table.filter(pc.equal(table["replica"], replica))["sample_id"].to_numpy()
            for replica in replicas
        ]
        answered = [digest(ids.astype(np.int64).tobytes()).encode() for ids in each]
        assert hashlib.blake2b(b" ".join(answered), digest_size=8).hexdigest() == expected
    assert run.is_whole
    last = max(line["step"] for line in lines)
    assert run.num_steps == last
