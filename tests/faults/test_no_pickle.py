"""A pickle in a dataset is bytes: nothing in cache, parcels or loader state ever unpickles."""

import ast
import contextlib
import json
import pickle  # noqa: TID251
import sys
from functools import partial
from pathlib import Path

import shuffle
from dataio import Bytes, Field, Int, Loader, Reports, Workers
from dataio.world import run_threads, thread_worlds
from importance import Kakurenbo
from tests.dataio.source.shards import write_tar

FIELDS: dict[str, Field] = {"evil": Bytes("pkl"), "number": Int("cls")}
SAMPLES = 24
WATCHED: list[list[str]] = []


@contextlib.contextmanager
def unpicklings():
    """Record what is unpickled within."""
    seen: list[str] = []
    if not hasattr(sys, "_tonari_pickle_hook"):
        sys.addaudithook(_hook)  # For ever: it only records while somebody watches.
        sys._tonari_pickle_hook = True  # type: ignore[attr-defined]
    WATCHED.append(seen)
    try:
        yield seen
    finally:
        WATCHED.remove(seen)


def _hook(event, args):
    if WATCHED and event == "pickle.find_class":
        for seen in WATCHED:
            seen.append(f"{args[0]}.{args[1]}")


class EvilTouch:
    """Touches a file when it is unpickled."""

    def __init__(self, path: Path) -> None:
        self.path = path

    def __reduce__(self):
        return Path.touch, (self.path,)


def test_the_trap_and_the_hook_work(tmp_path):
    with unpicklings() as seen:
        pickle.loads(pickle.dumps(EvilTouch(tmp_path / "touched")))
    assert (tmp_path / "touched").exists()
    # Python 3.13 keeps Path in pathlib._local; older ones may fetch the method by getattr.
    assert any(name.endswith(".Path.touch") for name in seen) or "builtins.getattr" in seen


def run(world, *, root, source, restore):
    """Train two epochs and save in the middle, or restore and train the rest."""
    found = {}
    policy = Kakurenbo(0.3, drops=(), alphas=(1.0,), warmup_epochs=0)
    with Loader(
        source, batch_size=4, fields=FIELDS, cache=root / "cache", world=world,
        workers=Workers(threads=1),
        shuffle=shuffle.Partial(0.5), importance=policy, reports=Reports(progress=False),
    ) as loader:  # fmt: skip
        if restore:
            loader.restore(root / "saved")
        for epoch in loader.epochs(3 if restore else 2):
            for batch in loader:
                loader.report(batch, batch["number"].float(), batch["number"] >= 0)
                for slot, number, data in zip(
                    batch["slot"].tolist(), batch["number"].tolist(), batch["evil"], strict=True
                ):
                    if slot >= 0:
                        found[number] = bytes(data)
            if epoch == 1 and not restore:
                loader.save(root / "saved")
                state = loader.state_dict()
                assert json.loads(json.dumps(state)) == state
        return found, loader.stats()["exchanged_rows"]


def test_a_malicious_pickle_is_bytes_everywhere_and_never_runs(tmp_path):
    touched = tmp_path / "touched"
    evil = pickle.dumps(EvilTouch(touched))
    content = {number: evil + b"%d" % number for number in range(SAMPLES)}
    members = [
        member
        for number, data in content.items()
        for member in ((f"{number:03d}.pkl", data), (f"{number:03d}.cls", b"%d" % number))
    ]
    source = str(write_tar(tmp_path / "evil.tar", members))
    with unpicklings() as seen:
        for restore in (False, True):
            work = partial(run, root=tmp_path, source=source, restore=restore)
            ranks = run_threads(thread_worlds([1, 1]), work)
            found = {number: data for rows, _ in ranks for number, data in rows.items()}
            assert all(content[number] == data for number, data in found.items())
            assert restore or len(found) == SAMPLES
            assert sum(rows for _, rows in ranks) > 0, "parcels travelled"
    assert seen == []
    assert not touched.exists()


UNPICKLING = {"pickle", "cPickle", "_pickle", "dill", "cloudpickle", "joblib", "marshal", "shelve"}


def unpicklers(code: str) -> set[str]:
    """Name what a module imports or calls that can unpickle."""
    found = set()
    for node in ast.walk(ast.parse(code)):
        if isinstance(node, ast.Import):
            found |= {alias.name.split(".")[0] for alias in node.names} & UNPICKLING
        elif isinstance(node, ast.ImportFrom):
            found |= {(node.module or "").split(".")[0]} & UNPICKLING
        elif isinstance(node, ast.keyword) and node.arg == "allow_pickle":
            found |= set() if ast.unparse(node.value) == "False" else {"allow_pickle"}
        elif isinstance(node, ast.Attribute) and ast.unparse(node) == "torch.load":
            found.add("torch.load")
    return found


def test_no_module_of_the_data_layer_can_unpickle():
    root = Path(__file__).parents[2]
    modules = [
        path
        for name in ("dataio", "shuffle", "importance")
        for path in root.glob(f"{name}/**/*.py")
    ]
    assert len(modules) > 50
    found = {str(path.relative_to(root)): unpicklers(path.read_text()) for path in modules}
    # A feeder alone reads the transform, of who has proved to know its secret
    assert {path: names for path, names in found.items() if names} == {
        "dataio/batch/feeders/serve.py": {"pickle"}
    }
    for bad in ("import pickle", "from dill import loads", "np.load(f, allow_pickle=True)"):
        assert unpicklers(bad)
    assert unpicklers("torch.load(f)") == {"torch.load"}
