"""Which engine runs a model: by name, or the first that gives the right tokens (rank)."""

from __future__ import annotations

import logging
from typing import TYPE_CHECKING, Any, Literal, TypeAlias

import torch

from nbdist.errors import ServeError
from nbdist.messages import Sampling
from nbdist.serve.adapt import HuggingFaceModel, adapted
from nbdist.serve.engine import EngineRequest
from nbdist.serve.native import NativeEngine
from nbdist.serve.reference import ReferenceEngine, continue_alone

if TYPE_CHECKING:
    from torch import nn

    from nbdist.serve.adapt import ServedModel
    from nbdist.serve.engine import Engine

__all__ = ["EngineName", "make_engine"]

_log = logging.getLogger(__name__)

EngineName: TypeAlias = Literal["auto", "native", "hf", "vllm", "reference"]

_PROBED = ("native", "vllm")  # the others run the model's own code
_PROBE_TOKENS = 3
# of the largest logit: below it, two tokens are as likely as each other for another summation order
_TIE = 1e-3


def make_engine(name: EngineName, model: nn.Module, **options: Any) -> Engine:
    """Return an engine for a model, after two prompts gave the tokens that they give alone.

    Args:
        name: `native`, `hf`, `reference`, `vllm`, or `auto` for the first of the others that can.
        model: in eval mode.
        **options: of the engine; those of `native` that another lacks are left out.

    Raises:
        ServeError: the named engine cannot run the model; the text says why and what can.
        ValueError: there is no engine of this name.
    """
    if name != "auto":
        return _checked(name, model, options)
    for candidate in ("native", "hf"):
        try:
            return _checked(candidate, model, options)
        except (ServeError, ImportError, AttributeError) as error:
            _log.warning("engine %r was not taken: %s", candidate, error)
    return _checked("reference", model, options)


def _checked(name: str, model: nn.Module, options: dict[str, Any]) -> Engine:
    engine = _made(name, model, options)
    if name not in _PROBED:
        return engine
    face = adapted(model)
    keeps = name == "native"  # it runs the adapted model itself
    try:
        if face.dtype is torch.float32:
            _probe(engine, face)
    except BaseException:
        keeps = False
        engine.close()
        raise
    finally:
        if isinstance(face, HuggingFaceModel) and not keeps:
            face.restore()
    return engine


def _made(name: str, model: nn.Module, options: dict[str, Any]) -> Engine:
    if name == "native":
        return NativeEngine(model, **options)
    shared = {key: options[key] for key in ("max_batch", "max_waiting") if key in options}
    if name == "hf":
        from nbdist.serve.hugging import HuggingFaceEngine

        return HuggingFaceEngine(model, **shared)
    if name == "vllm":
        from nbdist.serve.vllm import VllmEngine

        return VllmEngine(model, cache_tokens=options.get("cache_tokens"), **shared)
    if name == "reference":
        return ReferenceEngine(model, **shared)
    names = "'auto', 'native', 'hf', 'vllm' or 'reference'"
    raise ValueError(f"engine={name!r} is unknown; choose {names}")


def _probe(engine: Engine, face: ServedModel) -> None:
    """Run two prompts together and compare each with itself alone.

    Raises:
        ServeError: a token differs, and not for a tie.
    """
    room = min(face.context_length - _PROBE_TOKENS, 20)
    if room < 1:
        return
    ids = [n * 7 % face.vocab_size for n in range(room)]
    sampling = Sampling(temperature=0.0, max_new_tokens=_PROBE_TOKENS)
    requests = [
        EngineRequest(request_id=f"probe-{size}", prompt_ids=ids[:size], sampling=sampling)
        for size in (room, max(1, room // 3))
    ]
    made: dict[str, list[int]] = {request.request_id: [] for request in requests}
    for request in requests:
        engine.submit(request)
    while engine.num_requests:
        for output in engine.step():
            made[output.request_id] += output.token_ids
            if output.finish_reason != "error":
                continue
            if engine.name == "native":
                return  # weights that are not finite: they end each request with this text
            raise ServeError(
                f"engine {engine.name!r} was probed with two prompts, and one ended by: "
                f"{output.detail}; serve it with engine='native'"
            )
    for request in requests:
        _compare(engine.name, face, request, made[request.request_id])


@torch.inference_mode()
def _compare(name: str, face: ServedModel, request: EngineRequest, made: list[int]) -> None:
    alone, _ = continue_alone(face, request, _PROBE_TOKENS)
    differ = [at for at, pair in enumerate(zip(made, alone, strict=True)) if len(set(pair)) > 1]
    if not differ:
        return
    at = differ[0]
    ids = [*request.prompt_ids, *alone[:at]]
    logits = face.plain(torch.tensor([ids], device=face.device))[0, -1]
    gap = float(logits[alone[at]] - logits[made[at]])
    if gap <= _TIE * float(logits.abs().max()):
        return
    others = "'hf' or 'reference'" if isinstance(face, HuggingFaceModel) else "'reference'"
    raise ServeError(
        f"engine {name!r} was probed with a prompt of {len(request.prompt_ids)} tokens and gave "
        f"token {made[at]} where the model alone gives {alone[at]} at place {at}; serve it with "
        f"engine={others}"
    )
