"""Ray Train fed by Tonari: each worker makes its loader in Ray's process group.

    pip install 'ray[train]'
    python examples/blobs.py blobs
    python examples/ray_train.py blobs --workers 2
    python examples/ray_train.py blobs --workers 2 --resume runs/ray/epoch-2 --epochs 5

The shards and the directory of saves are seen by all nodes.
"""

import argparse
from pathlib import Path
from typing import Any

import ray.train
import torch
from ray.train import ScalingConfig
from ray.train.torch import TorchConfig, TorchTrainer, get_device, prepare_model
from torch import nn
from torch.nn.functional import cross_entropy

import dataio
import importance
import shuffle


def make_loader(shards: Path, **options: Any) -> dataio.Loader:
    return dataio.Loader(
        f"{shards}/train-{{000000..000001}}.tar", batch_size=16, seed=0,
        fields={"point": dataio.Array("bin", (8,), "float32"), "label": dataio.Int("cls")},
        shuffle=shuffle.Partial(exchange=0.1), importance=importance.Kakurenbo(0.3), **options,
    )  # fmt: skip


def train(given: dict[str, Any]) -> None:
    """Train on one worker; Ray calls it on all."""
    torch.manual_seed(0)
    model = prepare_model(nn.Sequential(nn.Linear(8, 32), nn.ReLU(), nn.Linear(32, 3)))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    saved, resume = Path(given["saved"]), given["resume"]
    with make_loader(given["shards"], device=get_device()) as loader:
        if resume:
            state = torch.load(f"{resume}/model.pt", weights_only=True)
            model.load_state_dict(state["model"])
            optimizer.load_state_dict(state["optimizer"])
            loader.restore(f"{resume}/loader")
        for epoch in loader.epochs(given["epochs"]):
            for group in optimizer.param_groups:
                group["lr"] = 0.1 * loader.lr_factor
            order = loader.order_hash()
            for batch in loader:
                measure(model, loader, batch).mean().backward()  # type: ignore[no-untyped-call]
                optimizer.step()
                optimizer.zero_grad()
            with torch.no_grad():
                for batch in loader.refresh():
                    measure(model, loader, batch)
            path = saved / f"epoch-{epoch + 1}"
            loader.save(path / "loader")
            orders = loader.world.allgather(order.encode(), doing="show the orders")
            words = b" ".join(orders).decode()
            if loader.world.rank == 0:
                print(f"epoch {epoch}: {len(loader)} steps, orders {words}", flush=True)
                state = {"model": model.state_dict(), "optimizer": optimizer.state_dict()}
                torch.save(state | {"orders": words}, path / "model.pt")
            # The path instead of a checkpoint: Ray need not copy what all nodes see.
            ray.train.report({"epoch": epoch, "steps": len(loader), "saved": str(path)})


def measure(model: nn.Module, loader: dataio.Loader, batch: dict[str, Any]) -> torch.Tensor:
    logits = model(batch["point"])
    loss = cross_entropy(logits, batch["label"], reduction="none")
    loader.report(batch, loss, *importance.outcome(logits, batch["label"]))
    weighted: torch.Tensor = loss * batch.get("weight", torch.ones_like(loss))
    return weighted


def fit(shards: Path, saved: Path, *, workers: int, epochs: int, resume: str = "") -> Any:
    """Start the workers, and return what Ray does."""
    trainer = TorchTrainer(
        train,
        train_loop_config={
            "shards": str(shards.absolute()), "saved": str(saved.absolute()), "epochs": epochs,
            "resume": resume and str(Path(resume).absolute()),
        },
        scaling_config=ScalingConfig(num_workers=workers, use_gpu=torch.cuda.is_available()),
        torch_config=TorchConfig(backend="gloo"),
        run_config=ray.train.RunConfig(storage_path=str((saved / "results").absolute())),
    )  # fmt: skip
    return trainer.fit()


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("shards", type=Path, help="what examples/blobs.py wrote")
    parser.add_argument("--saved", type=Path, default=Path("runs/ray"), help="seen by all nodes")
    parser.add_argument("--workers", type=int, default=2)
    parser.add_argument("--epochs", type=int, default=3)
    parser.add_argument("--resume", default="", help="directory to go on from")
    given = parser.parse_args()
    fit(given.shards, given.saved, workers=given.workers, epochs=given.epochs, resume=given.resume)


if __name__ == "__main__":
    main()
