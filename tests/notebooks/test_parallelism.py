"""The tutorials of data, tensor, pipeline and expert parallelism, each run once."""

from __future__ import annotations

import re

import pytest

SECONDS = 170  # 10 to 26 s each on two cores that do nothing else

pytestmark = [pytest.mark.cluster, pytest.mark.slow, pytest.mark.timeout(SECONDS + 30)]

# how often a notebook says that a mesh equals one process
EQUAL = {"02_data_parallel": 4, "03_tensor_parallel": 2, "04_pipeline": 4, "05_experts": 1}


@pytest.fixture(scope="module", params=EQUAL)
def tutorial(request, texts_of) -> tuple[str, dict[str, str]]:
    """The name of a tutorial and what its cells show."""
    return request.param, texts_of(request.param, SECONDS)


def test_every_mesh_equals_one_process(tutorial):
    name, texts = tutorial
    said = re.findall(r"equal to one process within 1e-9: (\w+)", "\n".join(texts.values()))
    assert said == ["True"] * EQUAL[name]


def test_each_tutorial_shows_its_own_point(tutorial):
    name, texts = tutorial
    if name == "02_data_parallel":
        held = re.findall(r"(\w+): ([\d,]+) KiB a rank", texts["ways"])
        sizes = {way: int(size.replace(",", "")) for way, size in held}
        assert sizes["zero3"] == pytest.approx(sizes["ddp"] / 2, rel=0.01)
        losses = [float(loss) for loss in re.findall(r"[\d.]+: loss (\d\.\d+)", texts["rate"])]
        _, unscaled, scaled = losses
        assert scaled < unscaled
    elif name == "03_tensor_parallel":
        assert "this rank holds (88, 64)" in texts["cut"]
        assert "plan names 'third'" in texts["refused"]
    elif name == "04_pipeline":
        bubbles = [int(part) for part in re.findall(r"(\d+)% bubble", texts["bubbles"])]
        assert bubbles == sorted(bubbles, reverse=True)
        assert "layers.3" in texts["holds"]
    else:
        dropped = [int(number) for number in re.findall(r"dropped (\d+)", texts["route"])]
        assert dropped[0] == 0
        assert dropped[-1] == 128  # half a share has room for half of the pairs
