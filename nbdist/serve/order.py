"""What `%distributed serve` and `World.serve` were asked for, checked (anywhere; torch-free)."""

from __future__ import annotations

import dataclasses
import importlib.util
import json
from dataclasses import dataclass
from pathlib import Path

__all__ = ["ENGINES", "ServeOrder"]

ENGINES = ("auto", "native", "hf", "vllm", "reference")


@dataclass(frozen=True, slots=True, kw_only=True)
class ServeOrder:
    """Which model to serve, and how.

    Attributes:
        what: a Hugging Face directory that all ranks see; with `tokenizer`, a name on the ranks.
        tokenizer: the name of the model's tokenizer on the ranks; None for a directory.
        name: what requests ask for.
        replicas: how many replicas serve it, on the ranks from 0 on; None for all ranks.
        tp: ranks of a replica; each holds its part of the weights.
        share: serve the weights of a model on the ranks themselves, also while they are trained.
        engine, weight_bits, max_batch, max_waiting, cache_tokens, speculation, end_token: see
            `nbdist.serve.serve`; a directory says itself what its end token is.
    """

    what: str
    tokenizer: str | None = None
    name: str = "default"
    replicas: int | None = None
    tp: int = 1
    share: bool = False
    engine: str = "auto"
    weight_bits: int | None = None
    max_batch: int = 8
    max_waiting: int = 64
    cache_tokens: int | None = None
    speculation: str | None = None
    end_token: str | None = None

    @property
    def is_directory(self) -> bool:
        """Whether the model is read from files."""
        return self.tokenizer is None

    def checked(self, num_ranks: int) -> ServeOrder:
        """Return the order with an absolute path, after a look at all that can be seen from here.

        Raises:
            ValueError: it cannot be carried out; the text says what was found and what to do.
        """
        replicas = self._checked_replicas(num_ranks)
        if self.engine not in ENGINES:
            raise ValueError(f"engine={self.engine!r} is unknown; choose one of {list(ENGINES)}")
        if self.weight_bits not in (None, 8, 4):
            raise ValueError(
                f"weight_bits={self.weight_bits} was asked for; weights are kept in 8 or 4 bits, "
                "or without it as they are"
            )
        if self.speculation not in (None, "ngram"):
            raise ValueError(
                f"speculation={self.speculation!r} was asked for; 'ngram' is there, and a draft "
                "model for `nbdist.serve.serve` in a %%distributed cell"
            )
        what = self._checked_directory() if self.is_directory else self._checked_names()
        return dataclasses.replace(self, what=what, replicas=replicas)

    def cell(self) -> str:
        """Return the source that carries out a checked order on a rank."""
        words = ", ".join(f"{f.name}={getattr(self, f.name)!r}" for f in dataclasses.fields(self))
        # no import statement: it would leave a name among the user's
        return f"__import__('nbdist.serve.loading', fromlist=['*']).carry_out(globals(), {words})"

    @property
    def num_ranks(self) -> int:
        """How many ranks a checked order needs, from rank 0 on."""
        return (self.replicas or 0) * self.tp

    def _checked_replicas(self, num_ranks: int) -> int:
        if self.tp < 1 or num_ranks % self.tp:
            raise ValueError(
                f"tp={self.tp} was asked for, and replicas of so many ranks do not cover a world "
                f"of {num_ranks}; set it to a divisor, or change the world: "
                "`%distributed resize -n N`"
            )
        most = num_ranks // self.tp
        replicas = most if self.replicas is None else self.replicas
        if not 1 <= replicas <= most:
            raise ValueError(
                f"{replicas} replicas were asked for, of {self.tp} ranks each, and the world has "
                f"{num_ranks} ranks; ask for 1 to {most}, or change the world: "
                "`%distributed resize -n N`"
            )
        if self.share and (self.is_directory or self.replicas is not None or self.tp > 1):
            raise ValueError(
                "share was asked for, which serves the weights of a model that all ranks have; "
                "give its name and its tokenizer's, and neither replicas nor tp"
            )
        plain = self.engine in ("auto", "native") and not (self.weight_bits or self.speculation)
        if (self.share or self.tp > 1) and not plain:
            raise ValueError(
                f"tp={self.tp}, share={self.share} was asked for with engine={self.engine!r}, "
                f"weight_bits={self.weight_bits}, speculation={self.speculation!r}; parts of a "
                "model and shared weights are served by 'native' alone, without the others"
            )
        return replicas

    def _checked_names(self) -> str:
        for name in (self.what, str(self.tokenizer)):
            if not name.isidentifier():
                raise ValueError(
                    f"serve was given {self.what!r} with tokenizer {self.tokenizer!r}, and "
                    f"{name!r} is no name that a rank can have; give the two names of a model and "
                    "its tokenizer on the ranks, or a directory and no tokenizer"
                )
        return self.what

    def _checked_directory(self) -> str:
        directory = Path(self.what).expanduser()
        if not directory.is_dir():
            raise ValueError(
                f"serve was given {self.what!r}, and there is no such directory; give one with "
                "config.json, tokenizer.json and *.safetensors (nothing is downloaded), or the "
                "name of a model on the ranks with `--tokenizer NAME` (in a script `tokenizer=`)"
            )
        missing = [name for name in ("config.json", "tokenizer.json", "*.safetensors")
                   if not any(directory.glob(name))]  # fmt: skip
        if missing:
            raise ValueError(
                f"serve was given {self.what!r}, and it has no {' and no '.join(missing)}; save "
                "model and tokenizer there with `save_pretrained`, or a trained one with "
                "`%distributed checkpoints export --to DIRECTORY`"
            )
        try:
            json.loads((directory / "config.json").read_text(encoding="utf-8"))
        except ValueError as error:
            raise ValueError(
                f"serve was given {self.what!r}, and its config.json cannot be read: {error}; "
                "save the model again"
            ) from error
        if importlib.util.find_spec("transformers") is None:
            raise ValueError(
                f"serve was given {self.what!r}, and transformers, which reads it, is not "
                "installed; run `pip install nbdist[hf]`"
            )
        return str(directory.resolve())
