"""Whether stages made weight by weight are those cut from a model in memory; a report a case.

Arguments: report directory, cases as JSON: lists of kind, schedule, sizes of the mesh.
"""

import json
import sys
from collections.abc import Callable
from pathlib import Path

from dataio.job.launch import join
from tests.trainer.mesh.same_weights import same_weights
from tonari.trainer.mesh.mesh import make_mesh
from tonari.trainer.mesh.parallelize import parallelize
from tonari.trainer.mesh.place import place_of
from tonari.trainer.models import GPT, Llama, ResNet, SmallCNN, StagedModel, ViT, deferred, seeded
from tonari.trainer.models.resnet50 import ResNet50

MAKERS: dict[str, Callable[[], StagedModel]] = {
    "cnn": lambda: SmallCNN(4, 3, 16),
    "resnet": lambda: ResNet(4, depth=20, norm="batch", image_size=16),
    "resnet50": lambda: ResNet50(4, image_size=32),
    "vit": lambda: ViT(4, image_size=16, width=16, depth=5, heads=4),
    "gpt": lambda: GPT(12, 8, width=16, depth=5, heads=4),
    "llama": lambda: Llama(12, 8, width=16, depth=5, heads=4, kv_heads=2, inner_width=24),
    "tied llama": lambda: Llama(
        12, 8, width=16, depth=5, heads=4, kv_heads=2, inner_width=24, tied=True
    ),
}


def main() -> None:
    directory, cases = Path(sys.argv[1]), json.loads(sys.argv[2])
    with join(device="cpu") as job:
        same = []
        for kind, schedule, sizes in cases:
            place = place_of(job.world.rank, sizes, schedule=schedule, virtual=2)
            mesh = make_mesh(tuple(sizes), device_type="cpu")
            made, built = deferred(MAKERS[kind], seed=5), seeded(MAKERS[kind], seed=5)
            recorded = made.recording is not None
            same.append(
                recorded
                and same_weights(parallelize(made, mesh, place), parallelize(built, mesh, place))
            )
    (directory / f"{job.world.rank}.json").write_text(json.dumps({"same": same}))


if __name__ == "__main__":
    main()
