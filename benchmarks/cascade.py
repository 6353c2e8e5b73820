"""Cascade edge to centre against centre only: accuracy, share forwarded, response (no world).

    python benchmarks/cascade.py --seconds 70 --questions 500
    python benchmarks/cascade.py --seconds 40 --images /usr/share/datasets/fashion-mnist

Images are Fashion-MNIST (Debian's `dataset-fashion-mnist`); text is the Shakespeare that nbdist
carries, and the question is the next byte. The link is simulated: its delay is added to the clock,
nobody sleeps. Computing is real, one thread, one request at a time: queues are not shown.
"""

from __future__ import annotations

import argparse
import gzip
import math
import time
from pathlib import Path

import torch
from torch import nn
from torch.nn import functional

import nbdist.train
from nbdist.serve.calibration import calibration_error
from nbdist.serve.cascade import Cascade, Centre, EdgeModel, logits_of
from nbdist.serve.linkstate import LinkState
from nbdist.serve.quantise import weight_bytes
from nbdist.train.models.decoder import DecoderConfig, DecoderLM

CONTEXT = 64
HELD_OUT = 4000  # items to calibrate with; the questions are others

Items = tuple[torch.Tensor, torch.Tensor]


class SimulatedLink:
    """A centre behind a round trip and a bandwidth; its clock holds them."""

    def __init__(self, centre: Centre, seconds: float, bytes_per_second: float) -> None:
        self.centre, self.seconds, self.bytes_per_second = centre, seconds, bytes_per_second
        self.cut = False
        self.added = 0.0

    def clock(self) -> float:
        """Seconds, with the delays that nobody waited for."""
        return time.perf_counter() + self.added

    def _over(self, num_bytes: int) -> None:
        if self.cut:
            raise ConnectionError("the link is cut")
        self.added += self.seconds + num_bytes / self.bytes_per_second

    def answer(self, item: torch.Tensor, version: str) -> int:
        """See `Centre.answer`; pixels and bytes of text travel as one byte each."""
        self._over(item.numel())
        return self.centre.answer(item, version)

    def release(self, bits: int) -> EdgeModel:
        """See `Centre.release`; the weights take their time."""
        edge = self.centre.release(bits)
        self._over(weight_bytes(edge.model))
        return edge

    def echo(self, num_bytes: int) -> None:
        """See `CentrePort.echo`."""
        self._over(num_bytes)


def images(folder: Path, name: str) -> Items:
    """Pixels (N, 1, 28, 28) in 0..1, labels (N,)."""
    pixels = gzip.decompress((folder / f"{name}-images-idx3-ubyte.gz").read_bytes())[16:]
    labels = gzip.decompress((folder / f"{name}-labels-idx1-ubyte.gz").read_bytes())[8:]
    data = torch.frombuffer(bytearray(pixels), dtype=torch.uint8).view(-1, 1, 28, 28)
    return data.float() / 255, torch.frombuffer(bytearray(labels), dtype=torch.uint8).long()


def image_models() -> tuple[nn.Module, nn.Module]:
    small = nn.Sequential(nn.AdaptiveAvgPool2d(16), nn.Flatten(), nn.Linear(256, 32), nn.ReLU())
    small.append(nn.Linear(32, 10))
    large = nn.Sequential(
        *(nn.Conv2d(1, 16, 3, padding=1), nn.ReLU(), nn.MaxPool2d(2)),
        *(nn.Conv2d(16, 32, 3, padding=1), nn.ReLU(), nn.MaxPool2d(2)),
        *(nn.Flatten(), nn.Linear(32 * 49, 128), nn.ReLU(), nn.Linear(128, 10)),
    )
    return small, large


def text() -> tuple[Items, Items]:
    """Windows of bytes (N, S), and the next byte of each: to train on, and held out."""
    path = Path(nbdist.train.__file__).parent / "corpora" / "shakespeare.txt"
    tokens = torch.tensor(list(path.read_bytes()))
    windows = tokens.unfold(0, CONTEXT + 1, 2)
    cut = len(windows) * 9 // 10
    shuffled = torch.randperm(len(windows) - cut, generator=torch.Generator().manual_seed(2))
    held_out = windows[cut:][shuffled]
    return (windows[:cut, :-1], windows[:cut, 1:]), (held_out[:, :-1], held_out[:, -1])


def text_models() -> tuple[nn.Module, nn.Module]:
    def made(hidden_size: int, num_layers: int) -> DecoderLM:
        config = DecoderConfig(
            vocab_size=256,
            hidden_size=hidden_size,
            num_layers=num_layers,
            context_length=CONTEXT,
            tie_embeddings=False,
        )
        return DecoderLM(config, seed=0)

    return made(64, 1), made(128, 2)


def train(model: nn.Module, items: Items, seconds: float) -> nn.Module:
    random = torch.Generator().manual_seed(0)
    optimizer = torch.optim.AdamW(model.parameters(), lr=2e-3)
    began = time.perf_counter()
    while (spent := time.perf_counter() - began) < seconds:
        optimizer.param_groups[0]["lr"] = 2e-3 * (1 + math.cos(math.pi * spent / seconds)) / 2
        chosen = torch.randint(len(items[0]), (32,), generator=random)
        logits = model(items[0][chosen])
        labels = items[1][chosen].flatten()
        optimizer.zero_grad()
        functional.cross_entropy(logits.reshape(len(labels), -1), labels).backward()
        optimizer.step()
    return model.eval().requires_grad_(requires_grad=False)


def report(name: str, labels: torch.Tensor, answers: list[tuple[int, str, float]]) -> None:
    right = sum(a[0] == int(label) for a, label in zip(answers, labels, strict=True))
    forwarded = sum(source == "centre" for _, source, _ in answers)
    fallback = sum(source == "fallback" for _, source, _ in answers)
    seconds = torch.tensor([taken for _, _, taken in answers])
    print(
        f"| {name} | {right / len(answers):.1%} | {forwarded / len(answers):.0%} "
        f"| {fallback / len(answers):.0%} | {1e3 * seconds.mean():.1f} "
        f"| {1e3 * seconds.quantile(0.99):.1f} |"
    )


def centre_only(link: SimulatedLink, questions: torch.Tensor) -> list[tuple[int, str, float]]:
    answers = []
    for item in questions:
        began = link.clock()
        label = link.answer(item, link.centre.version)
        answers.append((label, "centre", link.clock() - began))
    return answers


def cascaded(
    link: SimulatedLink, questions: torch.Tensor, threshold: float, cut_at: int | None = None
) -> list[tuple[int, str, float]]:
    payload = weight_bytes(link.centre.release(8).model)
    state = LinkState(payload_bytes=payload, slow_seconds=2.0, fast_seconds=1.0)
    cascade = Cascade(link, state, threshold=threshold, clock=link.clock)
    answers = []
    for number, item in enumerate(questions):
        link.cut = cut_at is not None and number >= cut_at
        made = cascade.answer(item)
        answers.append((made.label, made.source, made.seconds))
    return answers


def compare(name: str, models: tuple[nn.Module, nn.Module], held_out: Items, count: int) -> None:
    small, large = models
    items, labels = held_out
    if len(items) < HELD_OUT + count:
        raise SystemExit(f"--questions {count}: {len(items) - HELD_OUT} items are left; ask fewer")
    centre = Centre(large, small, items[:HELD_OUT], labels[:HELD_OUT])
    questions = items[HELD_OUT : HELD_OUT + count]
    answers = labels[HELD_OUT : HELD_OUT + count]
    print(f"\n{name}: {count} questions; edge alone, whole: ", end="")
    whole = logits_of(small, questions)
    print(f"{(whole.argmax(-1) == answers).float().mean():.1%}")
    for bits in (8, 4):
        edge = centre.release(bits)
        logits = logits_of(edge.model, questions)
        before, after = (calibration_error(logits, answers, t) for t in (1.0, edge.temperature))
        print(
            f"{bits} bits: {(logits.argmax(-1) == answers).float().mean():.1%}, "
            f"{weight_bytes(edge.model) / 1e3:.0f} kB, temperature {edge.temperature:.2f}, "
            f"calibration error {before:.3f} -> {after:.3f}"
        )
    print(
        "| way | right | forwarded | fallback | mean (ms) | P99 (ms) |\n|---|---|---|---|---|---|"
    )
    for speed, trip, rate in (("40 ms, 10 MB/s", 0.04, 1e7), ("300 ms, 20 kB/s", 0.3, 2e4)):
        link = SimulatedLink(centre, trip, rate)
        report(f"centre only; {speed}", answers, centre_only(link, questions))
        for threshold in (0.8, 0.95):
            made = cascaded(link, questions, threshold)
            report(f"cascade {threshold}; {speed}", answers, made)
    link = SimulatedLink(centre, 0.04, 1e7)
    made = cascaded(link, questions, 0.95, cut_at=count // 2)
    report("cascade 0.95; 40 ms, cut half way", answers, made)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--images", type=Path, help="folder of Fashion-MNIST's files; else text")
    parser.add_argument(
        "--seconds", type=float, default=40.0, help="training time of a large model"
    )
    parser.add_argument("--questions", type=int, default=2000)
    arguments = parser.parse_args()
    torch.manual_seed(0)
    torch.set_num_threads(1)
    if arguments.images is None:
        name, (small, large), (items, held_out) = "text", text_models(), text()
    else:
        name, (small, large) = "images", image_models()
        items, held_out = (images(arguments.images, part) for part in ("train", "t10k"))
    train(small, items, arguments.seconds / 4)
    train(large, items, arguments.seconds)
    compare(name, (small, large), held_out, arguments.questions)


if __name__ == "__main__":
    main()
