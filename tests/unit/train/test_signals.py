"""The first signal is a request, the second ends the process; handlers are put back."""

from __future__ import annotations

import signal
import subprocess
import sys

import pytest

from moe_train.train.signals import StopSignal


@pytest.mark.parametrize(("number", "code"), [(signal.SIGTERM, 0), (signal.SIGUSR1, 0), (signal.SIGINT, 130)])
def test_first_signal_is_a_request(number: signal.Signals, code: int) -> None:
    before = signal.getsignal(number)
    with StopSignal() as stop:
        assert not stop.requested
        signal.raise_signal(number)
        assert stop.requested
        assert (stop.received, stop.exit_code) == (number, code)
    assert signal.getsignal(number) is before


def test_second_signal_ends_at_once() -> None:
    script = """
import signal
from moe_train.train.signals import StopSignal
with StopSignal():
    signal.raise_signal(signal.SIGTERM)
    print('alive', flush=True)
    signal.raise_signal(signal.SIGINT)
    print('not reached')
"""
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, timeout=60)
    assert done.stdout == "alive\n"
    assert done.returncode == -signal.SIGINT
