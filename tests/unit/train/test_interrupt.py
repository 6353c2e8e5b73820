"""Ctrl-C between steps."""

import os
import signal
import threading

import pytest

from nbdist.train.interrupt import StopRequest


def test_first_interrupt_asks_and_the_second_raises():
    before = signal.getsignal(signal.SIGINT)
    with StopRequest() as stop:
        os.kill(os.getpid(), signal.SIGINT)
        assert stop.asked
        with pytest.raises(KeyboardInterrupt):
            os.kill(os.getpid(), signal.SIGINT)

    assert signal.getsignal(signal.SIGINT) is before


def test_outside_the_main_thread_the_handler_stays():
    before = signal.getsignal(signal.SIGINT)
    seen = []

    def enter():
        with StopRequest():
            seen.append(signal.getsignal(signal.SIGINT))

    thread = threading.Thread(target=enter)
    thread.start()
    thread.join()

    assert seen == [before]
