"""Transformers loads what `tonari export --hub` writes of a llama: the same weights and logits."""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from dataio.base.atomic import read_record, write_record
from dataio.source.text.tokenizer import open_tokenizer
from tests import hub
from tests.multirank import RunRanks
from tests.tokenizers_made import make_tokenizer
from tonari.cli import main
from tonari.trainer.checkpoint.export import read_checkpoint, read_tensors, stored_tensors
from tonari.trainer.config.config import load_config
from tonari.trainer.config.saved import read_settings
from tonari.trainer.models import Rope
from tonari.trainer.run.build import make_model
from tonari.trainer.run.loop import train

transformers = hub.import_or_skip()

TOML = """
[data]
kind = "text"
train = "{root}/text"
test_fraction = 0.2
sequence_length = 16
batch_size = 4
workers.threads = 0
[shuffle]
exchange = 0.1
[model]
kind = "llama"
width = 16
depth = 2
heads = 4
kv_heads = 2
[optimizer]
kind = "adamw"
lr = 0.02
[run]
epochs = 1
directory = "{root}/run"
device = "cpu"
"""
ROPE = "model.rope={theta = 500.0, factor = 4.0, original_length = 8}"
Run = Callable[..., Path]


@pytest.fixture
def settings(tmp_path: Path) -> Path:
    (tmp_path / "text").write_text(60 * "the cat sat. ")
    path = tmp_path / "run.toml"
    path.write_text(TOML.format(root=tmp_path))
    return path


def check(settings: Path, *overrides: str, files: int) -> None:
    """Export the run, load the directory, and compare weights and logits, bit for bit."""
    run, out = settings.parent / "run", settings.parent / "hub"
    size = () if files == 1 else ("--max-file-bytes", "8000")
    assert main(["export", str(run), "--out", str(out), "--hub", *size]) == 0
    assert len(list(out.glob("*.safetensors"))) == files
    loaded, info = transformers.LlamaForCausalLM.from_pretrained(out, output_loading_info=True)
    assert not info["missing_keys"]
    assert not info["unexpected_keys"]
    model: Any = make_model(load_config(settings, overrides))
    (checkpoint,) = (run / "checkpoints").glob("step-*")
    weights: Any = read_checkpoint(checkpoint)["model"]
    model.load_state_dict(weights)
    theirs, form = loaded.state_dict(), model.hub_format()
    names = [name for name in weights if name not in form.aliases]
    for name in names:
        assert torch.equal(theirs[form.stored(name).name], weights[name]), name
    assert len(names) == sum(1 for _ in loaded.parameters())
    tokens = torch.arange(32).view(2, 16)
    with torch.no_grad():
        assert torch.equal(loaded(tokens).logits, model(tokens))


@pytest.mark.parametrize(("overrides", "files"), [((), 1), ((ROPE,), 8), (("model.tied=true",), 1)])
def test_transformers_loads_what_export_writes(
    settings: Path, overrides: tuple[str, ...], files: int
) -> None:
    train(load_config(settings, overrides))
    check(settings, *overrides, files=files)


@pytest.mark.multirank
def test_so_it_does_of_a_run_on_a_mesh(settings: Path, run_ranks: RunRanks) -> None:
    overrides = ("mesh.pp=2", "mesh.tp=2")
    run_ranks("trainer/meshes", 4, "|".join([str(settings), *overrides]), timeout_s=200)
    check(settings, files=1)


@pytest.mark.parametrize(
    "mesh",
    [
        (),
        pytest.param(
            ("mesh.pp=2", "mesh.dp_shard=2"), marks=[pytest.mark.multirank, pytest.mark.nightly]
        ),
    ],
)
def test_averaged_weights_are_exported_by_every_name(
    settings: Path, tmp_path: Path, run_ranks: RunRanks, mesh: tuple[str, ...]
) -> None:
    overrides = ("optimizer.ema=0.5", "model.tied=true", *mesh)
    if mesh:
        run_ranks("trainer/meshes", 4, "|".join([str(settings), *overrides]), timeout_s=200)
    else:
        train(load_config(settings, overrides))
    run, plain, out = tmp_path / "run", tmp_path / "plain.pt", tmp_path / "hub"
    assert main(["export", str(run), "--out", str(plain), "--ema"]) == 0
    assert main(["export", str(run), "--out", str(out), "--ema", "--hub"]) == 0
    (checkpoint,) = (run / "checkpoints").glob("step-*")
    stored = stored_tensors(checkpoint)
    averages = [name for name in stored if name.startswith("ema.")]
    expected = read_tensors(checkpoint, averages, stored)
    found: Any = torch.load(plain, weights_only=True)
    model: Any = make_model(load_config(settings, overrides))
    model.load_state_dict(found)
    last: Any = read_checkpoint(checkpoint)["model"]
    assert found.keys() == last.keys()
    assert len(averages) == len(list(model.parameters())), "a tied weight is averaged once"
    for name in averages:
        assert torch.equal(found[name.removeprefix("ema.")], expected[name])  # type: ignore[arg-type]
    assert not any(torch.equal(found[name], last[name]) for name in found)
    loaded = transformers.LlamaForCausalLM.from_pretrained(out)
    tokens = torch.arange(32).view(2, 16)
    with torch.no_grad():
        assert torch.equal(loaded(tokens).logits, model(tokens))


def test_a_run_without_an_average_says_so(
    settings: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    train(load_config(settings))
    for out in (["plain.pt"], ["hub", "--hub"]):
        given = ["export", str(tmp_path / "run"), "--out", str(tmp_path / out[0]), "--ema"]
        assert main([*given, *out[1:]]) == 1
        assert "holds no averaged weights" in capsys.readouterr().err


def test_a_run_goes_on_from_what_was_exported(settings: Path, tmp_path: Path) -> None:
    train(load_config(settings))
    assert main(["export", str(tmp_path / "run"), "--out", str(tmp_path / "hub"), "--hub"]) == 0
    path = tmp_path / "hub/config.json"
    published = json.loads(path.read_text()) | {"eos_token_id": 7, "max_position_embeddings": 99}
    path.write_text(json.dumps(published))
    again = (f"model.weights={tmp_path}/hub", f"run.directory={tmp_path}/again")
    unsized = TOML.split("width = 16")[0] + "[run]" + TOML.split("[run]")[1]
    settings.write_text(unsized.format(root=tmp_path))
    train(load_config(settings, (*again, "optimizer.lr=1e-30", "optimizer.weight_decay=0")))
    assert main(["export", str(tmp_path / "again"), "--out", str(tmp_path / "b"), "--hub"]) == 0
    first, second = (
        transformers.LlamaForCausalLM.from_pretrained(tmp_path / name) for name in ("hub", "b")
    )
    assert all(map(torch.equal, first.parameters(), second.parameters()))
    assert (second.config.eos_token_id, second.config.max_position_embeddings) == (7, 99)


def test_what_a_run_left_is_read_back_as_its_settings(settings: Path, tmp_path: Path) -> None:
    config = load_config(settings, (ROPE,))
    assert config.model.settings["rope"] == Rope(theta=500.0, factor=4.0, original_length=8)
    train(config)
    assert read_settings(tmp_path / "run/config.json") == config


def test_what_cannot_be_exported_is_refused(
    settings: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    def said(*argv: str) -> str:
        assert main(["export", str(tmp_path / "run"), "--hub", *argv]) == 1
        return capsys.readouterr().err

    train(load_config(settings))
    full = str(tmp_path)
    assert "holds something, expected no directory yet, or an empty one" in said("--out", full)
    out = str(tmp_path / "hub")
    assert "leave one of them out" in said("--out", out, "--optimizer")
    assert "max-file-bytes is 0" in said("--out", out, "--max-file-bytes", "0")
    assert "cannot be written" in said("--out", str(tmp_path / "absent/hub"))
    config = tmp_path / "run/config.json"
    given = read_record(config)
    write_record(config, given | {"model": given["model"] | {"width": 32}})
    assert "stem.tokens.weight is [256, 16], expected [256, 32] as" in said("--out", out)
    config.unlink()
    assert "config.json: cannot be read as a run's settings: " in said("--out", out)
    assert not Path(out).exists()


MINE = """
import transformers
def make():
    return transformers.GPT2LMHeadModel.from_pretrained({base!r})
"""


@pytest.mark.parametrize("kind", ["llama", "hub_export_mine:make"])
def test_a_run_on_packed_text_is_exported_with_its_tokenizer(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, kind: str
) -> None:
    sizes = {"vocab_size": 300, "n_embd": 16, "n_layer": 2, "n_head": 2, "n_positions": 64}
    ids = {"bos_token_id": 9, "eos_token_id": 9}
    base = transformers.GPT2LMHeadModel(transformers.GPT2Config(**sizes, **ids, use_cache=False))
    base.save_pretrained(tmp_path / "base")
    (tmp_path / "hub_export_mine.py").write_text(MINE.format(base=str(tmp_path / "base")))
    monkeypatch.syspath_prepend(str(tmp_path))
    made = make_tokenizer(tmp_path / "tokenizer.json")
    (tmp_path / "c.jsonl").write_text(60 * '{"text": "to be or not"}\n{"text": "that is"}\n')
    argv = ["pack", str(tmp_path / "c.jsonl"), str(tmp_path / "text"), "--tokenizer", str(made)]
    assert main([*argv, "--end", "<|endoftext|>"]) == 0
    text = TOML.replace("[shuffle]", '[text]\npacking = "best_fit"\n[shuffle]')
    if kind != "llama":
        start, stop = text.index("[model]"), text.index("[optimizer]")
        text = f'{text[:start]}[model]\nkind = "{kind}"\n{text[stop:]}'
    settings = tmp_path / "run.toml"
    settings.write_text(text.replace("test_fraction = 0.2\n", "").format(root=tmp_path))
    train(load_config(settings), quiet=True)
    out = tmp_path / "hub"
    assert main(["export", str(tmp_path / "run"), "--out", str(out), "--hub"]) == 0
    loaded, info = transformers.AutoModelForCausalLM.from_pretrained(out, output_loading_info=True)
    assert not info["missing_keys"]
    assert not info["unexpected_keys"]
    (checkpoint,) = (tmp_path / "run/checkpoints").glob("step-*")
    weights: Any = read_checkpoint(checkpoint)["model"]
    form = make_model(load_config(settings)).hub_format()
    theirs = loaded.state_dict()
    for name in weights.keys() - form.aliases:
        assert torch.equal(theirs[form.stored(name).name], weights[name]), name
    assert loaded.config.eos_token_id == loaded.generation_config.eos_token_id == 0
    assert loaded.config.bos_token_id is loaded.generation_config.bos_token_id is None
    tokenizer = transformers.AutoTokenizer.from_pretrained(out)
    words = "to be or not that"
    assert tokenizer(words)["input_ids"] == open_tokenizer(str(made)).encode([words])[0].tolist()
    assert (tokenizer.eos_token, tokenizer.eos_token_id) == ("<|endoftext|>", 0)
