"""A stand-in for vLLM: the next token is the last one plus the step that the weights name.

It takes only what the `vllm` engine may give, so that a wrong argument shows, and makes the one
place `vllm` all the modules that are imported from it.
"""

from __future__ import annotations

import json
import os
import sys
import types
from dataclasses import dataclass, field
from enum import Enum
from pathlib import Path
from types import SimpleNamespace


@dataclass(kw_only=True)
class EngineArgs:
    model: str
    dtype: str
    max_model_len: int
    max_num_seqs: int
    block_size: int
    num_gpu_blocks_override: int
    kv_cache_memory_bytes: int
    enforce_eager: bool
    skip_tokenizer_init: bool
    generation_config: str
    disable_log_stats: bool
    seed: int


class RequestOutputKind(Enum):
    DELTA = 1


@dataclass(kw_only=True)
class SamplingParams:
    temperature: float
    presence_penalty: float
    frequency_penalty: float
    repetition_penalty: float
    top_k: int
    top_p: float
    seed: int | None
    logprobs: int | None
    max_tokens: int
    stop_token_ids: list[int]
    ignore_eos: bool
    detokenize: bool
    output_kind: RequestOutputKind


class ModelRegistry:
    @staticmethod
    def get_supported_archs():
        return {"LlamaForCausalLM": None}.keys()


@dataclass
class Row:
    tokens: list[int]
    params: SamplingParams
    num_made: int = 0


@dataclass
class LLMEngine:
    args: EngineArgs
    stride: int
    rows: dict[str, Row] = field(default_factory=dict)

    @classmethod
    def from_engine_args(cls, args):
        return cls(args, read_stride(args.model))

    def has_unfinished_requests(self):
        return bool(self.rows)

    def add_request(self, request_id, prompt, params):
        if 66 in prompt["prompt_token_ids"]:
            raise ValueError("66 is refused")
        self.rows[request_id] = Row(list(prompt["prompt_token_ids"]), params)

    def abort_request(self, request_ids):
        for request_id in request_ids:
            del self.rows[request_id]

    def collective_rpc(self, method, kwargs):
        assert method == "reload_weights"
        self.stride = read_stride(kwargs["weights_path"])

    def reset_prefix_cache(self, reset_running_requests):
        assert reset_running_requests

    def step(self):
        return [self.advance(name) for name in list(self.rows)[: self.args.max_num_seqs]]

    def advance(self, name):
        row = self.rows[name]
        if row.tokens[-1] == 77:
            os._exit(3)  # as a crash in native code would
        token = row.tokens[-1] + self.stride
        row.tokens.append(token)
        row.num_made += 1
        reason = None
        if token in row.params.stop_token_ids:
            reason = "stop"
        elif row.num_made == row.params.max_tokens:
            reason = "length"
        if reason:
            del self.rows[name]
        place = {token: SimpleNamespace(logprob=-0.5), 0: SimpleNamespace(logprob=-1.5)}
        answer = SimpleNamespace(token_ids=[token], finish_reason=reason, logprobs=[place])
        return SimpleNamespace(request_id=name, outputs=[answer])


def read_stride(folder):
    """The feed-forward size stands for the weights: a test can change it in place."""
    return json.loads(Path(folder, "config.json").read_text())["intermediate_size"] // 16


for name in ("sampling_params", "model_executor.models.registry", "v1.engine.llm_engine"):
    sys.modules[f"vllm.{name}"] = sys.modules["vllm"]
    for parent in ("model_executor", "model_executor.models", "v1", "v1.engine"):
        sys.modules.setdefault(f"vllm.{parent}", types.ModuleType(f"vllm.{parent}"))
