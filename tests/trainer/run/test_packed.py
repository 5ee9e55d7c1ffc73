"""Packed documents from the command line to a model, and what is refused before staging."""

import json
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

import dataio
from dataio.source.text.tokenizer import open_tokenizer
from tests import hub
from tests.multirank import ROOT, RunRanks
from tests.tokenizers_made import make_tokenizer
from tests.trainer.packed_text import write_config, write_packed
from tests.trainer.run.runs import lines, run
from tonari.cli import main
from tonari.trainer.config.config import Config, load_config
from tonari.trainer.errors import ConfigError
from tonari.trainer.models import Adapted, seeded
from tonari.trainer.models.documents import positions_of
from tonari.trainer.run.build import make_model
from tonari.trainer.run.loop import train
from tonari.trainer.run.packed import NO_TARGET, NextTokenInDocument


@pytest.fixture
def tokenizer(tmp_path: Path) -> Path:
    """A tokenizer of 300 tokens at most."""
    return make_tokenizer(tmp_path / "tokenizer.json")


def test_text_is_packed_and_trained_on_from_the_command_line(
    tmp_path: Path, tokenizer: Path
) -> None:
    write_config(tmp_path)
    for name in ("train", "test"):
        line = ["pack", str(tmp_path / f"{name}.jsonl"), str(tmp_path / f"new {name}")]
        assert main([*line, "--tokenizer", str(tokenizer), "--end", "<|endoftext|>"]) == 0
    given = [
        f"data.train={tmp_path}/new train", f"data.test={tmp_path}/new test",
        f"text.tokenizer={tokenizer}", f"run.directory={tmp_path}/run", "run.device=cpu",
        f"data.cache={tmp_path}/cache", "run.epochs=4", "model.width=16",
    ]  # fmt: skip
    config = ROOT / "examples/llama_documents.toml"
    assert main(["train", str(config), *given, "--dry-run"]) == 0
    assert main(["train", str(config), *given]) == 0
    found = [line["evaluation_loss"] for line in lines(tmp_path / "run") if line["kind"] == "epoch"]
    assert found[-1] < found[0]
    assert (
        make_model(load_config(config, given)).vocabulary
        == open_tokenizer(str(tokenizer)).vocabulary
    )


def test_tokens_count_as_the_steps_that_reach_them(tmp_path: Path) -> None:
    config = write_config(tmp_path)
    # A step is 16 sequences of 16 tokens.
    by = {
        "steps": ("optimizer.warmup_steps=4", "run.evaluate_steps=3", "run.checkpoint_steps=2"),
        "tokens": (
            "optimizer.warmup_tokens=1024", "run.evaluate_tokens=700", "run.checkpoint_tokens=512",
        ),
    }  # fmt: skip
    for name, given in by.items():
        limit = "run.max_steps=8" if name == "steps" else "run.max_tokens=2048"
        run(config, name, *given, limit, "optimizer.schedule_by=step", f"data.cache={tmp_path}/c")
    assert lines(tmp_path / "tokens") == lines(tmp_path / "steps")
    found = [
        sorted(path.name for path in (tmp_path / name / "checkpoints").iterdir()) for name in by
    ]
    assert found[0] == found[1]


def test_concatenated_documents_train_too(tmp_path: Path) -> None:
    config = write_config(tmp_path)
    summary = run(config, "run", "text.packing=concatenated", f"data.cache={tmp_path}/cache")
    assert summary.finished


@pytest.mark.usefixtures("unstaged")
@pytest.mark.parametrize(
    ("given", "message"),
    [
        ("model.vocabulary=255", r"model.vocabulary is 255, but .*train was packed with bytes, "),
        ("data.test_fraction=0.1", "test_fraction is 0.1, expected 0 .*data.test"),
        ("data.train={root}", r"found no whole packed text .*run `tonari pack SRC DST"),
        ("data.test={root}/other", r"other/text.json: was packed with .*expected bytes .*; pack"),
        ("text.tokenizer={root}/tokenizer.json", r"but .*train was packed with bytes .*; give tha"),
        ("text.tokenizer=gpt2", r"text.tokenizer: gpt2: there is no tokenizer here, expected"),
        ("text.packing=bytes text.tokenizer=bytes", r'text.packing is "bytes", .*run `tonari pack'),
        (
            "text.packing=bytes text.mean=tokens",
            r'text.mean is "tokens", but text.packing is "bytes"',
        ),
        ("text.packing=best", r"text.packing is 'best', expected one of 'bytes', 'concatenated'"),
        ("mesh.cp=2", r"mesh.cp is 2, expected 1 with text.packing = .*; use mesh.tp"),
        ("data.sequence_length=70000", r"length is 70000, expected a whole number in \[1, 65534\]"),
    ],
)
def test_what_does_not_fit_the_text_is_refused_before_staging(
    tmp_path: Path, tokenizer: Path, given: str, message: str
) -> None:
    config = write_config(tmp_path)
    write_packed(tmp_path / "other", num_documents=9, tokenizer=open_tokenizer(str(tokenizer)))
    overrides = given.format(root=tmp_path).split(" ")
    if "test_fraction" in given:
        overrides.append("data.test=")
    with pytest.raises(ConfigError, match=message):
        run(config, "run", *overrides)
    assert not (tmp_path / "run").exists()


@pytest.mark.parametrize("mean", ["sequences", "tokens"])
def test_a_step_descends_the_mean_over_sequences_or_over_all_their_targets(
    tmp_path: Path, mean: str
) -> None:
    config = write_config(tmp_path, num_documents=60)
    given = ["optimizer.accumulate=100", "shuffle.exchange=0", "run.epochs=1", "data.batch_size=7"]
    settings = load_config(config, [*given, f"text.mean={mean}"])
    run(config, "run", *given, f"text.mean={mean}")
    (step,) = [line for line in lines(tmp_path / "run") if line["kind"] == "step"]
    # By hand: the whole text is one step, and its last batch has padding.
    source = dataio.open_source(
        str(tmp_path / "train"), sequences=dataio.Sequences(16, packing="best_fit")
    )
    assert source.num_samples % 7
    blocks = list(source.read(np.arange(source.num_samples), dataio.Sequences(16).fields("uint8")))
    tokens, document = (
        torch.from_numpy(
            np.concatenate([rows.fixed[i] for rows in blocks]).view(dtype).astype("i8")
        )
        for i, dtype in enumerate(("u1", "<u2"))
    )
    task = NextTokenInDocument()
    batch = {"tokens": tokens, "document": document}
    target = task.target(batch)
    num_targets = (target != NO_TARGET).sum(dim=1)
    assert len(set(num_targets.tolist())) > 3
    model = seeded(partial(make_model, settings), seed=settings.run.seed).double()
    losses = task.losses(model(*task.input(batch)), target)
    whole = (losses * num_targets).sum() / num_targets.sum() if mean == "tokens" else losses.mean()
    whole.backward()
    norm = torch.stack([p.grad.norm() for p in model.parameters() if p.grad is not None]).norm()
    assert step["gradient_norm"] == pytest.approx(float(norm), rel=1e-6)


def test_a_loss_of_ones_own_is_one_a_row_and_not_by_tokens(tmp_path: Path) -> None:
    config = load_config(
        write_config(tmp_path), ["text.mean=tokens", f"run.directory={tmp_path}/run"]
    )
    with pytest.raises(
        ConfigError, match=r"text.mean is .tokens., but train was given .* num_targets"
    ):
        train(config, loss=lambda logits, target: logits.sum(dim=(1, 2)))


class PackedModel(torch.nn.Module):
    """A model of one's own, that takes what Hugging Face's do."""

    def __init__(self, vocabulary: int = 256) -> None:
        super().__init__()
        self.tokens = torch.nn.Embedding(vocabulary, 8)
        self.positions = torch.nn.Embedding(16, 8)
        self.out = torch.nn.Linear(8, vocabulary)

    def get_input_embeddings(self) -> torch.nn.Embedding:
        return self.tokens

    def forward(self, input_ids: Tensor, position_ids: Tensor) -> Any:
        made: Any = self.out(self.tokens(input_ids) + self.positions(position_ids))
        return made


def without_model(directory: Path) -> Config:
    config = write_config(directory)
    text = config.read_text()
    start, stop = text.index("[model]"), text.index("[shuffle]")
    config.write_text(text[:start] + text[stop:])
    return load_config(config, [f"run.directory={directory}/run", f"data.cache={directory}/c"])


def test_a_model_of_ones_own_gets_positions_that_begin_anew(tmp_path: Path) -> None:
    settings = without_model(tmp_path)
    assert train(settings, model=PackedModel).finished
    with pytest.raises(
        ConfigError, match=r"model.vocabulary is 200, .*whose tokens are in \[0, 25"
    ):
        train(settings, model=lambda: PackedModel(200))


@pytest.mark.multirank
def test_a_model_of_ones_own_is_verified_on_ranks(tmp_path: Path, run_ranks: RunRanks) -> None:
    without_model(tmp_path)
    kind = f"model.kind={__name__}:{PackedModel.__name__}"
    given = (str(tmp_path / "run.toml"), kind, "mesh.dp_shard=2", f"run.directory={tmp_path}/run")
    run_ranks("trainer/meshes", 2, "|".join(given), timeout_s=120)
    assert (tmp_path / "run/verified.json").exists()
    assert [line["kind"] for line in lines(tmp_path / "run")][-1] == "epoch"


class RecurrentPacked(PackedModel):
    """Carries what it has read from one document into the next."""

    def __init__(self) -> None:
        super().__init__()
        self.read = torch.nn.GRU(8, 8, batch_first=True)

    def forward(self, input_ids: Tensor, position_ids: Tensor) -> Any:
        hidden, _ = self.read(self.tokens(input_ids))
        return self.out(hidden)


def test_a_model_of_ones_own_in_which_documents_see_others_is_refused(tmp_path: Path) -> None:
    settings = without_model(tmp_path)
    with pytest.raises(ConfigError, match=r"a document sees the one before it .*position_ids"):
        train(settings, model=RecurrentPacked)
    assert not (tmp_path / "c").exists(), "before staging"


def test_a_transformers_model_with_a_cache_masks_nothing_and_is_refused(tmp_path: Path) -> None:
    transformers = hub.import_or_skip()
    sizes = {"vocab_size": 256, "n_positions": 64, "n_embd": 16, "n_layer": 2, "n_head": 2}
    cached, plain = (transformers.GPT2Config(**sizes, use_cache=use) for use in (True, False))
    settings = without_model(tmp_path)
    with pytest.raises(ConfigError, match="with use_cache=False in its config"):
        train(settings, model=lambda: transformers.GPT2LMHeadModel(cached))
    assert train(settings, model=lambda: transformers.GPT2LMHeadModel(plain)).finished


def test_transformers_models_keep_documents_apart_by_their_positions() -> None:
    transformers = hub.import_or_skip()
    torch.manual_seed(2)
    settings = transformers.LlamaConfig(
        vocab_size=40, hidden_size=16, num_hidden_layers=2, num_attention_heads=2,
        num_key_value_heads=1, intermediate_size=32, use_cache=False,
    )  # fmt: skip
    model = Adapted(transformers.LlamaForCausalLM(settings).double())
    documents = torch.tensor([[1, 1, 1, 2, 2, 2, 2, 3, 3]])
    batch = {"tokens": torch.randint(0, 40, documents.shape), "document": documents}
    inputs = NextTokenInDocument(named=True).input(batch)
    assert isinstance(inputs, dict)
    assert torch.equal(inputs["position_ids"], positions_of(documents[:, :-1]))
    logits = model(inputs)
    for number in (1, 2, 3):
        own = documents[0, :-1] == number
        alone = model({name: each[:, own] for name, each in inputs.items()})
        assert torch.allclose(alone[0], logits[0, own], rtol=1e-9)


def test_the_settings_that_a_run_leaves_say_how_text_was_packed(tmp_path: Path) -> None:
    config = write_config(tmp_path)
    run(config, "run", f"data.cache={tmp_path}/cache", "run.epochs=1")
    found = json.loads((tmp_path / "run" / "config.json").read_text())
    assert found["text"] == {
        "packing": "best_fit", "tokenizer": "", "end": "", "mean": "sequences",
    }  # fmt: skip
