"""`DecoderLM` is a Llama under other names: the names and the configuration (no rank needed)."""

from __future__ import annotations

import re
from typing import Any

from nbdist.errors import CheckpointError
from nbdist.train.models import DecoderConfig

__all__ = ["llama_config", "llama_name"]

_WHOLE = {
    "embedding.weight": "model.embed_tokens.weight",
    "norm.weight": "model.norm.weight",
    "head.weight": "lm_head.weight",
}
_IN_LAYER = {
    "attention_norm": "input_layernorm",
    "attention.query": "self_attn.q_proj",
    "attention.key": "self_attn.k_proj",
    "attention.value": "self_attn.v_proj",
    "attention.output": "self_attn.o_proj",
    "ffn_norm": "post_attention_layernorm",
    "ffn.gate": "mlp.gate_proj",
    "ffn.up": "mlp.up_proj",
    "ffn.down": "mlp.down_proj",
}


def llama_name(name: str) -> str:
    """Return what transformers' Llama calls a weight of `DecoderLM`.

    Raises:
        CheckpointError: a Llama has no such weight.
    """
    if name in _WHOLE:
        return _WHOLE[name]
    found = re.fullmatch(r"layers\.(\d+)\.(.+)\.weight", name)
    if found is None or found[2] not in _IN_LAYER:
        raise CheckpointError(
            f"the weight `{name}` has no place in a Llama, which is what a DecoderLM is outside "
            "nbdist; a model with experts, or a DecoderLM inside another module, stays in "
            "nbdist's own checkpoints"
        )
    return f"model.layers.{found[1]}.{_IN_LAYER[found[2]]}.weight"


def llama_config(config: DecoderConfig) -> dict[str, Any]:
    """Return the content of a Llama's config.json that computes what a `DecoderLM` does."""
    return {
        "architectures": ["LlamaForCausalLM"],
        "model_type": "llama",
        "vocab_size": config.vocab_size,
        "hidden_size": config.hidden_size,
        "intermediate_size": config.ffn_size,
        "num_hidden_layers": config.num_layers,
        "num_attention_heads": config.num_heads,
        "num_key_value_heads": config.num_kv_heads,
        "head_dim": config.head_size,
        "max_position_embeddings": config.context_length,
        "rms_norm_eps": config.norm_eps,
        "rope_theta": config.rope_theta,
        "hidden_act": "silu",
        "attention_bias": False,
        "mlp_bias": False,
        "tie_word_embeddings": config.tie_embeddings,
    }
