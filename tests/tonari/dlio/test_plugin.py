"""The class that DLIO makes, called as DLIO calls it; and DLIO itself, where it is installed."""

import enum
import importlib.util
import json
import shutil
import subprocess
import sys
from types import ModuleType, SimpleNamespace

import numpy as np
import pytest

NUM_FILES, BATCH = 12, 2


class DatasetType(enum.Enum):
    TRAIN = "train"
    VALID = "valid"


class BaseDataLoader:
    """What DLIO's class of that name does, as far as ours uses it."""

    args: SimpleNamespace

    def __init__(self, format_type, dataset_type, epoch_number, data_loader_type):
        self._args = self.args
        self.format_type, self.dataset_type = format_type, dataset_type
        self.batch_size = BATCH


@pytest.fixture
def plugin(monkeypatch, tmp_path):
    """Our module on stand-ins for the three of DLIO that it imports."""
    slept: list[object] = []
    stands_for: dict[str, dict[str, object]] = {
        "common.enumerations": {
            "DatasetType": DatasetType, "DataLoaderType": SimpleNamespace(PYTORCH="pytorch")
        },
        "data_loader.base_data_loader": {"BaseDataLoader": BaseDataLoader},
        "utils.utility": {"sleep": slept.append},
    }  # fmt: skip
    for name, members in stands_for.items():
        module = ModuleType(f"dlio_benchmark.{name}")
        vars(module).update(members)
        monkeypatch.setitem(sys.modules, module.__name__, module)
    monkeypatch.delitem(sys.modules, "tonari.dlio.plugin", raising=False)
    monkeypatch.setenv("TONARI_CACHE", str(tmp_path / "cache"))
    files = [tmp_path / f"img_{i:02d}_of_{NUM_FILES}.npz" for i in range(NUM_FILES)]
    for number, path in enumerate(files):
        np.savez(path, x=np.full((4 + number, 5, 1), number, np.uint8), y=[0])
    BaseDataLoader.args = SimpleNamespace(
        file_list_train=[*map(str, files)], file_list_eval=[*map(str, files[:4])],
        num_samples_per_file=1, seed=3, read_threads=2, prefetch_size=0, my_rank=0,
        output_folder=str(tmp_path), epochs=3, eval_after_epoch=1, epochs_between_evals=2,
        preprocess_time=0.25, resized_image=np.full((3, 3), 7, np.uint8),
    )  # fmt: skip
    module = importlib.import_module("tonari.dlio.plugin")
    yield module, slept, tmp_path
    sys.modules.pop("tonari.dlio.plugin", None)


def test_each_epoch_delivers_every_file_as_dlio_would_in_another_order(plugin):
    module, slept, work = plugin
    loader = module.TonariDataLoader("npz", DatasetType.TRAIN, 1)
    loader.read()
    for epoch in range(3):
        batches = list(loader.next())
        assert [tuple(batch.shape) for batch in batches] == [(BATCH, 3, 3)] * (NUM_FILES // BATCH)
        assert all((batch == 7).all() for batch in batches)
        assert set(slept) == {0.25}
        assert len(slept) >= NUM_FILES * (epoch + 1)
        assert not list(work.glob("*_tonari_*.json"))[: epoch != 2]
        loader.finalize()
    report = json.loads((work / "0_tonari_train.json").read_text())
    assert len(set(report["order_hashes"])) == 3
    assert report["batches"] == 3 * NUM_FILES // BATCH
    assert 0 < report["staging_s"] <= report["opening_s"]


def test_an_epoch_left_early_is_followed_by_the_next(plugin):
    module, _, work = plugin
    loader = module.TonariDataLoader("npz", DatasetType.TRAIN, 1)
    loader.read()
    for _ in range(3):
        next(loader.next())
        loader.finalize()
    report = json.loads((work / "0_tonari_train.json").read_text())
    assert len(set(report["order_hashes"])) == 3


def test_evaluations_are_as_many_as_dlio_makes(plugin):
    module, _, work = plugin
    loader = module.TonariDataLoader("npz", DatasetType.VALID, 1)
    loader.read()
    for _ in (1, 3):
        assert not list(work.glob("*_tonari_valid.json"))
        assert len(list(loader.next())) == 2
        loader.finalize()
    assert list(work.glob("*_tonari_valid.json"))


@pytest.mark.slow
@pytest.mark.skipif(
    not importlib.util.find_spec("dlio_benchmark"), reason="DLIO is not installed: docs/dlio.md"
)
def test_dlio_runs_its_own_workload_with_our_loader(tmp_path, monkeypatch):
    monkeypatch.setenv("TONARI_CACHE", str(tmp_path / "cache"))
    command = [
        shutil.which("dlio_benchmark") or f"{sys.prefix}/bin/dlio_benchmark",
        "workload=unet3d_h100", f"++workload.dataset.data_folder={tmp_path}/data",
        "++workload.dataset.num_files_train=14", "++workload.dataset.record_length_bytes=20000",
        "++workload.dataset.record_length_bytes_stdev=5000",
        "++workload.dataset.record_length_bytes_resize=2000",
        "++workload.workflow.checkpoint=False", "++workload.train.epochs=2",
        "++workload.train.computation_time=0.01",
        f"hydra.run.dir={tmp_path}/out",
    ]  # fmt: skip
    generate = ["++workload.workflow.generate_data=True", "++workload.workflow.train=False"]
    ours = [
        "++workload.reader.data_loader_classname=tonari.dlio.plugin.TonariDataLoader",
        "++workload.reader.data_loader_sampler=index",
    ]
    for flags in (generate, ours):
        run = [sys.executable, *command, *flags]
        subprocess.run(run, check=True, timeout=120, capture_output=True)
    assert json.loads((tmp_path / "out/summary.json").read_text())["epochs"] == 2
    assert json.loads((tmp_path / "out/0_tonari_train.json").read_text())["rows"] == 28
