"""TrainHistory and the progress line."""

import builtins
import io
import sys

import pytest

from nbdist.train.metrics import ProgressLine, StepRecord, TrainHistory


def _record(step, loss, validation=None):
    return StepRecord(
        step=step,
        loss=loss,
        learning_rate=1e-3,
        grad_norm=1.0,
        seconds=0.5,
        tokens_per_second=200.0,
        validation_loss=validation,
    )


@pytest.fixture
def history():
    return TrainHistory([_record(1, 6.9), _record(2, 5.5, 5.75), _record(3, 5.0)])


def test_repr_tells_first_and_last_loss_steps_and_speed(history):
    assert repr(history) == (
        "TrainHistory(loss 6.900 -> 5.000, validation loss 5.750, steps 1-3, 200 tokens/s)"
    )
    assert repr(TrainHistory()) == "TrainHistory(no steps)"


def test_losses_are_those_of_the_records(history):
    assert history.losses == [6.9, 5.5, 5.0]
    assert len(history) == 3


def test_plot_shows_losses_over_steps_without_pyplot(history):
    pytest.importorskip("matplotlib")
    figure = history.plot()

    training, validation = figure.axes[0].lines
    assert list(training.get_xdata()) == [1, 2, 3]
    assert list(training.get_ydata()) == history.losses
    assert list(validation.get_xdata()) == [2]
    assert figure._repr_png_().startswith(b"\x89PNG")
    assert "matplotlib.pyplot" not in sys.modules


def test_plot_without_matplotlib_names_the_command(history, monkeypatch):
    real = builtins.__import__

    def without_matplotlib(name, *args, **kwargs):
        if name.startswith("matplotlib"):
            raise ImportError(name)
        return real(name, *args, **kwargs)

    monkeypatch.setattr(builtins, "__import__", without_matplotlib)

    with pytest.raises(ImportError, match=r'pip install "nbdist\[plot\]"'):
        history.plot()


def test_progress_line_shows_loss_and_speed_where_asked(monkeypatch):
    monkeypatch.setattr(sys, "stderr", io.StringIO())
    with ProgressLine(done=0, total=2, shown=True) as line:
        line.show(_record(1, 6.9))
        line.show(_record(2, 5.5, 5.75))

    shown = sys.stderr.getvalue().splitlines()[-1]
    assert "2/2" in shown
    assert "loss 5.500, validation 5.750, 200 tokens/s, lr 1.0e-03" in shown


def test_progress_line_is_silent_where_not_asked(monkeypatch):
    monkeypatch.setattr(sys, "stderr", io.StringIO())
    with ProgressLine(done=0, total=2, shown=False) as line:
        line.show(_record(1, 6.9))

    assert sys.stderr.getvalue() == ""
