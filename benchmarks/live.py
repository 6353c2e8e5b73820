"""What training pays while its shards answer prompts: steps alone, beside, and in turns (2 ranks).

    python benchmarks/live.py --steps 40 --repeats 3

Two ranks train a decoder with FSDP2 (gloo, one thread each) and serve the shards themselves. Four
requests run at any time. The three ways take turns, each in processes of its own.
"""

from __future__ import annotations

import argparse
import itertools
import json
import statistics
import threading

import torch
import torch.distributed as dist

from nbdist.serve import Generation, Router, serve
from nbdist.serve.loopback import LoopbackRanks
from nbdist.testing import run_ranks
from nbdist.train import DecoderConfig, DecoderLM, TextData, TrainConfig, Trainer, shakespeare

WAYS = {
    "alone": None,
    "beside": {"when": "beside"},
    "between_steps, 1": {"when": "between_steps", "steps_between": 1},
    "between_steps, 4": {"when": "between_steps", "steps_between": 4},
}
LINE = "Now is the winter of our discontent"


class Client(threading.Thread):
    """Keeps so many requests running, and counts the tokens that came."""

    def __init__(self, router: Router, num_running: int) -> None:
        super().__init__(daemon=True)
        self.num_tokens = self.num_answers = 0
        self._router, self._num_running = router, num_running
        self._ends = threading.Event()

    def run(self) -> None:
        """Ask until `stop`; each slot asks again when it has its answer."""
        slots = [self._ask(number) for number in range(self._num_running)]
        for number in itertools.count(self._num_running):
            if self._ends.is_set():
                break
            slot = number % self._num_running
            if slots[slot].wait(60):
                self.num_tokens += slots[slot].num_tokens
                self.num_answers += 1
                slots[slot] = self._ask(number)
        for one in slots:
            one.cancel()

    def _ask(self, number: int) -> Generation:
        return self._router.submit(f"{number} {LINE}", temperature=0.0, max_new_tokens=16)

    def stop(self) -> None:
        """End."""
        self._ends.set()


def run(rank: int, way: str, num_steps: int) -> dict[str, float] | None:
    data = TextData(shakespeare()[:100_000], vocab_size=512, context_length=128, seed=2)
    config = DecoderConfig(vocab_size=512, num_layers=4, hidden_size=128, context_length=128)
    training = TrainConfig(num_steps=num_steps, global_batch_size=8)
    trainer = Trainer(DecoderLM(config), data, training)
    with LoopbackRanks(2) as ranks:
        client = replica = None
        if (options := WAYS[way]) is not None:
            replica = serve(
                trainer.model, data.tokenizer, share=True, **options, port=ranks.ports[rank]
            )
            if rank == 0:
                client = Client(Router(ranks, query_seconds=60), 4)
                client.start()
        records = trainer.fit().records[num_steps // 4 :]
        stats = replica.stats() if replica else None
        if client:
            client.stop()
            client.join()
        dist.barrier()
        if replica:
            replica.stop()
    seconds = sum(record.seconds for record in trainer.history.records)
    return {
        "ms_a_step": statistics.median(record.seconds for record in records) * 1e3,
        "tokens_a_second": client.num_tokens / seconds if client else 0.0,
        "answers": client.num_answers if client else 0,
        "held": stats.held_fraction if stats else 0.0,
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--steps", type=int, default=40)
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--json", action="store_true")
    args = parser.parse_args()
    torch.set_num_threads(1)
    turns: dict[str, list[dict[str, float]]] = {way: [] for way in WAYS}
    for _ in range(args.repeats):
        for way in WAYS:
            first, _ = run_ranks(run, 2, way, args.steps, timeout_seconds=300)
            turns[way].append(first)
    medians = {
        way: {key: statistics.median(one[key] for one in ones) for key in ones[0]}
        for way, ones in turns.items()
    }
    if args.json:
        print(json.dumps(medians))
        return
    print(f"{'':>18}{'ms a step':>12}{'x alone':>9}{'tokens/s':>10}{'answers':>9}{'held':>7}")
    for way, one in medians.items():
        ratio = one["ms_a_step"] / medians["alone"]["ms_a_step"]
        print(
            f"{way:>18}{one['ms_a_step']:12.0f}{ratio:9.2f}{one['tokens_a_second']:10.0f}"
            f"{one['answers']:9.0f}{one['held']:7.0%}"
        )


if __name__ == "__main__":
    main()
