"""The cascade: calibrated confidence, the link's judge, and who answers."""

from __future__ import annotations

from copy import deepcopy

import pytest
import torch
from torch import nn

from nbdist.errors import ServeError
from nbdist.serve.calibration import calibration_error, confidence, fit_temperature
from nbdist.serve.cascade import Cascade, Centre, VersionMismatchError, weights_version
from nbdist.serve.linkstate import LinkState
from nbdist.testing import ManualClock


def sampled(temperature: float, num_items: int = 20_000) -> tuple[torch.Tensor, torch.Tensor]:
    """Logits, and labels drawn from them at a temperature: the right one is known."""
    random = torch.Generator().manual_seed(0)
    logits = 3 * torch.randn(num_items, 10, generator=random)
    probabilities = (logits / temperature).softmax(dim=-1)
    return logits, torch.multinomial(probabilities, 1, generator=random)[:, 0]


@pytest.mark.parametrize("temperature", [0.5, 1.0, 2.5])
def test_fit_temperature_finds_the_one_that_labels_were_drawn_with(temperature):
    logits, labels = sampled(temperature)

    fitted = fit_temperature(logits, labels)

    # 20,000 draws: the standard error of the fit is below one percent
    assert fitted == pytest.approx(temperature, rel=0.05)
    # a bin's mean is off by 1/sqrt(its items): about 0.01 all together
    assert calibration_error(logits, labels, fitted) < 0.02
    if temperature != 1.0:
        assert calibration_error(logits, labels, 1.0) > 0.05


def test_fit_temperature_equals_a_plain_search_over_a_grid():
    logits, labels = sampled(1.7, 500)
    grid = [0.5 + 0.01 * i for i in range(300)]

    best = min(grid, key=lambda t: float(nn.functional.cross_entropy(logits / t, labels)))

    assert fit_temperature(logits, labels) == pytest.approx(best, abs=0.01)  # a step of the grid


def test_fit_temperature_of_items_all_right_stays_finite():
    logits = 5 * torch.eye(4)

    assert 0 < fit_temperature(logits, torch.arange(4)) < 1


@pytest.mark.parametrize(
    ("logits", "labels", "text"),
    [
        (torch.zeros(3, 2), torch.zeros(2, dtype=torch.long), "do not fit"),
        (torch.zeros(0, 2), torch.zeros(0, dtype=torch.long), "with N >= 1"),
        (torch.full((1, 2), torch.nan), torch.zeros(1, dtype=torch.long), "not finite"),
    ],
)
def test_fit_temperature_of_what_does_not_fit_says_so(logits, labels, text):
    with pytest.raises(ValueError, match=text):
        fit_temperature(logits, labels)


def link_state() -> LinkState:
    """Judged by 1 MB: slow above 2 s, fast below 1 s."""
    return LinkState(payload_bytes=1_000_000, slow_seconds=2.0, fast_seconds=1.0)


def measure(link: LinkState, bytes_per_second: float, times: int = 20) -> None:
    for _ in range(times):
        link.note(0, 0.05)
        link.note(10_000, 0.05 + 10_000 / bytes_per_second)


def test_link_state_measures_round_trip_and_bandwidth():
    link = link_state()
    assert (link.bits, link.payload_seconds) == (8, None)

    measure(link, 2e6)

    assert link.round_trip_seconds == pytest.approx(0.05)
    assert link.payload_seconds == pytest.approx(0.05 + 0.5)


def test_link_state_between_the_limits_keeps_its_choice():
    link = link_state()
    chosen = []
    for bytes_per_second in (2e6, 7e5, 4e5, 7e5, 2e6, 7e5):  # 0.55, 1.48, 2.55 s and back
        measure(link, bytes_per_second)
        chosen.append(link.bits)

    assert chosen == [8, 8, 4, 4, 8, 8]


def test_link_state_is_cut_until_something_is_measured_again():
    link = link_state()
    link.note_cut()
    assert link.is_cut

    link.note(0, 0.05)

    assert not link.is_cut


def test_link_state_with_limits_in_the_wrong_order_says_so():
    with pytest.raises(ValueError, match=r"fast_seconds=2, slow_seconds=1: give payload_bytes"):
        LinkState(payload_bytes=1, slow_seconds=1, fast_seconds=2)


class FakeLink:
    """A centre at the end of a link that can be slow or cut; it moves the clock."""

    def __init__(self, centre: Centre, clock: ManualClock) -> None:
        self.centre, self.clock = centre, clock
        self.seconds, self.seconds_per_byte, self.cut = 0.1, 0.0, False
        self.num_answers = 0

    def _over(self, num_bytes: int) -> None:
        if self.cut:
            raise ConnectionError("the link is cut")
        self.clock.advance(self.seconds + num_bytes * self.seconds_per_byte)

    def answer(self, item, version):
        self._over(0)
        self.num_answers += 1
        return self.centre.answer(item, version)

    def release(self, bits):
        self._over(0)
        return self.centre.release(bits)

    def echo(self, num_bytes):
        self._over(num_bytes)


class Site:
    """Edge and centre over random but learnable items: the label is the largest of 32 sums."""

    def __init__(self) -> None:
        random = torch.Generator().manual_seed(1)
        self.items = torch.randn(400, 64, generator=random)
        self.large = nn.Sequential(nn.Linear(64, 32, bias=False)).eval()
        with torch.no_grad():
            self.large[0].weight.copy_(torch.randn(32, 64, generator=random))
        self.labels = self.large(self.items).argmax(dim=-1)
        self.small = deepcopy(self.large)  # right often, not always
        with torch.no_grad():
            self.small[0].weight.add_(0.5 * torch.randn(32, 64, generator=random))
        self.clock = ManualClock()
        self.centre = Centre(self.large, self.small, self.items[:200], self.labels[:200])
        self.link = FakeLink(self.centre, self.clock)

    def cascade(self, threshold: float) -> Cascade:
        return Cascade(self.link, link_state(), threshold=threshold, clock=self.clock)

    def answers(self, cascade: Cascade):
        return [cascade.answer(item) for item in self.items[200:]]


@pytest.fixture
def site():
    return Site()


def test_cascade_answers_what_it_is_sure_of_and_forwards_the_rest(site):
    answers = site.answers(site.cascade(0.9))

    model, temperature = site.centre.release(8).model, site.centre.release(8).temperature
    logits = model(site.items[200:])
    sure = confidence(logits, temperature)
    # the plain way: all items at once, each by its confidence
    near = sure >= 0.9
    labels = torch.where(near, logits.argmax(dim=-1), site.labels[200:])
    assert [a.label for a in answers] == labels.tolist()
    assert [a.source == "edge" for a in answers] == near.tolist()
    assert 20 < near.sum() < 180
    assert site.link.num_answers == (~near).sum()
    assert {a.seconds for a in answers if a.source == "edge"} == {0.0}
    assert all(a.seconds == pytest.approx(0.1) for a in answers if a.source == "centre")


@pytest.mark.parametrize(("threshold", "source"), [(0.0, "edge"), (1.0, "centre")])
def test_cascade_at_the_ends_of_its_threshold_never_or_always_forwards(site, threshold, source):
    sources = {a.source for a in site.answers(site.cascade(threshold)) if a.confidence < 1}

    assert sources == {source}


def test_cascade_with_a_cut_link_marks_its_answers_until_a_probe_comes_back(site):
    cascade = site.cascade(1.0)
    site.link.cut = True
    first, second = cascade.answer(site.items[0]), cascade.answer(site.items[0])
    cascade.probe()
    still = cascade.answer(site.items[0])
    site.link.cut = False
    cascade.probe()

    assert [a.source for a in (first, second, still)] == ["fallback"] * 3
    assert first.label == int(site.centre.release(8).model(site.items[:1]).argmax())
    assert cascade.answer(site.items[0]).source == "centre"


def test_cascade_of_another_version_is_refused_and_updated(site):
    cascade = site.cascade(0.99)
    stale = cascade.version
    site.centre.update(site.large)

    with pytest.raises(VersionMismatchError, match="take the new ones with `release`"):
        site.centre.answer(site.items[0], stale)
    site.answers(cascade)

    assert cascade.version == site.centre.version == weights_version(site.large) != stale
    assert cascade.num_updates == 1


def test_cascade_whose_link_is_cut_at_the_update_falls_back_with_the_old_weights(site):
    cascade = site.cascade(1.0)
    stale = cascade.version
    site.centre.update(site.large)
    site.link.release = lambda _: site.link._over(0) if site.link.cut else _cut()

    answer = cascade.answer(site.items[0])

    assert (answer.source, cascade.version, cascade.link.is_cut) == ("fallback", stale, True)


def _cut():
    raise ConnectionError("the link was cut")


def test_cascade_whose_centre_never_settles_says_so(site):
    cascade = site.cascade(1.0)

    def answer(*_):
        raise VersionMismatchError("the edge has other weights; take the new ones")

    site.link.answer = answer
    with pytest.raises(ServeError, match="other weights twice during one answer"):
        cascade.answer(site.items[0])


def test_cascade_on_a_slow_link_takes_4_bits_with_their_own_temperature(site):
    cascade = site.cascade(0.9)
    assert cascade.answer(site.items[0]).bits == 8
    site.link.seconds_per_byte = 1e-5  # 10 s for a megabyte
    for _ in range(10):
        cascade.probe()
    cascade.adapt()

    assert cascade.answer(site.items[0]).bits == 4
    assert site.centre.release(4).temperature != site.centre.release(8).temperature


def test_cascade_with_a_threshold_that_is_no_probability_says_so(site):
    with pytest.raises(ValueError, match=r"threshold=1\.5 is no probability"):
        site.cascade(1.5)


def test_weights_version_follows_values_and_names(site):
    other = deepcopy(site.small)
    assert weights_version(other) == weights_version(site.small)

    with torch.no_grad():
        other[0].weight[0, 0] += 1

    assert weights_version(other) != weights_version(site.small)
    assert weights_version(nn.Sequential(nn.Identity(), site.small)) != site.centre.version
