"""The process that runs vLLM for the `vllm` engine: a line in, a line out (child of a rank).

vLLM takes a process for its own: it replaces functions of torch, makes a process group, and takes
memory by its own rules. So it gets one. The rank holds the other end of a socket pair, and each
line of JSON on it has one answer; the process ends when the rank's end is closed. What listens is
vLLM's own process group, on loopback.
"""

from __future__ import annotations

import json
import logging
import socket
import sys
from pathlib import Path
from typing import Any

__all__ = ["VllmCore", "main"]

_log = logging.getLogger(__name__)


class VllmCore:
    """vLLM's engine in this process, over a directory that holds a model.

    Args:
        folder: with config.json and safetensors.
        options: of vLLM's `EngineArgs`.

    Raises:
        ValueError: vLLM knows no such architecture.
    """

    def __init__(self, folder: str, options: dict[str, Any]) -> None:
        from vllm import EngineArgs
        from vllm.model_executor.models.registry import ModelRegistry
        from vllm.v1.engine.llm_engine import LLMEngine

        config = json.loads(Path(folder, "config.json").read_text(encoding="utf-8"))
        known = ModelRegistry.get_supported_archs()
        if not set(config.get("architectures") or ()) & set(known):
            raise ValueError(
                f"vLLM has no {config.get('architectures')} among the {len(known)} architectures "
                "that it knows, such as LlamaForCausalLM, Qwen3ForCausalLM and GPT2LMHeadModel"
            )
        self._engine: Any = LLMEngine.from_engine_args(EngineArgs(model=folder, **options))

    def answer(self, asked: dict[str, Any]) -> dict[str, Any]:
        """Do what a message asks: `reload` weights of a directory, or take a step."""
        if folder := asked.get("reload"):
            self._engine.collective_rpc("reload_weights", kwargs={"weights_path": folder})
            # rows that run are computed anew: their keys are of the old weights
            self._engine.reset_prefix_cache(reset_running_requests=True)
            return {}
        if asked["drop"]:
            self._engine.abort_request(asked["drop"])
        outputs = [refused for one in asked["add"] if (refused := self._add(one))]
        if self._engine.has_unfinished_requests():
            outputs += [_output(one) for one in self._engine.step()]
        return {"outputs": outputs}

    def _add(self, asked: dict[str, Any]) -> dict[str, Any] | None:
        from vllm import SamplingParams
        from vllm.sampling_params import RequestOutputKind

        params = SamplingParams(
            **asked["sampling"],
            ignore_eos=True,
            detokenize=False,
            output_kind=RequestOutputKind.DELTA,
        )
        prompt = {"prompt_token_ids": asked["prompt"]}
        try:
            self._engine.add_request(asked["id"], prompt, params)
        except ValueError as error:
            return {"id": asked["id"], "tokens": [], "logprobs": [], "error": str(error)}
        return None


def _output(made: Any) -> dict[str, Any]:
    [answer] = made.outputs
    tokens = list(answer.token_ids)
    places = answer.logprobs or ()
    return {
        "id": made.request_id,
        "tokens": tokens,
        "logprobs": [_logprobs(*pair) for pair in zip(tokens, places, strict=False)],
        "error": f"vLLM ended it by {answer.finish_reason!r}" if _is_odd(answer) else "",
    }


def _is_odd(answer: Any) -> bool:
    return answer.finish_reason not in {None, "stop", "length"}


def _logprobs(token: int, place: Any) -> dict[str, Any]:
    """Return the chosen token's log-probability, and all that are known here, best first."""
    best = sorted(place.items(), key=lambda pair: (-pair[1].logprob, pair[0]))
    return {
        "chosen": place[token].logprob,
        "ids": [name for name, _ in best],
        "values": [one.logprob for _, one in best],
    }


def main() -> None:
    """Serve the socket whose number is the argument; the first line says what to load."""
    core: VllmCore | None = None
    with socket.socket(fileno=int(sys.argv[1])) as wire, wire.makefile("rw") as lines:
        while line := lines.readline():
            asked = json.loads(line)
            try:
                if core is None:
                    core, answer = VllmCore(**asked), {}
                else:
                    answer = core.answer(asked)
            except Exception as error:
                _log.exception("vLLM failed")
                lines.write(json.dumps({"failed": f"{type(error).__name__}: {error}"}) + "\n")
                lines.flush()
                raise
            lines.write(json.dumps(answer) + "\n")
            lines.flush()


if __name__ == "__main__":
    main()
