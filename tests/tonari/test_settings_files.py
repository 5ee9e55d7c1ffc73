"""Every settings file that ships, and every one in the docs, says the same as it did before."""

import json
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch

from dataio.base import toml
from dataio.base.seeding import digest
from tonari.ablate.study import TABLES as OF_STUDIES
from tonari.ablate.study import load_study
from tonari.trainer.config.config import SECTIONS, load_config
from tonari.trainer.run.build import make_importance, make_model

ROOT = Path(__file__).parents[2]
GOLDEN = ROOT / "tests" / "golden" / "settings.json"
BLOCK = re.compile(r"^```toml\n(.*?)^```", re.MULTILINE | re.DOTALL)


def settings_files() -> Iterator[tuple[str, str]]:
    """Yield the name and the text of each: files, and blocks of pages."""
    for path in (*sorted(ROOT.glob("examples/*.toml")), *sorted(ROOT.glob("tonari/init/*.toml"))):
        yield path.relative_to(ROOT).as_posix(), path.read_text()
    for page in (ROOT / "README.md", *sorted(ROOT.glob("docs/**/*.md"))):
        for number, block in enumerate(BLOCK.findall(page.read_text())):
            yield f"{page.relative_to(ROOT).as_posix()} {number}", block


def meaning(path: Path, text: str) -> dict[str, Any] | None:
    """Say what a file's policies and models are; None: it is of neither command."""
    tables = toml.loads(text)
    if set(tables) <= set(OF_STUDIES):
        return study_meaning(path, text, tables)
    return run_meaning(path, text, tables) if set(tables) <= set(SECTIONS) else None


def study_meaning(path: Path, text: str, tables: dict[str, Any]) -> dict[str, Any]:
    least = [] if "study" in tables else ["study.baseline=a"]
    if not {"config", "data"} & {*tables.get("study", {}), *tables.get("train", {})}:
        least += ["data.train=x", "data.test=x", "model.num_classes=10"]
    path.write_text(f"{text}\n[arms.a]\n" if "study" not in tables else text)
    return {
        arm.name: [repr(make_importance(config)), repr(config.shuffle.make()), arm.control]
        for arm in load_study(path, least).arms
        if not (config := arm.config(0)).importance.is_own
    }


def run_meaning(path: Path, text: str, tables: dict[str, Any]) -> dict[str, Any]:
    path.write_text(text)
    least = [] if "train" in tables.get("data", {}) else ["data.train=x"]
    if not {"num_classes", "kind"} & set(tables.get("model", {"kind": ""})):
        least.append("model.num_classes=10")
    config = load_config(path, least)
    policy = config.importance
    made = f"{policy.kind} {policy.args}" if policy.is_own else repr(make_importance(config))
    found = {"importance": made}
    if "shuffle" in tables:
        found["shuffle"] = repr(config.shuffle.make())
    if config.model.is_own or config.text.is_packed:
        found["model"] = f"{config.model.kind} {config.model.args} {config.model.settings}"
    else:
        with torch.device("meta"):
            model = make_model(config)
        shapes = {name: list(its.shape) for name, its in model.state_dict().items()}
        found["model"] = f"{type(model).__name__} {digest(repr((model, shapes)).encode())}"
    return found


def test_every_file_that_ships_and_every_one_of_the_docs_says_what_it_did(tmp_path: Path) -> None:
    found = {
        name: meant
        for name, text in settings_files()
        if (meant := meaning(tmp_path / "file.toml", text)) is not None
    }
    assert found == json.loads(GOLDEN.read_text())
