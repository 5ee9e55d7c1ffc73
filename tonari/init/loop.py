"""A loop of your own: `python loop.py`, `mpiexec -n 4 python loop.py`, srun or torchrun."""

import torch
from torch.nn.functional import cross_entropy
from torch.nn.parallel import DistributedDataParallel

import dataio
import shuffle

TRAIN = "shards/train-*.tar"
FIELDS: dict[str, dataio.Field] = {
    "image": dataio.Image("jpg", crop=dataio.RandomResizedCrop(32), flip=0.5),
    "label": dataio.Int("cls"),
}
NUM_CLASSES, BATCH_SIZE, NUM_EPOCHS, SAVED = 10, 64, 10, "saved"


def make_model() -> torch.nn.Module:
    """Make the model: put yours here."""
    return torch.nn.Sequential(
        torch.nn.Conv2d(3, 32, 3, stride=2), torch.nn.ReLU(),
        torch.nn.Conv2d(32, 64, 3, stride=2), torch.nn.ReLU(),
        torch.nn.AdaptiveAvgPool2d(4), torch.nn.Flatten(), torch.nn.Linear(1024, NUM_CLASSES),
    )  # fmt: skip


def main() -> None:
    """Train on all ranks of the job."""
    with (
        dataio.join() as job,
        dataio.Loader(
            TRAIN, fields=FIELDS, batch_size=BATCH_SIZE, device=job.device, seed=0,
            shuffle=shuffle.Partial(exchange=0.1), drop_last=True,
        ) as loader,
    ):  # fmt: skip
        torch.manual_seed(0)
        model = DistributedDataParallel(make_model().to(job.device))
        optimizer = torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9)
        for epoch in loader.epochs(NUM_EPOCHS):
            total = 0.0
            for batch in loader:
                loss = cross_entropy(model(batch["image"].float() / 255), batch["label"])
                loss.backward()  # type: ignore[no-untyped-call]
                optimizer.step()
                optimizer.zero_grad()
                total += loss.item() / len(loader)
            loader.save(SAVED)  # loader.restore(SAVED) goes on from here; save the model beside it
            if job.world.rank == 0:
                print(f"epoch {epoch}: loss {total:.4f}", flush=True)


if __name__ == "__main__":
    main()
