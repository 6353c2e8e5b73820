"""Served weights whole, in 8 and 4 bits: loss on real text, memory, speed (anywhere; no world).

    python benchmarks/quantised.py --seconds 60 --repeats 3

A small decoder is trained on the Shakespeare corpus that nbdist carries, by bytes, for a while. Its
last tenth is held out. The loss is that of the held-out text; speed is one greedy answer on the
`native` engine, with one thread, the three ways taking turns.
"""

from __future__ import annotations

import argparse
import math
import statistics
import time
from copy import deepcopy
from pathlib import Path

import torch
from torch.nn import functional

import nbdist.train
from nbdist.messages import Sampling
from nbdist.serve.engine import EngineRequest
from nbdist.serve.native import NativeEngine
from nbdist.serve.quantise import quantise, weight_bytes
from nbdist.train.models.decoder import DecoderConfig, DecoderLM

CONTEXT = 128


def corpus() -> tuple[torch.Tensor, torch.Tensor]:
    path = Path(nbdist.train.__file__).parent / "corpora" / "shakespeare.txt"
    tokens = torch.tensor(list(path.read_bytes()))
    cut = len(tokens) * 9 // 10
    return tokens[:cut], tokens[cut:]


def trained(tokens: torch.Tensor, seconds: float, hidden_size: int) -> DecoderLM:
    config = DecoderConfig(
        vocab_size=256, hidden_size=hidden_size, context_length=CONTEXT, tie_embeddings=False
    )
    model = DecoderLM(config, seed=0)
    optimizer = torch.optim.AdamW(model.parameters(), lr=2e-3)
    random = torch.Generator().manual_seed(0)
    began = time.perf_counter()
    while (spent := time.perf_counter() - began) < seconds:
        optimizer.param_groups[0]["lr"] = 2e-3 * (1 + math.cos(math.pi * spent / seconds)) / 2
        starts = torch.randint(len(tokens) - CONTEXT - 1, (8, 1), generator=random)
        rows = tokens[starts + torch.arange(CONTEXT + 1)]
        optimizer.zero_grad()
        logits = model(rows[:, :-1])
        functional.cross_entropy(logits.flatten(0, 1), rows[:, 1:].flatten()).backward()
        optimizer.step()
    return model.eval().requires_grad_(requires_grad=False)


@torch.inference_mode()
def loss(model: DecoderLM, tokens: torch.Tensor, num_rows: int) -> float:
    rows = tokens[: num_rows * CONTEXT + 1]
    inputs, targets = rows[:-1].view(-1, CONTEXT), rows[1:].view(-1, CONTEXT)
    losses = [
        functional.cross_entropy(model(x).float().flatten(0, 1), y.flatten())
        for x, y in zip(inputs.split(16), targets.split(16), strict=True)
    ]
    return float(torch.stack(losses).mean())


def tokens_per_second(model: DecoderLM, prompt: list[int], num_tokens: int) -> float:
    engine = NativeEngine(model)
    sampling = Sampling(temperature=0.0, max_new_tokens=num_tokens)
    engine.submit(EngineRequest(request_id="one", prompt_ids=prompt, sampling=sampling))
    made, began = 0, time.perf_counter()
    while engine.num_requests:
        made += sum(len(output.token_ids) for output in engine.step())
    return made / (time.perf_counter() - began)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--seconds", type=float, default=60, help="of training")
    parser.add_argument("--hidden-size", type=int, default=128)
    parser.add_argument("--dtype", choices=["bfloat16", "float32"], default="bfloat16")
    parser.add_argument("--rows", type=int, default=64, help="of 128 held-out bytes each")
    parser.add_argument("--repeats", type=int, default=3)
    args = parser.parse_args()

    torch.set_num_threads(1)
    seen, held_out = corpus()
    full = trained(seen, args.seconds, args.hidden_size).to(getattr(torch, args.dtype))
    models = {
        full.embedding.weight.itemsize * 8: full,
        8: quantise(deepcopy(full), 8),
        4: quantise(deepcopy(full), 4),
    }
    rates: dict[int, list[float]] = {bits: [] for bits in models}
    for _ in range(args.repeats):
        for bits, model in models.items():
            rates[bits].append(tokens_per_second(model, held_out[:16].tolist(), 96))
    size = f"hidden size {args.hidden_size}, {args.dtype}"
    print(f"{args.rows * CONTEXT} held-out bytes, {size}, 1 thread")
    print("bits  loss (nats/byte)  weights (kB)  tokens/s (median)")
    for bits, model in models.items():
        print(
            f"{bits:4d}  {loss(model, held_out, args.rows):16.4f}  "
            f"{weight_bytes(model) / 1000:12.0f}  {statistics.median(rates[bits]):17.0f}"
        )


if __name__ == "__main__":
    main()
