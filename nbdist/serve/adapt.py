"""One face for the models that `native` runs: nbdist's decoder and Hugging Face decoders (rank).

A Hugging Face model is run as it is: its attention is asked, through transformers' own attention
interface, to call ours. No model code is copied.
"""

from __future__ import annotations

import contextlib
import threading
from typing import TYPE_CHECKING, Any, Protocol, cast

import torch

from nbdist.errors import ServeError
from nbdist.serve.lean import lean_forward
from nbdist.serve.pages import LayerShape

if TYPE_CHECKING:
    from collections.abc import Iterator

    from torch import Tensor, nn

    from nbdist.serve.lean import LeanForward
    from nbdist.serve.pages import PackedStep
    from nbdist.train.models.decoder import AttentionCache

__all__ = ["ServedModel", "adapted"]

_ATTENTION = "nbdist_paged"
_step = threading.local()  # what our attention function works on: the step of the calling thread


class ServedModel(Protocol):
    """A decoder language model as the runner sees it.

    Attributes:
        layers: what each attention layer stores.
        vocab_size: token ids are below it.
        context_length: most tokens of a row.
    """

    layers: list[LayerShape]
    vocab_size: int
    context_length: int
    dtype: torch.dtype
    device: torch.device

    def forward(self, tokens: Tensor, positions: Tensor, step: PackedStep, keep: Tensor) -> Tensor:
        """Return the logits (K, V) at the places `keep` (K,) of tokens and positions (1, T)."""
        ...

    def plain(self, tokens: Tensor) -> Tensor:
        """Return all logits (B, T, V) of tokens (B, T) without a cache: the reference."""
        ...


def adapted(model: nn.Module) -> ServedModel:
    """Return the face of a model; the model's own attention setting may be changed.

    Raises:
        ServeError: the model is of no kind that can be served.
    """
    if _is_hugging_face(model):
        return HuggingFaceModel(model)
    return NativeModel(model)


class NativeModel:
    """A `DecoderLM`, or a module with the same `config` and `forward`."""

    def __init__(self, model: nn.Module) -> None:
        config: Any = model.config
        weight = next(model.parameters())
        self._model = model
        # fewer where tensor parallelism cuts them
        num_kv_heads = getattr(model, "num_local_kv_heads", config.num_kv_heads)
        self.layers = [LayerShape(num_kv_heads, config.head_size)] * config.num_layers
        self.vocab_size: int = config.vocab_size
        self.context_length: int = config.context_length
        self.dtype, self.device = weight.dtype, weight.device

    def forward(
        self, tokens: Tensor, positions: Tensor, step: AttentionCache, keep: Tensor
    ) -> Tensor:
        """See `ServedModel.forward`."""
        logits: Tensor = self._model(tokens, positions, step, keep)
        return logits[0]

    def plain(self, tokens: Tensor) -> Tensor:
        """See `ServedModel.plain`."""
        logits: Tensor = self._model(tokens)
        return logits


class HuggingFaceModel:
    """A decoder of transformers; which layers it has is seen by a first forward."""

    def __init__(self, model: nn.Module) -> None:
        from transformers import AttentionInterface

        AttentionInterface.register(_ATTENTION, _attention)
        self._model: Any = model
        config: Any = model.config
        own = str(config._attn_implementation)
        self._own_attention = "sdpa" if own == _ATTENTION else own  # adapted before
        weight = next(model.parameters())
        text_config = config.get_text_config()
        self.vocab_size: int = text_config.vocab_size
        self.context_length: int = getattr(text_config, "max_position_embeddings", 2**20)
        self.dtype, self.device = weight.dtype, weight.device
        self._lean: LeanForward | None = None
        seen = self._see_layers()
        self.layers = seen.shapes
        with self.own_attention():
            self._lean = lean_forward(model, seen.options)

    def forward(
        self, tokens: Tensor, positions: Tensor, step: PackedStep | _Watcher, keep: Tensor
    ) -> Tensor:
        """See `ServedModel.forward`."""
        if self._lean is not None:
            return self._lean(tokens, positions, step, keep)
        _step.value = step
        try:
            answer = self._model(
                input_ids=tokens, position_ids=positions, use_cache=False, logits_to_keep=keep
            )
        finally:
            _step.value = None
        logits: Tensor = answer.logits[0]
        return logits

    def plain(self, tokens: Tensor) -> Tensor:
        """See `ServedModel.plain`."""
        with self.own_attention():
            logits: Tensor = self._model(input_ids=tokens, use_cache=False).logits
        return logits

    def restore(self) -> None:
        """Give the model back as it was."""
        self._model.set_attn_implementation(self._own_attention)

    @contextlib.contextmanager
    def own_attention(self) -> Iterator[None]:
        """Let the model attend as it did before it was adapted."""
        self.restore()
        try:
            yield
        finally:
            self._model.set_attn_implementation(_ATTENTION)

    @torch.inference_mode()
    def _see_layers(self) -> _Watcher:
        self._model.set_attn_implementation(_ATTENTION)
        watcher = _Watcher()
        one = torch.zeros(1, 1, dtype=torch.long, device=self.device)
        try:
            self.forward(one, one, watcher, one[0])
        except (TypeError, ValueError, NotImplementedError) as error:
            self.restore()
            raise self._cannot(f"its forward raised {type(error).__name__}: {error}") from error
        if watcher.indices != list(range(len(watcher.indices))) or not watcher.indices:
            self.restore()
            raise self._cannot(f"its attention layers {watcher.indices} do not go through it")
        return watcher

    def _cannot(self, why: str) -> ServeError:
        return ServeError(
            f"{type(self._model).__name__} cannot run on the `native` engine through transformers' "
            f"attention interface: {why}; serve it with engine='reference'"
        )


class _Watcher:
    """Stands in for a step and notes which layers store what, and how they attend."""

    def __init__(self) -> None:
        self.indices: list[int] = []
        self.shapes: list[LayerShape] = []
        self.options: list[dict[str, Any]] = []

    def attend(
        self, layer_index: int, query: Tensor, key: Tensor, value: Tensor, **options: Any
    ) -> Tensor:
        self.indices.append(layer_index)
        self.shapes.append(LayerShape(key.shape[1], key.shape[3]))
        self.options.append(options)
        # one token attends to itself
        return value.repeat_interleave(query.shape[1] // key.shape[1], dim=1)


def _attention(  # noqa: PLR0917 - transformers' interface
    module: Any,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,  # the interface's; ours knows what a row may see
    scaling: float | None = None,
    sliding_window: int | None = None,
    **options: Any,
) -> tuple[Tensor, None]:
    """What transformers calls in each layer; query (1, H, T, D), answer (1, T, H, D)."""
    for name in ("softcap", "s_aux"):
        if options.get(name) is not None:
            raise NotImplementedError(f"attention with `{name}` is not built in")
    step = cast("PackedStep", _step.value)
    window = sliding_window or getattr(module, "sliding_window", None)
    out = step.attend(module.layer_idx, query, key, value, scale=scaling, window=window)
    return out.transpose(1, 2), None


def _is_hugging_face(model: nn.Module) -> bool:
    return any(c.__module__.startswith("transformers.") for c in type(model).__mro__)
