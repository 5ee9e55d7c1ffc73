"""Our Llama is Hugging Face's: losses, gradients and weights, from and to its files."""

import json
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from tests import hub
from tests.multirank import RunRanks
from tonari.trainer.checkpoint.weights import WeightFiles
from tonari.trainer.config.config import load_config
from tonari.trainer.run.build import make_model

transformers = hub.import_or_skip()

NUM_ROWS, NUM_STEPS, SEQUENCE, VOCABULARY = 8, 3, 16, 40
LR = 0.3
SCALED = {
    "rope_type": "llama3", "rope_theta": 500.0, "factor": 4.0, "low_freq_factor": 1.0,
    "high_freq_factor": 4.0, "original_max_position_embeddings": 8,
}  # fmt: skip
TOML = """
[data]
kind = "text"
train = "unused"
sequence_length = {sequence}
batch_size = 8
[shuffle]
exchange = 0.1
[model]
kind = "llama"
weights = "{weights}"
[optimizer]
lr = {lr}
momentum = 0.0
weight_decay = 0.0
[mesh]
dtype = "float64"
[run]
device = "cpu"
"""
HALF = ("data.batch_size=4",)
ON_TWO = [
    ("mesh.dp_replicate=2", *HALF),
    ("mesh.dp_shard=2", *HALF),
    ("mesh.tp=2",),
    ("mesh.tp=2", "mesh.sequence_parallel=true", "mesh.loss_parallel=true"),
    ("mesh.cp=2",),
    ("mesh.pp=2",),
    ("mesh.pp=2", "mesh.schedule=gpipe"),
    ("mesh.pp=2", "mesh.schedule=interleaved", "mesh.microbatches=4"),
    ("mesh.pp=2", "mesh.schedule=zero_bubble", "mesh.microbatches=4"),
    ("mesh.pp=2", "mesh.schedule=zbv", "mesh.microbatches=4"),
    ("mesh.pp=2", "mesh.schedule=dualpipev", "mesh.microbatches=4"),
]
ON_FOUR = [
    ("mesh.pp=2", "mesh.dp_shard=2", *HALF),
    ("mesh.pp=2", *HALF),
    ("mesh.pp=2", "mesh.tp=2"),
    ("mesh.pp=2", "mesh.tp=2", "mesh.sequence_parallel=true", "mesh.loss_parallel=true"),
    ("mesh.dp_shard=2", "mesh.tp=2", *HALF),
    ("mesh.cp=2", "mesh.tp=2"),
    ("mesh.dp_shard=4", "data.batch_size=2"),
]


def precise_norm(self: Any, hidden: Tensor) -> Tensor:
    """Do what LlamaRMSNorm does, without its rounding to float32 on the way."""
    mean = hidden.pow(2).mean(-1, keepdim=True)
    result: Tensor = self.weight * (hidden * torch.rsqrt(mean + self.variance_epsilon))
    return result


def make_reference(**settings: Any) -> Any:
    config = transformers.LlamaConfig(
        vocab_size=VOCABULARY, hidden_size=32, intermediate_size=48, num_hidden_layers=4,
        num_attention_heads=4, num_key_value_heads=2, max_position_embeddings=SEQUENCE,
        attn_implementation="sdpa", **settings,
    )  # fmt: skip
    torch.manual_seed(3)
    model = transformers.LlamaForCausalLM(config)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(0.1 * torch.randn(parameter.shape))
    return model


class Reference:
    """What transformers makes of a model in one process, whose weights lie in a directory."""

    def __init__(self, root: Path, **settings: Any) -> None:
        self.model = make_reference(**settings).double()
        self.weights, self.settings, self.tokens = root / "hub", root / "run.toml", root / "t.pt"
        # In several files, as large models are.
        self.model.save_pretrained(self.weights, max_shard_size="60KB")
        self.settings.write_text(TOML.format(sequence=SEQUENCE, weights=self.weights, lr=LR))
        generator = torch.Generator().manual_seed(1)
        shape = (NUM_STEPS, NUM_ROWS, SEQUENCE + 1)
        tokens = torch.randint(VOCABULARY, shape, generator=generator)
        torch.save(tokens, self.tokens)
        self.first = tokens[0, :, :-1]
        with torch.no_grad():
            self.logits = self.model(self.first).logits
        self.losses, self.norms = self._train(tokens)

    def _train(self, tokens: Tensor) -> tuple[list[list[float]], list[float]]:
        optimizer = torch.optim.SGD(self.model.parameters(), lr=LR)
        losses, norms = list[list[float]](), list[float]()
        for step in tokens:
            logits = self.model(step[:, :-1]).logits
            rows = F.cross_entropy(logits.transpose(1, 2), step[:, 1:], reduction="none").mean(1)
            rows.mean().backward()
            losses.append(rows.tolist())
            gradients = [p.grad for p in self.model.parameters() if p.grad is not None]
            norms.append(float(nn.utils.get_total_norm(gradients)))
            optimizer.step()
            optimizer.zero_grad()
        return losses, norms

    def check(self, run_ranks: RunRanks, num_ranks: int, cases: list[tuple[str, ...]]) -> None:
        ended = run_ranks(
            "trainer/hub_steps", num_ranks, str(self.settings), str(self.tokens),
            json.dumps(cases), timeout_s=280,
        )  # fmt: skip
        assert "Warning" not in ended.output
        for number, case in enumerate(cases):
            reports: list[Any] = [ranks[number] for ranks in ended.reports]  # type: ignore[index]
            for report in reports:
                assert report["numbers_read"] == report["numbers_kept"], case
                assert report["norms"] == pytest.approx(self.norms, rel=1e-9), case
            for step, expected in enumerate(self.losses):
                found = {r["replica"]: r["losses"][step] for r in reports if r["losses"][step]}
                rows = [loss for replica in sorted(found) for loss in found[replica]]
                assert rows == pytest.approx(expected, rel=1e-9), case


@pytest.fixture(autouse=True)
def _precise(monkeypatch: pytest.MonkeyPatch) -> None:
    from transformers.models.llama import modeling_llama

    monkeypatch.setattr(modeling_llama.LlamaRMSNorm, "forward", precise_norm)


@pytest.mark.parametrize("rope", [{}, {"rope_parameters": SCALED}], ids=["plain", "llama 3.1"])
@pytest.mark.parametrize("tied", [False, True])
def test_logits_are_those_of_transformers(tmp_path: Path, rope: Any, tied: bool) -> None:
    reference = Reference(tmp_path, tie_word_embeddings=tied, **rope)
    model = make_model(load_config(reference.settings)).double()
    files = WeightFiles(reference.weights)
    assert len(list(reference.weights.glob("*.safetensors"))) > 1
    files.check(model)
    files.read_into([model])
    assert sum(p.numel() for p in model.parameters()) == sum(
        p.numel() for p in reference.model.parameters()
    )
    torch.testing.assert_close(model(reference.first), reference.logits, rtol=1e-9, atol=1e-12)


@pytest.mark.multirank
@pytest.mark.parametrize(
    ("num_ranks", "cases"), [pytest.param(2, ON_TWO, marks=pytest.mark.nightly), (4, ON_FOUR)]
)
def test_losses_and_gradient_norms_are_those_of_transformers_on_every_mesh(
    run_ranks: RunRanks, tmp_path: Path, num_ranks: int, cases: list[tuple[str, ...]]
) -> None:
    Reference(tmp_path, rope_parameters=SCALED).check(run_ranks, num_ranks, cases)


@pytest.mark.multirank
@pytest.mark.nightly
def test_so_they_are_where_the_output_layer_is_the_embedding(
    run_ranks: RunRanks, tmp_path: Path
) -> None:
    Reference(tmp_path, tie_word_embeddings=True).check(run_ranks, 2, ON_TWO)
