"""Serves a model from a Hugging Face directory, or one of the rank's names (rank)."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Any, cast

import torch
from tokenizers import Tokenizer
from torch.distributed.tensor import DTensor

from nbdist.errors import ServeError
from nbdist.serve.order import ServeOrder
from nbdist.serve.ports import current_port
from nbdist.serve.replica import serve
from nbdist.serve.resident import GivenAway

if TYPE_CHECKING:
    from torch import nn

__all__ = ["carry_out", "load_directory"]


def carry_out(names: dict[str, Any], **order: Any) -> None:
    """Serve from this rank what a `ServeOrder` says; run on each of the order's ranks.

    Args:
        names: the rank's names.
        **order: the fields of a checked `ServeOrder`.

    Raises:
        ServeError: a name is missing, or the model cannot be served.
    """
    wanted = ServeOrder(**order)
    if wanted.is_directory:
        directory = Path(wanted.what)
        model: nn.Module = GivenAway(load_directory(directory))
        tokenizer = Tokenizer.from_file(str(directory / "tokenizer.json"))
        end_token = wanted.end_token or _end_token(directory, tokenizer)
    else:
        model, tokenizer = _named(names, wanted)
        end_token = wanted.end_token
    serve(
        model,
        tokenizer,
        wanted.name,
        engine=cast("Any", wanted.engine),
        weight_bits=cast("Any", wanted.weight_bits),
        speculation=cast("Any", wanted.speculation),
        max_batch=wanted.max_batch,
        max_waiting=wanted.max_waiting,
        cache_tokens=wanted.cache_tokens,
        end_token=end_token,
        tp=wanted.tp,
        share=wanted.share,
    )


def load_directory(directory: Path) -> nn.Module:
    """Read a decoder of transformers, in the type it is stored in, onto this rank's device.

    Only safetensors are read, which hold no code. There is one copy of the model; on a GPU, one
    more in host memory until it has moved. On a CPU transformers leaves the weights in the mapped
    files, where a file that is written again would end the process; so each is copied out.
    """
    import transformers

    num_bytes = sum(file.stat().st_size for file in directory.glob("*.safetensors"))
    sys.stdout.write(f"reading {num_bytes / 1e6:,.0f} MB of weights from {directory.name}\n")
    model = transformers.AutoModelForCausalLM.from_pretrained(
        directory, dtype="auto", local_files_only=True, use_safetensors=True
    )
    if torch.cuda.is_available():
        model = model.to(torch.device("cuda", torch.cuda.current_device()))
    else:
        for tensor in (*model.parameters(), *model.buffers()):
            tensor.data = tensor.data.clone()
    return cast("nn.Module", model)


def _named(names: dict[str, Any], wanted: ServeOrder) -> tuple[nn.Module, Any]:
    rank = current_port().rank
    asked = f"serve was to take `{wanted.what}` and `{wanted.tokenizer}` of rank {rank}"
    for name in (wanted.what, str(wanted.tokenizer)):
        if name not in names:
            raise ServeError(
                f"{asked}, and it has no name `{name}`; assign it in a %%distributed cell on all "
                "ranks that serve"
            )
    model, tokenizer = names[wanted.what], names[str(wanted.tokenizer)]
    if not isinstance(model, torch.nn.Module):
        raise ServeError(f"{asked}, and `{wanted.what}` is a {type(model).__name__}; name a module")
    num_ranks = names["world_size"]
    if wanted.num_ranks != num_ranks and any(isinstance(p, DTensor) for p in model.parameters()):
        raise ServeError(
            f"{asked} on {wanted.num_ranks} of {num_ranks} ranks, and it is sharded: all ranks "
            "must give their shards; leave the number of replicas out"
        )
    return model, tokenizer


def _end_token(directory: Path, tokenizer: Tokenizer) -> str | None:
    """Return what ends an answer: by the tokenizer's files, else by the model's."""
    told = _read(directory / "tokenizer_config.json").get("eos_token")
    token = told.get("content") if isinstance(told, dict) else told
    if isinstance(token, str):
        return token
    for name in ("generation_config.json", "config.json"):
        ids = _read(directory / name).get("eos_token_id")
        first = ids[0] if isinstance(ids, list) and ids else ids
        if isinstance(first, int):
            return tokenizer.id_to_token(first)
    return None


def _read(path: Path) -> dict[str, Any]:
    if not path.is_file():
        return {}
    return cast("dict[str, Any]", json.loads(path.read_text(encoding="utf-8")))
