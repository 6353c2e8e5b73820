"""Overlap found in a trace made by hand."""

import pytest

from nbdist.train.overlap import OverlapReport, _steps_of


def _event(name, cat, tid, begin, end):
    return {"ph": "X", "name": name, "cat": cat, "tid": tid, "ts": begin, "dur": end - begin}


def test_fraction_counts_leaf_operators_on_the_threads_that_compute():
    events = [
        _event("nbdist step 0", "user_annotation", 1, 0, 100),
        _event("Backward", "cpu_op", 1, 0, 100),  # calls the three below
        _event("aten::mm", "cpu_op", 1, 0, 30),
        _event("c10d::allreduce_", "cpu_op", 1, 30, 50),
        _event("aten::add", "cpu_op", 1, 60, 80),
        _event("gloo:all_reduce", "user_annotation", 2, 20, 40),
        _event("gloo:all_reduce", "user_annotation", 3, 70, 90),
        _event("aten::copy_", "cpu_op", 3, 72, 88),
    ]

    [step] = _steps_of(events)

    assert step.computation == [(0, 30), (60, 80)]
    assert step.communication == [(20, 40), (70, 90)]
    assert step.fraction == pytest.approx(20 / 40)
    compute, traffic = step.timeline().splitlines()
    assert compute.count("#") == pytest.approx(72 * 0.5, abs=2)  # cells at edges
    assert traffic.count("#") == pytest.approx(72 * 0.4, abs=2)
    assert "50% of it under computation" in repr(OverlapReport([step], None))


def test_kernels_count_where_there_are_any():
    events = [
        _event("nbdist step 0", "user_annotation", 1, 0, 100),
        _event("aten::mm", "cpu_op", 1, 0, 100),
        _event("gemm", "kernel", 7, 10, 40),
        _event("ncclDevKernel_AllReduce", "kernel", 8, 30, 50),
    ]

    [step] = _steps_of(events)

    assert step.fraction == pytest.approx(10 / 20)
