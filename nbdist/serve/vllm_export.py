"""A served model as a directory that vLLM loads (rank).

vLLM builds its own module from the name of an architecture. A Hugging Face decoder brings that
name; nbdist's decoder is a Llama under other names of the same weights.
"""

from __future__ import annotations

import json
from typing import TYPE_CHECKING, Any

from safetensors.torch import save_file

from nbdist.errors import ServeError
from nbdist.serve.quantise import Int4Linear, Int8Linear
from nbdist.train.models.decoder import DecoderLM

if TYPE_CHECKING:
    from pathlib import Path

    from torch import nn

    from nbdist.train.models.decoder import DecoderConfig

__all__ = ["check_exportable", "export"]

# in this order: an `attention.` is renamed after the longer names that hold it
_LLAMA_NAMES = (
    ("embedding.", "model.embed_tokens."),
    ("attention_norm.", "input_layernorm."),
    ("ffn_norm.", "post_attention_layernorm."),
    ("attention.query.", "self_attn.q_proj."),
    ("attention.key.", "self_attn.k_proj."),
    ("attention.value.", "self_attn.v_proj."),
    ("attention.output.", "self_attn.o_proj."),
    ("ffn.gate.", "mlp.gate_proj."),
    ("ffn.up.", "mlp.up_proj."),
    ("ffn.down.", "mlp.down_proj."),
)


def check_exportable(model: nn.Module) -> None:
    """Refuse, before anything is written, a model that vLLM has no module for.

    Raises:
        ServeError: its weights are rounded, or it is neither of transformers nor a dense
            `DecoderLM`.
    """
    if any(isinstance(module, Int8Linear | Int4Linear) for module in model.modules()):
        raise ServeError(
            "engine='vllm' was asked for a model with `weight_bits`, and vLLM has no layer for "
            "nbdist's rounded weights; serve it with weight_bits=None, or with engine='native'"
        )
    if hasattr(model, "save_pretrained"):
        return
    if type(model) is not DecoderLM or model.config.num_experts:
        experts = " with experts" if isinstance(model, DecoderLM) else ""
        raise ServeError(
            f"engine='vllm' was asked for a {type(model).__name__}{experts}, and vLLM knows no "
            "such architecture; it runs decoders of transformers and a DecoderLM without experts; "
            "serve this one with engine='native'"
        )


def export(model: Any, folder: Path) -> None:
    """Write the model's config and its weights as safetensors into a directory that is there.

    Args:
        model: one that `check_exportable` lets through.
        folder: empty, or with an earlier export of the same model.
    """
    if hasattr(model, "save_pretrained"):
        _save_pretrained(model, folder)
        return
    weights = {_llama_name(name): w.contiguous() for name, w in model.state_dict().items()}
    save_file(weights, folder / "model.safetensors", metadata={"format": "pt"})
    dtype = str(next(model.parameters()).dtype).removeprefix("torch.")
    config = json.dumps(_llama_config(model.config) | {"dtype": dtype})
    (folder / "config.json").write_text(config, encoding="utf-8")


def _save_pretrained(model: Any, folder: Path) -> None:
    """Let transformers write, without a bar in the user's cell."""
    from transformers.utils import logging

    has_bar = logging.is_progress_bar_enabled()
    logging.disable_progress_bar()
    try:
        model.save_pretrained(folder)
    finally:
        if has_bar:
            logging.enable_progress_bar()


def _llama_name(name: str) -> str:
    for ours, theirs in _LLAMA_NAMES:
        if ours in name:
            name = name.replace(ours, theirs)
            break
    if name.startswith("head."):
        return f"lm_{name}"
    return name if name.startswith("model.") else f"model.{name}"


def _llama_config(config: DecoderConfig) -> dict[str, Any]:
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
        "rope_parameters": {"rope_type": "default", "rope_theta": config.rope_theta},
        "tie_word_embeddings": config.tie_embeddings,
        "hidden_act": "silu",
        "attention_bias": False,
        "mlp_bias": False,
        "bos_token_id": None,
        "eos_token_id": None,
    }
