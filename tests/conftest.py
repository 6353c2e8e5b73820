"""What all tests share: a marker for each tier, own Jupyter folders, and a skip without a GPU."""

from __future__ import annotations

from pathlib import Path

import pytest

_TESTS = Path(__file__).parent
_TIER_MARKERS = {"cluster", "browser", "gpu"}


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Mark each test of `cluster/`, `browser/` and `gpu/` with the name of its folder."""
    for item in items:
        tier = item.path.relative_to(_TESTS).parts[0]
        if tier in _TIER_MARKERS:
            item.add_marker(tier)


def pytest_runtest_setup(item: pytest.Item) -> None:
    """Skip what needs a GPU where there is none."""
    if item.get_closest_marker("gpu"):
        import torch

        if not torch.cuda.is_available():
            pytest.skip("needs a CUDA device; torch.cuda.is_available() is False here")


@pytest.fixture(scope="session", autouse=True)
def _own_jupyter_folders(tmp_path_factory):
    """Keep the user's IPython and Jupyter settings apart from those of the tests."""
    home = tmp_path_factory.mktemp("jupyter")
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("IPYTHONDIR", str(home / "ipython"))
        for name in ("CONFIG", "DATA", "RUNTIME"):
            patch.setenv(f"JUPYTER_{name}_DIR", str(home / name.lower()))
        yield
