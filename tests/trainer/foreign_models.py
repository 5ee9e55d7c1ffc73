"""Tiny float64 models that were not written for the trainer, and how they are adapted to it."""

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel

from dataio.rows.samples import Batch
from tests import hub, torchvision_v2
from tonari.trainer.models import Adapted, StagedModel, seeded
from tonari.trainer.models.styles import Conv1D
from tonari.trainer.run.tasks import Classify, NextToken, Task

NUM_ROWS, LENGTH, VOCABULARY, WIDTH, CLASSES, SIDE = 8, 12, 24, 16, 5, 32


class Unruly(nn.Module):
    """All that adapters get wrong: ties, a shared layer, a parameter on top, dropout everywhere."""

    layers_path = "body"

    def __init__(self) -> None:
        super().__init__()
        self.tokens = nn.Embedding(VOCABULARY, WIDTH)
        self.scale = nn.Parameter(torch.ones(WIDTH))
        between = nn.Linear(WIDTH, WIDTH)
        self.body = nn.Sequential(*(_Layer(between) for _ in range(4)))
        self.out = nn.Linear(WIDTH, VOCABULARY, bias=False)
        self.out.weight = self.tokens.weight
        self.drop = nn.Dropout(0.1)

    def forward(self, tokens: Tensor, weights: Tensor | None = None) -> dict[str, Tensor]:
        """Give the logits of each place."""
        hidden = self.drop(self.tokens(tokens) * self.scale)
        hidden = self.body(hidden)
        return {"logits": self.out(self.drop(hidden) * self.scale)}


class _Layer(nn.Module):
    def __init__(self, between: nn.Linear) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(WIDTH, 2 * WIDTH), nn.Linear(2 * WIDTH, WIDTH)
        self.between, self.drop = between, nn.Dropout(0.1)

    def forward(self, hidden: Tensor) -> Tensor:
        """Add what two layers make of it, then what the shared one does."""
        hidden = hidden + self.drop(self.down(torch.tanh(self.up(hidden))))
        changed: Tensor = self.drop(torch.tanh(self.between(hidden)))
        return hidden + changed


class Experts(nn.Module):
    """Layers whose tokens are dealt to experts, sorted, by torch's products by groups."""

    layers_path = "layers"

    def __init__(self) -> None:
        super().__init__()
        self.tokens = nn.Embedding(VOCABULARY, WIDTH)
        self.layers = nn.ModuleList(_Routed(num_experts=4, chosen=2) for _ in range(4))
        self.out = nn.Linear(WIDTH, VOCABULARY)

    def forward(self, tokens: Tensor) -> Tensor:
        """Give the logits of each place."""
        hidden = self.tokens(tokens)
        for layer in self.layers:
            hidden = layer(hidden)
        logits: Tensor = self.out(hidden)
        return logits


class _Routed(nn.Module):
    def __init__(self, *, num_experts: int, chosen: int) -> None:
        super().__init__()
        self.chosen = chosen
        self.router = nn.Linear(WIDTH, num_experts)
        self.up = nn.Parameter(torch.zeros(num_experts, WIDTH, 2 * WIDTH))
        self.down = nn.Parameter(torch.zeros(num_experts, 2 * WIDTH, WIDTH))

    def forward(self, hidden: Tensor) -> Tensor:
        """Add what the experts of each token make of it; products are in float32, as torch's."""
        tokens = hidden.flatten(0, -2)
        share, expert = self.router(tokens).softmax(-1).topk(self.chosen)
        ordered, order = expert.flatten().sort()
        counts = torch.histc(ordered.float(), len(self.up), 0, len(self.up) - 1)
        ends = counts.cumsum(0, dtype=torch.int32)
        given = tokens[order // self.chosen].float()
        inner = nn.functional.grouped_mm(given, self.up.float(), offs=ends).relu()
        made = nn.functional.grouped_mm(inner, self.down.float(), offs=ends)
        shared = made.to(tokens.dtype) * share.flatten()[order, None]
        added = torch.zeros_like(tokens).index_add(0, order // self.chosen, shared)
        return hidden + added.view_as(hidden)


class Drawn(nn.Module):
    """Layers that draws leave out, in their order or one of several; or all weights at once.

    Args:
        way: ``"dropped"``: each layer may be passed over; ``"branches"``: one of them is taken;
            ``"silent"``: no weight may be used at all.
        width: Of the layers.
    """

    def __init__(self, way: str, *, width: int = WIDTH) -> None:
        super().__init__()
        self.way = way
        self.tokens = nn.Embedding(VOCABULARY, WIDTH, sparse=True)
        self.layers = nn.ModuleList(
            nn.Sequential(nn.Linear(WIDTH, width), nn.Tanh(), nn.Linear(width, WIDTH))
            for _ in range(4)
        )
        self.spectrum = nn.Parameter(torch.ones(WIDTH // 2 + 1, dtype=torch.complex128))
        self.unused = nn.Linear(3, 3)
        self.out = nn.Linear(WIDTH, VOCABULARY)

    def forward(self, tokens: Tensor) -> Tensor:
        """Give the logits of each place."""
        if self.way == "silent" and torch.rand([]) < 0.6:
            return torch.zeros(*tokens.shape, VOCABULARY, dtype=torch.float64)
        hidden = self.tokens(tokens)
        if self.way == "branches":
            hidden = hidden + self.layers[int(torch.randint(4, []))](hidden)
        for layer in self.layers if self.way == "dropped" else []:
            if torch.rand([]) < 0.5:
                hidden = hidden + layer(hidden)
        hidden = torch.fft.irfft(torch.fft.rfft(hidden) * self.spectrum, WIDTH)
        logits: Tensor = self.out(hidden)
        return logits


class Passing(nn.Module):
    """All that passes by layers: a long skip, a frozen table, a mask, and what a layer gives too.

    Its first layers are frozen, and one begins by changing what it is given.
    """

    layers_path = "layers"

    def __init__(self) -> None:
        super().__init__()
        self.tokens, self.gate = nn.Embedding(VOCABULARY, WIDTH), nn.Linear(WIDTH, WIDTH)
        self.first = nn.Parameter(torch.zeros(WIDTH))
        self.table = nn.Parameter(torch.linspace(-1, 1, WIDTH), requires_grad=False)
        self.layers = nn.ModuleList(_Beside() for _ in range(4))
        self.norm, self.out = nn.BatchNorm1d(WIDTH), nn.Linear(WIDTH, VOCABULARY, bias=False)
        self.out.weight = self.tokens.weight
        for module in (self.gate, self.layers[0], self.layers[1]):
            module.requires_grad_(False)

    def forward(self, tokens: Tensor) -> Tensor:
        """Give the logits of each place."""
        embedded = self.tokens(tokens).detach()
        hidden = torch.zeros_like(embedded)
        hidden[:, 0] = self.first.detach()
        hidden[:, 1:] = embedded[:, 1:]
        hidden = self.norm(hidden.flatten(0, 1)).view_as(hidden).detach()
        skip, mask, total = torch.tanh(self.first + hidden), self.gate(hidden) < 0, 0.0
        for layer in self.layers:
            hidden, beside = layer(hidden, torch.sin(self.table), mask)
            total = total + beside
        made: Tensor = self.out(hidden + skip + total)
        return made


class _Beside(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.act, self.line, self.drop = (
            nn.ReLU(inplace=True),
            nn.Linear(WIDTH, WIDTH),
            nn.Dropout(0.1),
        )

    def forward(self, hidden: Tensor, table: Tensor, mask: Tensor) -> tuple[Tensor, Tensor]:
        """Give two tensors."""
        made = torch.tanh(self.line(self.act(hidden) + table).masked_fill(mask, 0.5))
        return self.drop(made).view(-1, *made.shape[1:]), made * table


class Sharing(nn.Module):
    """Layers that use a weight twice around another one, and by itself.

    What each hands on beside its values is made of weights alone.
    """

    layers_path = "layers"

    def __init__(self) -> None:
        super().__init__()
        self.tokens, self.out = nn.Embedding(VOCABULARY, WIDTH), nn.Linear(WIDTH, VOCABULARY)
        self.layers = nn.ModuleList(_Around() for _ in range(4))

    def forward(self, tokens: Tensor) -> Tensor:
        """Give the logits of each place."""
        hidden, total = self.tokens(tokens), torch.zeros(WIDTH, dtype=torch.float64)
        for layer in self.layers:
            hidden, beside = layer(hidden)
            total = total + beside
        logits: Tensor = self.out(hidden + total)
        return logits


class _Around(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.outer, self.inner = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH)
        self.gain, self.table = nn.Parameter(torch.ones(WIDTH)), nn.Parameter(torch.zeros(WIDTH))

    def forward(self, hidden: Tensor) -> tuple[Tensor, Tensor]:
        """Give two tensors."""
        made = self.outer(torch.tanh(self.inner(torch.tanh(self.outer(hidden * self.gain)))))
        return made * self.gain + self.outer.weight.square().mean(), torch.tanh(self.table)


class Clamped(Sharing):
    """Keeps a weight within bounds as it goes forward."""

    def forward(self, tokens: Tensor) -> Tensor:
        """Give the logits of each place."""
        self.tokens.weight.data.clamp_(-0.5, 0.5)
        return super().forward(tokens)


class Masked(NextToken):
    """Gives the model a mask and positions beside the tokens."""

    def input(self, batch: Batch) -> dict[str, Tensor]:  # type: ignore[override]
        """Take all but the last token; the first row's last places are padding."""
        tokens = batch["tokens"][:, :-1].long()
        return {
            "input_ids": tokens,
            "attention_mask": (tokens != 0).long(),
            "position_ids": torch.arange(LENGTH, device=tokens.device)
            .expand_as(tokens)
            .contiguous(),
        }


class Scaled(Classify):
    """Gives the model floating point."""

    def input(self, batch: Batch) -> Tensor:
        """Take the images as float64[batch, 3, side, side]."""
        return batch["image"].double() / 255


def unruly() -> StagedModel:
    """Adapt `Unruly`: its own attribute says where its layers are."""
    plan = {"body.*.up": ColwiseParallel(), "body.*.down": RowwiseParallel()}
    return Adapted(Unruly(), tp_plan=plan)


def experts() -> StagedModel:
    """Adapt `Experts`."""
    return Adapted(Experts())


def passing() -> StagedModel:
    """Adapt `Passing`."""
    return Adapted(Passing())


def sharing() -> StagedModel:
    """Adapt `Sharing`."""
    return Adapted(Sharing())


def gpt2() -> StagedModel:
    """Adapt Hugging Face's GPT-2, whose output layer is its embedding."""
    hub.import_or_skip()
    from transformers import GPT2Config, GPT2LMHeadModel

    config = GPT2Config(
        n_layer=4, n_embd=WIDTH, n_head=4, vocab_size=VOCABULARY, n_positions=LENGTH,
        use_cache=False, bos_token_id=1, eos_token_id=2, attn_pdrop=0.1,
    )  # fmt: skip
    plan = {
        "transformer.h.*.mlp.c_fc": Conv1D("outputs"),
        "transformer.h.*.mlp.c_proj": Conv1D("inputs"),
    }
    return Adapted(GPT2LMHeadModel(config), layers="transformer.h", tp_plan=plan)


def llama() -> StagedModel:
    """Adapt Hugging Face's Llama with grouped queries, by its own plan."""
    hub.import_or_skip()
    from transformers import LlamaConfig, LlamaForCausalLM

    config = LlamaConfig(
        hidden_size=WIDTH, intermediate_size=2 * WIDTH, num_hidden_layers=4, vocab_size=VOCABULARY,
        num_attention_heads=4, num_key_value_heads=2, use_cache=False, bos_token_id=1,
        eos_token_id=2,
    )  # fmt: skip
    module = LlamaForCausalLM(config)
    return Adapted(module, layers="model.layers", tp_plan=module.tp_plan)


def qwen3() -> StagedModel:
    """Adapt Qwen 3: norms of single heads, which tp deals out."""
    hub.import_or_skip()
    from transformers import Qwen3Config, Qwen3ForCausalLM

    config = Qwen3Config(
        hidden_size=WIDTH, intermediate_size=2 * WIDTH, num_hidden_layers=2, vocab_size=VOCABULARY,
        num_attention_heads=4, num_key_value_heads=2, head_dim=4, use_cache=False, bos_token_id=1,
        eos_token_id=2,
    )  # fmt: skip
    module = Qwen3ForCausalLM(config)
    return Adapted(module, layers="model.layers", tp_plan=module.tp_plan)


def glm() -> StagedModel:
    """Adapt GLM, whose gate and value are one layer: a plan that joins and splits again."""
    hub.import_or_skip()
    from transformers import GlmConfig, GlmForCausalLM

    config = GlmConfig(
        hidden_size=WIDTH, intermediate_size=2 * WIDTH, num_hidden_layers=2, vocab_size=VOCABULARY,
        num_attention_heads=4, num_key_value_heads=2, head_dim=4, use_cache=False, bos_token_id=1,
        eos_token_id=2, pad_token_id=0,
    )  # fmt: skip
    module = GlmForCausalLM(config)
    return Adapted(module, layers="model.layers", tp_plan=module.tp_plan)


def resnet() -> StagedModel:
    """Adapt torchvision's ResNet with bottlenecks and batch statistics."""
    torchvision_v2.import_or_skip()
    from torchvision.models.resnet import Bottleneck, ResNet

    layers = [f"layer{number}" for number in range(1, 5)]
    return Adapted(
        ResNet(Bottleneck, [1, 1, 1, 1], num_classes=CLASSES, width_per_group=8), layers=layers
    )


def opt() -> StagedModel:
    """Adapt OPT, whose layers are left out by chance."""
    hub.import_or_skip()
    from transformers import OPTConfig, OPTForCausalLM

    config = OPTConfig(
        hidden_size=WIDTH, ffn_dim=2 * WIDTH, num_hidden_layers=4, vocab_size=VOCABULARY,
        num_attention_heads=4, max_position_embeddings=LENGTH, word_embed_proj_dim=WIDTH,
        layerdrop=0.5, use_cache=False, bos_token_id=1, eos_token_id=2, pad_token_id=0,
    )  # fmt: skip
    return Adapted(OPTForCausalLM(config), layers="model.decoder.layers")


MAKERS: dict[str, Callable[[], StagedModel]] = {
    "dropped": lambda: Adapted(Drawn("dropped")),
    "dropped layers": lambda: Adapted(Drawn("dropped"), layers="layers"),
    "large dropped": lambda: Adapted(Drawn("dropped", width=2048), layers="layers"),
    "branches": lambda: Adapted(Drawn("branches")),
    "branches layers": lambda: Adapted(Drawn("branches"), layers="layers"),
    "large branches": lambda: Adapted(Drawn("branches", width=2048)),
    "silent": lambda: Adapted(Drawn("silent"), layers="layers"),
    "large silent": lambda: Adapted(Drawn("silent", width=2048)),
    "opt": opt,
    "unruly": unruly, "experts": experts, "passing": passing, "sharing": sharing,
    "clamped": lambda: Adapted(Clamped()), "gpt2": gpt2,
    "llama": llama, "qwen3": qwen3, "glm": glm, "resnet": resnet,
}  # fmt: skip


def task_of(kind: str) -> Task:
    """Say what a kind learns."""
    tasks: dict[str, Any] = {"resnet": Scaled(), "llama": Masked()}
    found: Task = tasks.get(kind, NextToken())
    return found


def batch_of(kind: str, number: int = 0) -> dict[str, Tensor]:
    """Make a whole batch, weights included."""
    rng = torch.Generator().manual_seed(number + 2)
    weight = torch.arange(NUM_ROWS) % 3 / 2 + 0.5
    if kind == "resnet":
        images = torch.randint(256, (NUM_ROWS, 3, SIDE, SIDE), generator=rng, dtype=torch.uint8)
        return {
            "image": images,
            "label": torch.randint(CLASSES, (NUM_ROWS,), generator=rng),
            "weight": weight,
        }
    tokens = torch.randint(1, VOCABULARY, (NUM_ROWS, LENGTH + 1), generator=rng)
    if kind == "llama":
        tokens[0, -4:] = 0
    return {"tokens": tokens, "weight": weight}


def make(kind: str, *, build: Callable[..., StagedModel] = seeded) -> StagedModel:
    """Make the same model every time, its weights large enough to show errors."""

    def large() -> StagedModel:
        model = MAKERS[kind]().double()
        generator = torch.Generator().manual_seed(1)
        for parameter in model.parameters():
            parameter.data += 0.1 * torch.randn(parameter.shape, generator=generator).double()
        return model

    model, task = build(large, seed=5), task_of(kind)

    def example(rows: int) -> Any:
        batch = {
            name: column[:1].expand(rows, *column.shape[1:])
            for name, column in batch_of(kind).items()
        }
        inputs = task.input(batch)
        return torch.utils._pytree.tree_map(lambda each: each.to("meta"), inputs)

    assert isinstance(model, Adapted)
    model.describe_inputs(example)
    return model


def text_gpt2(depth: int = 4) -> StagedModel:
    """Make GPT-2 for bytes, with its usual dropout; for a run's settings to name."""
    hub.import_or_skip()
    from transformers import GPT2Config, GPT2LMHeadModel

    config = GPT2Config(
        n_layer=depth, n_embd=8, n_head=2, vocab_size=256, n_positions=8, use_cache=False,
        bos_token_id=1, eos_token_id=2,
    )  # fmt: skip
    plan = {
        "transformer.h.*.mlp.c_fc": Conv1D("outputs"),
        "transformer.h.*.mlp.c_proj": Conv1D("inputs"),
    }
    return Adapted(GPT2LMHeadModel(config), layers="transformer.h", tp_plan=plan)


class PlainImages(nn.Module):
    """Pictures to logits, as anybody writes it."""

    def __init__(self, num_classes: int, width: int = 8) -> None:
        super().__init__()
        self.stem = nn.Conv2d(3, width, 3, 2)
        self.middle = nn.ModuleList(nn.Conv2d(width, width, 3, padding=1) for _ in range(3))
        self.drop, self.head = nn.Dropout(0.2), nn.Linear(width, num_classes)

    def forward(self, images: Tensor) -> Tensor:
        """Map floating[batch, 3, height, width] to logits."""
        hidden = torch.relu(self.stem(images))
        for layer in self.middle:
            hidden = layer(hidden)
        logits: Tensor = self.head(self.drop(torch.relu(hidden).mean((2, 3))))
        return logits


class DoublesOnAStage(PlainImages):
    """Trains one layer with twice its gradient where others are another stage's: a wrong mesh."""

    def __init__(self, num_classes: int) -> None:
        super().__init__(num_classes)
        self.middle[1] = _DoublesOnAStage(self.middle)


class _DoublesOnAStage(nn.Module):
    def __init__(self, layers: nn.ModuleList) -> None:
        super().__init__()
        self.layer = layers[1]
        # Not as a child
        self.all = (layers,)

    def forward(self, hidden: Tensor) -> Tensor:
        """Pass it through the layer."""
        hidden = self.layer(hidden)
        (layers,) = self.all
        others = [each for each in layers if each is not self]
        if any(not isinstance(getattr(each, "weight", None), nn.Parameter) for each in others):
            hidden = Doubled.apply(hidden)
        return hidden


class CountsInALayer(PlainImages):
    """A layer that does otherwise each time it is called."""

    def __init__(self, num_classes: int) -> None:
        super().__init__(num_classes)
        self.middle[1] = _Counts(8, 8, 3, padding=1)


class _Counts(nn.Conv2d):
    calls = 0

    def forward(self, hidden: Tensor) -> Tensor:
        """Scale by the number of the call, and keep what follows for the way back."""
        self.calls += 1
        return (super().forward(hidden) * self.calls).exp()


class Doubled(torch.autograd.Function):
    """The same values, and twice their gradient."""

    @staticmethod
    def forward(ctx: Any, values: Tensor) -> Tensor:
        """Copy them."""
        return values.clone()

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Tensor:
        """Double it."""
        return 2 * gradient
