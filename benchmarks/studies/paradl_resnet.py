r"""Do ParaDL's equations give its authors' own curve of ResNet-50, and how far is that from a run?

From the inputs that the authors published for data parallelism on ABCI (64 rows on each V100):
seconds a row as profiled on one GPU, bytes of the weights, latency and bandwidth of neighbours.
`oracle.paradl.price` makes the step of 2 to 1,024 GPUs from these; beside it stand the authors'
projection, and the step that their training logs hold.

    python -m benchmarks.studies.paradl_resnet

Sources: github.com/TruongThaoNguyen/paraDL-analysis at ce36803: model/RESNET50_ImageNet_profall.
net_sc (seconds), log/data_resnet_scaling_proj.log (weights, latencies, bandwidths, projection);
github.com/ankahira/paraDL at cc23ef0: data/results/resnet (logs). Kahira et al., HPDC 2021, leave
reading data out of what they compare; these logs hold it, and more GPUs read from one filesystem.
"""

from dataclasses import dataclass

from tonari.oracle.paradl import Link, price
from tonari.oracle.record import Message

ROWS = 64
"""Of a batch, on each GPU."""
ROW_S = 0.003119502
"""Forward and backward, on one GPU."""
WEIGHT_BYTES = 4 * 22_734_016
DATASET_ROWS = 1_280_000


@dataclass(frozen=True)
class ParaDLRow:
    """A number of GPUs.

    Attributes:
        gpus: How many.
        link: Between neighbours of the ring.
        projected_epoch_s: By the authors.
        logged_s: Of a step: the median of the epochs behind the first; None: no whole log.
    """

    gpus: int
    link: Link
    projected_epoch_s: float
    logged_s: float | None

    @property
    def projected_s(self) -> float:
        """Of a step, by the authors, who count whole steps of an epoch."""
        return self.projected_epoch_s / -(-DATASET_ROWS // (ROWS * self.gpus))


IN_NODE, IN_LEAF = Link(9e-6, 2e-11), Link(3.031e-5, 8e-11)
IN_RACK, BETWEEN_RACKS = Link(3.049e-5, 8e-11), Link(3.098e-5, 8e-11)
ROWS_OF_TABLE = (
    ParaDLRow(2, IN_NODE, 2014.8484928, 0.1898),
    ParaDLRow(4, IN_NODE, 1012.1510496, 0.1902),
    ParaDLRow(8, IN_LEAF, 532.0087924, 0.2092),
    ParaDLRow(16, IN_LEAF, 267.747297, 0.2046),
    ParaDLRow(32, IN_LEAF, 134.7640237, 0.2480),
    ParaDLRow(64, IN_LEAF, 68.068326395, 0.2580),
    ParaDLRow(128, IN_RACK, 34.6773679451, 0.4035),
    ParaDLRow(256, BETWEEN_RACKS, 17.9906360808, 0.6626),
    ParaDLRow(512, BETWEEN_RACKS, 9.6460715088, None),
    ParaDLRow(1024, BETWEEN_RACKS, 5.4577903296, 0.2362),
)


def step_s(row: ParaDLRow) -> float:
    """Price a step by the equations."""
    gradients = Message("all_reduce", tuple(range(row.gpus)), WEIGHT_BYTES)
    return price(
        [gradients], computation_s=ROWS * ROW_S, sizes=(1, row.gpus, 1, 1, 1), microbatches=1,
        link_of=lambda _: row.link,
    ).step_s  # fmt: skip


def main() -> None:
    """Print a line for each number of GPUs."""
    for row in ROWS_OF_TABLE:
        found = step_s(row)
        logged = f"{row.logged_s:.4f} s ({found / row.logged_s - 1:+.1%})" if row.logged_s else "-"
        print(
            f"{row.gpus:5} GPUs: {found:.4f} s, the authors' projection {row.projected_s:.4f} s "
            f"({found / row.projected_s - 1:+.1%}), their log {logged}"
        )


if __name__ == "__main__":
    main()
