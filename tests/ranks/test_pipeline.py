"""Pipelines on real ranks: measured cuts, evaluation, checkpoints across meshes, refusals."""

import pytest
import torch
from torch.nn.functional import cross_entropy

from nbdist.testing import run_ranks
from nbdist.train import (
    CheckpointConfig,
    DecoderConfig,
    DecoderLM,
    MeshConfig,
    PipelineConfig,
    TextData,
    TrainConfig,
    Trainer,
    build_mesh,
    parallelize,
    shakespeare,
)
from nbdist.train.parallelize import applied_to


def _decoder(**change):
    base = {"vocab_size": 280, "num_layers": 4, "hidden_size": 16, "context_length": 12}
    return DecoderLM(DecoderConfig(**base | {"tie_embeddings": False} | change)).double()


def _fit(rank, directory, mesh, pipeline, num_steps):
    trainer = Trainer(
        parallelize(_decoder(), build_mesh(mesh), pipeline=pipeline),
        TextData(shakespeare()[:8000], vocab_size=280, context_length=12),
        TrainConfig(
            num_steps=num_steps,
            global_batch_size=4,
            final_learning_rate_fraction=1.0,  # rates must not depend on where a run is cut
            checkpoint=CheckpointConfig(directory=directory, every_steps=2),
        ),
    )
    return trainer.fit(resume="auto").losses, trainer.evaluate()


def test_checkpoints_move_between_pipelines_and_shards(tmp_path):
    losses, validation = run_ranks(_fit, 1, tmp_path / "steady", MeshConfig(), None, 6)[0]

    piped = PipelineConfig(schedule="interleaved", num_micro_batches=4)
    run_ranks(_fit, 2, tmp_path / "moved", MeshConfig(pp=2), piped, 2)
    run_ranks(_fit, 2, tmp_path / "moved", MeshConfig(), None, 4)
    for found in run_ranks(_fit, 2, tmp_path / "moved", MeshConfig(pp=2), PipelineConfig(), 6):
        assert found[0] == pytest.approx(losses[4:], abs=1e-11)
        assert found[1] == pytest.approx(validation, abs=1e-11)


class _Uneven(torch.nn.Sequential):
    """One layer costs as much as all others together, and has few weights."""

    def __init__(self):
        super().__init__(_Slow(), *(torch.nn.Linear(32, 32) for _ in range(5)))


class _Slow(torch.nn.Linear):
    def __init__(self):
        super().__init__(8, 32)

    def forward(self, x):
        for _ in range(300):
            x = x + 0.0 * torch.tanh(x)
        return super().forward(x)


def _cut(rank):
    mesh = build_mesh(MeshConfig(pp=2))
    found = {}
    for name, sample in (("weights", None), ("seconds", torch.ones(64, 8))):
        model = parallelize(_Uneven(), mesh, pipeline=PipelineConfig(sample=sample))
        found[name] = applied_to(model).pipeline.stages.parts
    texts = {}
    for name, ask in {
        "call": lambda: model(torch.ones(4, 8)),
        "cuts": lambda: parallelize(_Uneven(), mesh, pipeline=PipelineConfig(cuts=("9",))),
        "rows": lambda: applied_to(model).pipeline.step(
            torch.ones(3, 8), torch.ones(3, 8), torch.nn.functional.mse_loss, 1.0
        ),
        "no pp": lambda: parallelize(_Uneven(), build_mesh(), pipeline=PipelineConfig()),
        "accumulate": lambda: Trainer(
            parallelize(_decoder(), mesh),
            TextData(shakespeare()[:8000], vocab_size=280, context_length=12),
            TrainConfig(num_steps=1, accumulation_steps=2),
        ),
    }.items():
        try:
            ask()
        except (ValueError, RuntimeError) as error:
            texts[name] = str(error)
    return found, texts


def test_cuts_follow_what_layers_cost_and_misuse_is_refused():
    for found, texts in run_ranks(_cut, 2):
        assert found["seconds"] == [["0"], ["1", "2", "3", "4", "5"]]
        assert found["weights"] != found["seconds"]
        assert "no rank holds all of it" in texts["call"]
        assert "the units are 0, 1" in texts["cuts"]
        assert "3 rows cannot be cut into num_micro_batches=4" in texts["rows"]
        assert "the mesh has pp=1" in texts["no pp"]
        assert "num_micro_batches=...) instead" in texts["accumulate"]


def _llama():
    transformers = pytest.importorskip("transformers")
    torch.manual_seed(0)
    config = transformers.LlamaConfig(
        vocab_size=32, hidden_size=16, intermediate_size=32, num_hidden_layers=2,
        num_attention_heads=2, max_position_embeddings=16,
    )  # fmt: skip
    return transformers.LlamaForCausalLM(config).double()


def _loss(output, targets):
    logits = getattr(output, "logits", output)  # a pipeline hands on the tensor alone
    return cross_entropy(logits.flatten(0, 1), targets.flatten())


def _hugging_face(rank):
    tokens = torch.randint(32, (4, 6), generator=torch.Generator().manual_seed(3))
    whole = _llama()
    wanted = _loss(whole(tokens), tokens)
    wanted.backward()
    gradients = {name: p.grad for name, p in whole.named_parameters()}
    model = parallelize(_llama(), build_mesh(MeshConfig(pp=2)))
    loss = applied_to(model).pipeline.step(tokens, tokens, _loss, 1.0)
    differences = {n: float((p.grad - gradients[n]).abs().max()) for n, p in
                   model.named_parameters()}  # fmt: skip
    return float(wanted.detach()), float(loss), differences


def test_hugging_face_model_in_a_pipeline_equals_the_whole_model():
    pytest.importorskip("transformers")
    results = run_ranks(_hugging_face, 2)

    assert results[1][1] == pytest.approx(results[1][0], abs=1e-12)
    names = [name for result in results for name in result[2]]
    assert len(names) == len(set(names)) == 21
    assert max(value for result in results for value in result[2].values()) < 1e-12
