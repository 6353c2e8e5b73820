"""Tensor parallelism of others' models, refusals, and checkpoints from mesh to mesh."""

import logging
import types

import pytest
import torch
from torch.distributed.device_mesh import init_device_mesh
from torch.nn.functional import cross_entropy

from nbdist.testing import run_ranks
from nbdist.train import (
    CheckpointConfig,
    DecoderConfig,
    DecoderLM,
    MeshConfig,
    TextData,
    TrainConfig,
    Trainer,
    build_mesh,
    checkpoint,
    latest,
    parallelize,
    shakespeare,
)
from nbdist.train.parallelize import whole

# float64, one step: only the order of sums differs
TOLERANCE = 1e-12


class _Own(torch.nn.Module):
    """Names that no plan knows."""

    def __init__(self):
        super().__init__()
        self.stages = torch.nn.ModuleList(
            torch.nn.Sequential(torch.nn.Linear(8, 16), torch.nn.Tanh(), torch.nn.Linear(16, 8))
            for _ in range(2)
        )

    def forward(self, x):
        for stage in self.stages:
            x = x + stage(x)
        return x


class _Wrapped(torch.nn.Module):
    """A decoder inside a user's own module, with an embedding and a head of its own."""

    def __init__(self, tied):
        super().__init__()
        self.kinds = torch.nn.Embedding(3, 5)
        self.inner = torch.nn.ModuleDict({"decoder": _decoder(tie_embeddings=tied, vocab_size=32)})
        self.head = torch.nn.Linear(32 + 5, 7)

    def forward(self, tokens):
        logits = self.inner["decoder"](tokens)
        kinds = self.kinds(torch.zeros_like(tokens))
        return types.SimpleNamespace(logits=self.head(torch.cat((logits, kinds), dim=-1)))


def _llama(tied):
    transformers = pytest.importorskip("transformers")
    config = transformers.LlamaConfig(
        vocab_size=32,
        hidden_size=16,
        intermediate_size=32,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        max_position_embeddings=16,
        tie_word_embeddings=tied,
    )
    return transformers.LlamaForCausalLM(config)


def _qwen2():
    transformers = pytest.importorskip("transformers")
    config = transformers.Qwen2Config(
        vocab_size=32,
        hidden_size=16,
        intermediate_size=32,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        max_position_embeddings=16,
    )
    return transformers.Qwen2ForCausalLM(config)


def _encoder():
    layer = torch.nn.TransformerEncoderLayer(8, 2, 16, dropout=0.0, batch_first=True)
    return torch.nn.TransformerEncoder(layer, 2, enable_nested_tensor=False)


def _build(name):
    torch.manual_seed(0)
    built = {
        "llama": lambda: _llama(tied=False),
        "llama, tied": lambda: _llama(tied=True),
        "qwen2": _qwen2,
        "encoder": _encoder,
        "own": _Own,
        "wrapped": lambda: _Wrapped(tied=False),
        "wrapped, tied": lambda: _Wrapped(tied=True),
        "wrapped, tied, by token": lambda: _Wrapped(tied=True),
    }[name]()
    return built.double()


def _step(name, model):
    generator = torch.Generator().manual_seed(3)
    if name in ("encoder", "own"):
        loss = model(torch.randn(2, 6, 8, generator=generator, dtype=torch.float64)).square().mean()
    else:
        tokens = torch.randint(32, (2, 6), generator=generator)
        loss = cross_entropy(model(tokens).logits.flatten(0, 1), tokens.flatten() % 7)
    loss.backward()
    return loss.detach(), {n: whole(p.grad) for n, p in model.named_parameters()}


OWN_PLAN = {"stages.*.0": "column", "stages.*.2": "row"}


def _models(rank, names):
    differences = {}
    mesh = build_mesh(MeshConfig(tp=2))
    for name in names:
        loss, gradients = _step(name, _build(name))
        plan = OWN_PLAN if name == "own" else None
        model = parallelize(_build(name), mesh, plan=plan, sequence_parallel="by token" in name)
        assert parallelize(model, mesh) is model
        found_loss, found = _step(name, model)
        assert set(found) == set(gradients), name
        largest = max(float((found[n] - gradients[n]).abs().max()) for n in found)
        num_cut = sum(hasattr(p, "placements") for p in model.parameters())
        differences[name] = float((found_loss - loss).abs()), largest, num_cut
        if name == "encoder":
            with torch.no_grad():  # torch's fused path would read the cut weights
                model.eval()(torch.zeros(1, 4, 8).double())
    return differences


def test_models_of_others_equal_the_whole_model():
    pytest.importorskip("transformers")
    names = ["llama", "llama, tied", "qwen2", "encoder", "own"]
    names += ["wrapped", "wrapped, tied", "wrapped, tied, by token"]

    for found in run_ranks(_models, 2, names):
        assert list(found) == names
        for name, (loss, gradient, num_cut) in found.items():
            assert loss < TOLERANCE, name
            assert gradient < TOLERANCE, name
            assert num_cut >= 4, name
            if "wrapped" in name:  # embedding, head, and seven of each layer
                assert num_cut >= 15 + ("tied" not in name), name


def _decoder(**change):
    base = {"vocab_size": 280, "num_layers": 2, "num_heads": 4, "num_kv_heads": 2}
    base |= {"hidden_size": 16, "context_length": 12, "ffn_multiple": 2}
    return DecoderLM(DecoderConfig(**base | change)).double()


def _refused(rank):
    tp, dp = build_mesh(MeshConfig(tp=2)), build_mesh()
    asked = {
        "heads": lambda: parallelize(_decoder(num_kv_heads=1), tp),
        "unknown model": lambda: parallelize(torch.nn.Linear(4, 4), tp),
        "pattern": lambda: parallelize(_Own(), tp, plan={"stage.*.0": "column"}),
        "style": lambda: parallelize(_Own(), tp, plan={"stages.*.0": "diagonal"}),
        "no linear": lambda: parallelize(_Own(), tp, plan={"stages.*.1": "column"}),
        "uneven": lambda: parallelize(_decoder(vocab_size=281), tp),
        "sequence": lambda: parallelize(_Own(), tp, plan=OWN_PLAN, sequence_parallel=True),
        "loss": lambda: parallelize(_Own(), tp, plan=OWN_PLAN, loss_parallel=True),
        "no tp": lambda: parallelize(_decoder(), dp, loss_parallel=True),
        "ddp": lambda: parallelize(_decoder(), tp, strategy="ddp"),
        "strategy": lambda: parallelize(_decoder(), dp, strategy="zero4"),
        "rows": lambda: parallelize(_decoder(), tp, sequence_parallel=True)(
            torch.zeros(1, 3, dtype=torch.long)
        ),
    }
    of_one_axis = init_device_mesh("cpu", (2,), mesh_dim_names=("dp_shard",))  # as cells find it
    texts = {"one axis": type(parallelize(_Own(), of_one_axis)).__name__}
    asked["axes"] = lambda: parallelize(
        _Own(), init_device_mesh("cpu", (2,), mesh_dim_names=("model",))
    )
    for name, ask in asked.items():
        try:
            ask()
        except ValueError as error:
            texts[name] = str(error)
    return texts


def test_what_cannot_be_cut_is_refused_with_what_to_set():
    expected = {
        "heads": "`layers.0.attention.key` has 1 heads of 4, which tp=2 does not divide; set tp",
        "unknown model": "no tensor-parallel plan is known for Linear",
        "pattern": "plan names 'stage.*.0', but _Own has no such module; modules with that last",
        "style": "the style 'diagonal'; set one of column, row",
        "no linear": "it is a Tanh without `out_features`",
        "uneven": "'embedding' has num_embeddings=281, which tp=2 does not divide",
        "sequence": "is known for DecoderLM only",
        "loss": 'no output projection with the style "vocabulary"',
        "no tp": "the mesh has tp=1; set MeshConfig(tp=...)",
        "ddp": 'strategy="ddp" was asked for on a mesh with tp=2',
        "strategy": "strategy='zero4' is unknown",
        "axes": "a mesh with the axes ('model',)",
        "one axis": "FSDP_Own",
        "rows": "rows of 3 tokens cannot be cut evenly over tp=2",
    }
    for texts in run_ranks(_refused, 2):
        for name, part in expected.items():
            assert part in texts[name], name


def _fit(rank, directory, mesh, options, num_steps):
    logging.disable(logging.INFO)
    where = CheckpointConfig(directory=directory, every_steps=2)
    data = TextData(shakespeare()[:8000], vocab_size=280, context_length=12)
    trainer = Trainer(
        parallelize(_decoder(), build_mesh(mesh), **options),
        data,
        TrainConfig(
            num_steps=num_steps,
            global_batch_size=4,
            final_learning_rate_fraction=1.0,  # rates must not depend on where a run is cut
            checkpoint=where,
        ),
    )
    losses = trainer.fit(resume="auto").losses
    return losses, trainer.evaluate(), checkpoint.read_manifest(latest(directory)).mesh


def test_checkpoint_of_one_mesh_goes_on_on_another(tmp_path):
    cut = {"sequence_parallel": True, "loss_parallel": True}
    steady = run_ranks(_fit, 1, tmp_path / "steady", MeshConfig(), {}, 6)[0]

    run_ranks(_fit, 2, tmp_path / "moved", MeshConfig(tp=2), cut, 2)
    run_ranks(_fit, 2, tmp_path / "moved", MeshConfig(), {}, 4)
    moved = run_ranks(_fit, 4, tmp_path / "moved", MeshConfig(dp_shard=2, tp=2), {}, 6)[0]

    assert moved[0] == pytest.approx(steady[0][4:], abs=1e-11)
    assert moved[1] == pytest.approx(steady[1], abs=1e-11)
    assert moved[2] == {"dp_shard": 2, "tp": 2}
