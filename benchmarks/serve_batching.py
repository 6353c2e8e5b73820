"""A burst of requests, run together and one at a time, on one replica (anywhere; no world needed).

    python benchmarks/serve_batching.py --requests 32 --repeats 3

Both ways use the same replica code, weights and prompts, greedy and without an end token, so they
make the same tokens; only `max_batch` differs. The two alternate, and the medians are compared.
"""

from __future__ import annotations

import argparse
import statistics
import time

import torch
from tokenizers import Tokenizer, decoders, models, pre_tokenizers

from nbdist.serve import Router, serve
from nbdist.serve.loopback import LoopbackRanks
from nbdist.train.models.decoder import DecoderConfig, DecoderLM


def byte_tokenizer() -> Tokenizer:
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    tokenizer = Tokenizer(models.BPE(vocab={c: i for i, c in enumerate(alphabet)}, merges=[]))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    return tokenizer


def run_burst(model: DecoderLM, prompts: list[str], *, max_batch: int, tokens: int) -> dict:
    with LoopbackRanks(1) as ranks:
        replica = serve(model, byte_tokenizer(), max_batch=max_batch, port=ranks.ports[0])
        router = Router(ranks)
        router.submit("warm up", max_new_tokens=2).result(60)
        started = time.perf_counter()
        made = router.generate(prompts, temperature=0.0, max_new_tokens=tokens)
        seconds = time.perf_counter() - started
        replica.stop()
    return {
        "tokens_per_second": sum(g.num_tokens for g in made) / seconds,
        "first_token_seconds": statistics.median(g.first_token_seconds for g in made),
        "texts": [g.text for g in made],
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--requests", type=int, default=32)
    parser.add_argument("--tokens", type=int, default=48)
    parser.add_argument("--max-batch", type=int, default=16)
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    args = parser.parse_args()

    torch.set_num_threads(1)
    model = DecoderLM(DecoderConfig.small(256, context_length=128)).to(args.device)
    prompts = ["a" * (4 + 5 * (i % 12)) + chr(97 + i % 26) for i in range(args.requests)]
    results: dict[int, list[dict]] = {1: [], args.max_batch: []}
    for _ in range(args.repeats):
        for max_batch, runs in results.items():
            runs.append(run_burst(model, prompts, max_batch=max_batch, tokens=args.tokens))
    print(f"{args.requests} requests, {args.tokens} tokens each, {args.device}, 1 thread")
    print("max_batch  tokens/s  median first token (ms)")
    medians = {}
    for max_batch, runs in results.items():
        medians[max_batch] = statistics.median(run["tokens_per_second"] for run in runs)
        first = statistics.median(run["first_token_seconds"] for run in runs) * 1000
        print(f"{max_batch:9d}  {medians[max_batch]:8.0f}  {first:10.0f}")
    equal = sum(
        a == b
        for a, b in zip(results[1][0]["texts"], results[args.max_batch][0]["texts"], strict=True)
    )
    print(f"ratio {medians[args.max_batch] / medians[1]:.2f}; {equal}/{args.requests} texts equal")


if __name__ == "__main__":
    main()
