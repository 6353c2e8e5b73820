"""The engines on the same traffic, one after the other in turns (anywhere; no world needed).

    python benchmarks/serve.py --repeats 3 --rates 0 8 16
    python benchmarks/serve.py --lengths long-tail --requests 128 --rates 0
    python benchmarks/serve.py --model FOLDER --engines native hf vllm --rates 0 1

A tiny random Llama, float32, one thread, greedy, no end token: all engines make the same tokens,
which is checked. `--model` takes a decoder from a folder, in its own type; in 16 bits, rounding
depends on the batch, so tokens are not compared. Lengths are `mixed` (three of four answers have 8
to 32 tokens, the rest 64 to 128) or `long-tail` (log-normal, median 24, sigma 1.2, at most 384:
one in a hundred has 384). A rate of 0 is a burst, others are Poisson arrivals a second. The clock
is the processor time of this process, and jumps over idle time: other load on the machine does not
count. `reference` is static batching through transformers' `generate`: it takes what waits and runs
it to its end. `ngram` is `native` that guesses by n-grams; greedy answers of random weights repeat
themselves, so it is traffic that is easily guessed. `vllm` needs vLLM, which computes in a process
of its own, whose time counts.
"""

from __future__ import annotations

import argparse
import json
import math
import os
import random
import statistics
import time
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")

import torch
from transformers import AutoModelForCausalLM, LlamaConfig, LlamaForCausalLM, logging

from nbdist.messages import Sampling
from nbdist.serve.engine import Engine, EngineRequest
from nbdist.serve.hugging import HuggingFaceEngine
from nbdist.serve.native import NativeEngine
from nbdist.serve.reference import ReferenceEngine
from nbdist.serve.speculative import NGramProposer, Speculation
from nbdist.serve.vllm import VllmEngine

if TYPE_CHECKING:
    from collections.abc import Callable

    from transformers import PreTrainedModel


def guessing(model: PreTrainedModel, **options: int) -> NativeEngine:
    guesses = Speculation(NGramProposer(), clock=time.process_time)
    return NativeEngine(model, speculation=guesses, clock=time.process_time, **options)


ENGINES = {
    "native": NativeEngine,
    "hf": HuggingFaceEngine,
    "reference": ReferenceEngine,
    "ngram": guessing,
    "vllm": VllmEngine,
}


def tiny_llama() -> LlamaForCausalLM:
    torch.manual_seed(0)
    return LlamaForCausalLM(
        LlamaConfig(
            vocab_size=8192,
            hidden_size=256,
            intermediate_size=688,
            num_hidden_layers=4,
            num_attention_heads=4,
            num_key_value_heads=2,
            max_position_embeddings=512,
            bos_token_id=None,
            eos_token_id=None,
        )
    ).eval()


def answer_length(rng: random.Random, lengths: str) -> int:
    if lengths == "long-tail":
        return max(1, min(384, round(rng.lognormvariate(math.log(24), 1.2))))
    return rng.randrange(8, 33) if rng.random() < 0.75 else rng.randrange(64, 129)


def traffic(
    seed: int, number: int, rate: float, lengths: str, vocab_size: int
) -> list[tuple[float, EngineRequest]]:
    """Prompts of 8 to 96 random tokens, with answers of the lengths that the module text says."""
    rng = random.Random(seed)
    at, made = 0.0, []
    for index in range(number):
        at += rng.expovariate(rate) if rate else 0.0
        tokens = answer_length(rng, lengths)
        prompt = [rng.randrange(vocab_size) for _ in range(rng.randrange(8, 97))]
        sampling = Sampling(temperature=0.0, max_new_tokens=tokens)
        request = EngineRequest(request_id=f"r{index}", prompt_ids=prompt, sampling=sampling)
        made.append((at, request))
    return made


@dataclass
class Run:
    """Tokens, and seconds from arrival to the first token and to the last, by request."""

    tokens: dict[str, list[int]] = field(default_factory=dict)
    first: dict[str, float] = field(default_factory=dict)
    whole: dict[str, float] = field(default_factory=dict)
    seconds: float = 0.0


def clock_of(engine: Engine) -> Callable[[], float]:
    """Return the processor time of this process, and of the engine's own when it has one."""
    if not isinstance(engine, VllmEngine):
        return time.process_time
    theirs = (~engine.process_id << 3) | 2  # clock_getcpuclockid(3) on Linux
    return lambda: time.process_time() + time.clock_gettime(theirs)


def drive(engine: Engine, arrivals: list[tuple[float, EngineRequest]]) -> Run:
    run, waiting, now, clock = Run(), list(arrivals), 0.0, clock_of(engine)
    came = {request.request_id: at for at, request in arrivals}
    while waiting or engine.num_requests:
        if not engine.num_requests and waiting[0][0] > now:
            now = waiting[0][0]
        began = clock()
        while waiting and waiting[0][0] <= now:
            engine.submit(waiting.pop(0)[1])
        outputs = engine.step()
        now += clock() - began
        for output in outputs:
            name = output.request_id
            run.tokens.setdefault(name, []).extend(output.token_ids)
            run.first.setdefault(name, now - came[name])
            run.whole[name] = now - came[name]
    run.seconds = now
    return run


def percentile(values: list[float], share: float) -> float:
    ordered = sorted(values)
    return ordered[min(len(ordered) - 1, int(share * len(ordered)))]


def figures(run: Run) -> dict[str, float]:
    made = sum(len(tokens) for tokens in run.tokens.values())
    return {
        "tokens/s": made / run.seconds,
        "P50 ms": percentile(list(run.whole.values()), 0.5) * 1000,
        "P95 ms": percentile(list(run.whole.values()), 0.95) * 1000,
        "P99 ms": percentile(list(run.whole.values()), 0.99) * 1000,
        "first token P50 ms": percentile(list(run.first.values()), 0.5) * 1000,
    }


def load(folder: str) -> PreTrainedModel:
    return AutoModelForCausalLM.from_pretrained(folder).eval() if folder else tiny_llama()


def arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--requests", type=int, default=64)
    parser.add_argument("--max-batch", type=int, default=16)
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--rates", type=float, nargs="+", default=[0.0, 8.0, 16.0])
    parser.add_argument("--engines", nargs="+", default=list(ENGINES)[:3], choices=list(ENGINES))
    parser.add_argument("--lengths", default="mixed", choices=["mixed", "long-tail"])
    parser.add_argument("--model", default="", metavar="FOLDER")
    parser.add_argument("--json", action="store_true")
    return parser.parse_args()


def main() -> None:
    args = arguments()
    torch.set_num_threads(1)
    logging.set_verbosity_error()
    options = {"max_batch": args.max_batch, "max_waiting": args.requests}
    seen: dict[float, dict[str, list[dict[str, float]]]] = {}
    for repeat in range(args.repeats):
        for rate in args.rates:
            tokens = {}
            for name in args.engines:
                model = load(args.model)
                engine = ENGINES[name](model, **options)
                kind = (args.lengths, model.config.vocab_size)
                drive(engine, traffic(99, 4, 0, *kind))  # warm up
                run = drive(engine, traffic(repeat, args.requests, rate, *kind))
                engine.close()
                tokens[name] = run.tokens
                seen.setdefault(rate, {}).setdefault(name, []).append(figures(run))
            same = all(made == tokens[args.engines[0]] for made in tokens.values())
            assert same or model.dtype is not torch.float32, "tokens differ"
    medians = {
        rate: {
            name: {key: statistics.median(run[key] for run in runs) for key in runs[0]}
            for name, runs in by_name.items()
        }
        for rate, by_name in seen.items()
    }
    if args.json:
        print(json.dumps(medians))
        return
    for rate, by_name in medians.items():
        print(f"\n{args.requests} requests, {'a burst' if not rate else f'{rate:g} a second'}")
        for name, values in by_name.items():
            print(f"{name:>10}  " + "  ".join(f"{k} {v:.0f}" for k, v in values.items()))


if __name__ == "__main__":
    main()
