"""Ranks of one host share its cores: threads are dealt out, and those that wait take none."""

from __future__ import annotations

import os
from types import SimpleNamespace

import pytest

from nbdist.cluster.config import WorldConfig
from nbdist.cluster.environment import rank_environment


def environment(num_ranks: int, **config) -> dict[str, str]:
    return rank_environment(
        SimpleNamespace(num_ranks=num_ranks, directory="world"),
        WorldConfig(num_ranks=num_ranks, **config),
        SimpleNamespace(environment=dict),
    )


@pytest.fixture(autouse=True)
def _bare(monkeypatch):
    for name in ("OMP_NUM_THREADS", "OMP_WAIT_POLICY"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setattr(os, "sched_getaffinity", lambda _: set(range(8)))


@pytest.mark.parametrize(("num_ranks", "threads"), [(1, 8), (2, 4), (3, 2), (16, 1)])
def test_ranks_share_the_cores_of_their_host(num_ranks, threads):
    made = environment(num_ranks)

    assert made["OMP_NUM_THREADS"] == str(threads)
    assert made["OMP_WAIT_POLICY"] == "PASSIVE"


def test_threads_that_were_asked_for_and_the_users_variables_come_first(monkeypatch):
    assert environment(2, threads_per_rank=3)["OMP_NUM_THREADS"] == "3"
    monkeypatch.setenv("OMP_WAIT_POLICY", "ACTIVE")
    assert environment(2)["OMP_WAIT_POLICY"] == "ACTIVE"
