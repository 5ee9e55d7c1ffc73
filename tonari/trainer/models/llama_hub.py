"""A Llama's weights and sizes under Hugging Face's names (``LlamaForCausalLM``)."""

from collections.abc import Mapping
from typing import Protocol

from tonari.trainer.errors import ConfigError
from tonari.trainer.models.hub import Stored
from tonari.trainer.models.rotary import Rope

BLOCK_NAMES = {
    "attention_norm": "input_layernorm",
    "attention.q": "self_attn.q_proj",
    "attention.k": "self_attn.k_proj",
    "attention.v": "self_attn.v_proj",
    "attention.out": "self_attn.o_proj",
    "network_norm": "post_attention_layernorm",
    "network.gate": "mlp.gate_proj",
    "network.up": "mlp.up_proj",
    "network.down": "mlp.down_proj",
}
"""Of the layers of a block."""

FIXED: Mapping[str, object] = {
    "model_type": "llama",
    "hidden_act": "silu",
    "attention_bias": False,
    "mlp_bias": False,
}
"""What our model has no setting for."""

SIZES = {
    "vocabulary": "vocab_size",
    "width": "hidden_size",
    "depth": "num_hidden_layers",
    "heads": "num_attention_heads",
    "kv_heads": "num_key_value_heads",
    "inner_width": "intermediate_size",
    "head_width": "head_dim",
    "norm_eps": "rms_norm_eps",
    "tied": "tie_word_embeddings",
}
"""Our settings -> keys of ``config.json``."""

SCALING = {
    "factor": "factor",
    "low_freq_factor": "low_freq_factor",
    "high_freq_factor": "high_freq_factor",
    "original_length": "original_max_position_embeddings",
}
"""Fields of `Rope` -> keys of Llama 3.1's scaling."""


class Sized(Protocol):
    """What is asked of a Llama."""

    vocabulary: int
    sequence_length: int
    width: int
    num_blocks: int
    heads: int
    kv_heads: int
    inner_width: int
    head_width: int
    norm_eps: float
    tied: bool
    rope: Rope


def hub_names(num_blocks: int, *, tied: bool) -> dict[str, Stored]:
    """Say what each of our parameters is called there."""
    names = {"stem.tokens": "model.embed_tokens", "head.norm": "model.norm"}
    for number in range(num_blocks):
        for ours, theirs in BLOCK_NAMES.items():
            names[f"blocks.{number}.{ours}"] = f"model.layers.{number}.{theirs}"
    if not tied:
        names["head.linear"] = "lm_head"
    return {f"{ours}.weight": Stored(name=f"{theirs}.weight") for ours, theirs in names.items()}


def hub_config(model: Sized) -> dict[str, object]:
    """Say in the words of ``config.json`` what the model is."""
    rope = model.rope
    parameters: dict[str, object] = {"rope_type": "default", "rope_theta": rope.theta}
    if rope.factor != 1:
        parameters["rope_type"] = "llama3"
        parameters |= {theirs: getattr(rope, ours) for ours, theirs in SCALING.items()}
    sizes = vars(model) | {"depth": model.num_blocks}
    return {
        "architectures": ["LlamaForCausalLM"],
        **FIXED,
        **{theirs: sizes[ours] for ours, theirs in SIZES.items()},
        "max_position_embeddings": model.sequence_length,
        # Both ways that its versions write it.
        "rope_theta": rope.theta,
        "rope_scaling": parameters if rope.factor != 1 else None,
        "rope_parameters": parameters,
        "bos_token_id": None,
        "eos_token_id": None,
    }


def settings_of(config: Mapping[str, object], *, where: str) -> dict[str, object]:
    """Read our settings from what ``config.json`` says.

    Args:
        config: Its object.
        where: Its path, for errors.

    Raises:
        ConfigError: If it describes a model that ours cannot be.
    """
    for key, expected in FIXED.items():
        found = config.get(key, expected)
        if found != expected:
            raise ConfigError(
                f"{where}: {key} is {found!r}, expected {expected!r}, which is all that "
                'model.kind "llama" can be; give the weights of another model, or another '
                "model.kind"
            )
    settings = {
        ours: config[theirs] for ours, theirs in SIZES.items() if config.get(theirs) is not None
    }
    rope = _rope(config, where)
    # What LlamaConfig takes where its file is silent.
    return {"norm_eps": 1e-6, "rope": rope} | settings


def _rope(config: Mapping[str, object], where: str) -> Rope:
    parts = [config.get(key) for key in ("rope_scaling", "rope_parameters")]
    given = {key: value for part in parts if isinstance(part, dict) for key, value in part.items()}
    theta = given.get("rope_theta", config.get("rope_theta", 10000.0))
    kind = given.get("rope_type", given.get("type", "default"))
    if kind not in ("default", "llama3"):
        raise ConfigError(
            f'{where}: rope_type is {kind!r}, expected "default" or "llama3"; give the weights of '
            "a model with one of these"
        )
    scaling = {ours: given[theirs] for ours, theirs in SCALING.items() if theirs in given}
    return Rope(theta=theta, **scaling) if kind == "llama3" else Rope(theta=theta)
