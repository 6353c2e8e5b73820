"""`%distributed checkpoints` on the trainer of real ranks."""

TRAIN = """%%distributed --quiet
from nbdist.train import (
    CheckpointConfig, DecoderConfig, DecoderLM, TextData, TrainConfig, Trainer, shakespeare,
)
data = TextData(shakespeare()[:8000], vocab_size=280, context_length=12)
model = DecoderLM(DecoderConfig(vocab_size=280, num_layers=1, hidden_size=16, context_length=12))
saving = CheckpointConfig(directory=DIRECTORY, every_steps=2)
trainer = Trainer(model, data, TrainConfig(num_steps=4, global_batch_size=4, checkpoint=saving))
losses = trainer.fit().losses
"""


def test_checkpoints_are_listed_verified_restored_and_exported(notebook, tmp_path):
    early = notebook.run("%distributed checkpoints")
    assert early.ename == "RemoteCellError"
    assert "one trainer is wanted on each rank, and none was found" in early.evalue
    run = tmp_path / "run"
    assert notebook.run(TRAIN.replace("DIRECTORY", repr(str(run)))).status == "ok"

    listed = notebook.run("%distributed checkpoints").out
    assert [line.split()[1] for line in listed.splitlines()[2:]] == ["2", "4"]
    assert "1 verified" in notebook.run("%distributed checkpoints verify 4").out

    restored = notebook.run("%distributed checkpoints restore 2")
    assert restored.out.startswith("[0-1] the trainer is at step 2")
    assert "set aside as step-00000004.aside1; delete them, or rename them back" in restored.out
    again = notebook.run("%%distributed\ntrainer.fit().losses == losses[2:]")
    assert again.out.splitlines()[-1] == "[0-1] True"

    missing = notebook.run("%distributed checkpoints restore 3")
    assert "holds the steps 2, 4" in missing.evalue
    out = tmp_path / "out"
    assert notebook.run(f"%distributed checkpoints export 4 --to {out}").status == "ok"
    assert {"config.json", "model.safetensors"} <= {path.name for path in out.iterdir()}
