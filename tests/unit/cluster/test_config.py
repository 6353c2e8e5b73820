"""Settings of a start are checked; defaults follow the machine."""

import os

import pytest

from nbdist.cluster import config
from nbdist.cluster.config import WorldConfig


@pytest.mark.parametrize("num_ranks", [0, -1, 1.5, True, "2"])
def test_config_with_bad_num_ranks_names_the_value(num_ranks):
    with pytest.raises(ValueError, match=r"is not a number of ranks; give an integer"):
        WorldConfig(num_ranks=num_ranks)


def test_config_with_unknown_setting_lists_those_that_exist():
    with pytest.raises(ValueError, match=r"no setting \['ranks'\]; it has \['num_ranks'"):
        WorldConfig.of(ranks=2)


def test_config_with_no_time_is_refused():
    with pytest.raises(ValueError, match="timeout_seconds=0 must be more than 0"):
        WorldConfig(timeout_seconds=0)


def test_count_gpus_follows_visible_devices(monkeypatch):
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "0,3")
    assert config.count_gpus() == 2
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "")
    assert config.count_gpus() == 0


def test_default_num_ranks_without_gpu_is_one_per_two_cores(monkeypatch):
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "")
    for cores, expected in ((1, 2), (4, 2), (16, 8)):
        monkeypatch.setattr(os, "sched_getaffinity", lambda _pid, n=cores: set(range(n)))
        assert config.default_num_ranks() == expected
