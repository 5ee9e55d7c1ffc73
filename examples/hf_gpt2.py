r"""Hugging Face's GPT-2, tied embeddings and dropout included, on any mesh.

    pip install '.[hf]'
    tonari train examples/hf_gpt2.toml data.train=PATH/tinyshakespeare.txt
    mpiexec -n 2 tonari train ... mesh.pp=2        # cut between its blocks
    mpiexec -n 2 tonari train ... mesh.tp=2

Run from the directory that holds ``examples``.
"""

from transformers import GPT2Config, GPT2LMHeadModel

from tonari.trainer import Adapted
from tonari.trainer.models.styles import Conv1D


def gpt2(width: int = 64, depth: int = 4, heads: int = 4) -> Adapted:
    """Make a GPT-2 of bytes, and say where its blocks are and how tp splits them."""
    config = GPT2Config(
        vocab_size=256, n_positions=1024, n_embd=width, n_layer=depth, n_head=heads,
        use_cache=False, bos_token_id=0, eos_token_id=0,
    )  # fmt: skip
    split = {
        "transformer.h.*.mlp.c_fc": Conv1D("outputs"),
        "transformer.h.*.mlp.c_proj": Conv1D("inputs"),
    }
    return Adapted(GPT2LMHeadModel(config), layers="transformer.h", tp_plan=split)
