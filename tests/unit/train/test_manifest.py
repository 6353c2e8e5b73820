"""Which directories count as checkpoints, and what is said of the others."""

import json
from dataclasses import asdict

import pytest

from nbdist.errors import CheckpointError
from nbdist.train.manifest import (
    Manifest,
    latest,
    list_checkpoints,
    prune,
    publish,
    read_manifest,
    set_aside,
)


def _manifest(step):
    return Manifest(
        step=step,
        world_size=2,
        mesh={"dp_shard": 2},
        torch_version="2",
        loss=1.5,
        seconds=0.0,
    )


def _published(directory, step):
    partial = directory / f"step-{step:08d}.tmp-1"
    partial.mkdir(parents=True)
    (partial / "data").write_text("12345")
    publish(partial, directory / f"step-{step:08d}", _manifest(step))
    return directory / f"step-{step:08d}"


def test_published_checkpoints_are_listed_by_step(tmp_path):
    paths = [_published(tmp_path, step) for step in (3, 20, 100_000_000)]

    assert list_checkpoints(tmp_path) == paths
    assert latest(tmp_path) == paths[2]
    assert read_manifest(paths[1]).step == 20


def test_publishing_a_step_again_replaces_it(tmp_path):
    _published(tmp_path, 3)
    _published(tmp_path, 3)

    assert [path.name for path in tmp_path.iterdir()] == ["step-00000003"]


def test_unfinished_directories_are_not_found(tmp_path):
    (tmp_path / "step-00000005").mkdir()
    (tmp_path / "step-00000006.tmp-ab").mkdir()
    (tmp_path / "step-00000006.tmp-ab" / "manifest.json").write_text("{}")

    assert list_checkpoints(tmp_path) == []
    with pytest.raises(CheckpointError, match=r"only unfinished ones: step-00000005, step-0"):
        latest(tmp_path)


def test_latest_of_a_missing_directory_says_so(tmp_path):
    with pytest.raises(CheckpointError, match="does not exist; train with CheckpointConfig"):
        latest(tmp_path / "none")


def test_latest_of_an_empty_directory_says_so(tmp_path):
    with pytest.raises(CheckpointError, match="the directory is empty"):
        latest(tmp_path)


def test_prune_keeps_the_newest_and_removes_leftovers(tmp_path):
    for step in (1, 2, 3):
        _published(tmp_path, step)
    (tmp_path / "step-00000002.tmp-dead").mkdir()

    prune(tmp_path, 2)

    assert sorted(path.name for path in tmp_path.iterdir()) == ["step-00000002", "step-00000003"]


def test_manifest_names_a_short_file(tmp_path):
    path = _published(tmp_path, 4)
    (path / "data").write_text("12")

    with pytest.raises(CheckpointError, match=r"damaged: data \(2 of 5 bytes\); load an earlier"):
        read_manifest(path)


@pytest.mark.parametrize(
    "text", ["{", json.dumps({"step": 1}), json.dumps(asdict(_manifest(1)) | {"x": 1})]
)
def test_manifest_that_cannot_be_read_is_an_error(tmp_path, text):
    (tmp_path / "manifest.json").write_text(text)

    with pytest.raises(CheckpointError, match="is no complete checkpoint"):
        read_manifest(tmp_path)


def test_save_behind_later_checkpoints_sets_them_aside_and_is_not_pruned(tmp_path):
    for step in (10, 20, 30):
        _published(tmp_path, step)
    (tmp_path / "step-00000012.tmp-1").mkdir()
    final = tmp_path / "step-00000012"

    later = publish(tmp_path / "step-00000012.tmp-1", final, _manifest(12), keep_last=1)

    assert later == ["step-00000020.aside1", "step-00000030.aside1"]
    assert latest(tmp_path) == final
    assert sorted(path.name for path in tmp_path.iterdir()) == [final.name, *later]
    assert read_manifest(tmp_path / later[1]).step == 30


def test_what_is_set_aside_again_gets_a_name_of_its_own(tmp_path):
    _published(tmp_path, 20)
    assert set_aside(tmp_path, 20) == []
    assert set_aside(tmp_path, 10) == ["step-00000020.aside1"]
    _published(tmp_path, 20)
    assert set_aside(tmp_path, 10) == ["step-00000020.aside2"]
    with pytest.raises(CheckpointError, match="the directory is empty"):
        latest(tmp_path)
