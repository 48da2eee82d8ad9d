"""Timing on the CPU: by the clock, as many launches as a sample needs."""

from __future__ import annotations

import time

import pytest

from tvr.bench import timer as timing
from tvr.bench.timer import LAUNCHES, make_timer


def counting(num_sets):
    counts = [0] * num_sets

    def launch(i):
        counts[i] += 1

    return counts, [lambda i=i: launch(i) for i in range(num_sets)]


def test_a_sample_is_of_at_least_twenty_launches_that_take_turns():
    counts, launches = counting(3)
    timer = make_timer(launches, None)
    assert (timer.mode, timer.launches, timer.note) == ("eager", LAUNCHES, "")
    before = list(counts)
    samples = timer.sample(3)
    assert len(samples) == 3
    done = [now - was for now, was in zip(counts, before, strict=True)]
    assert done == [3 * LAUNCHES // 3] * 3


def test_once_runs_every_set():
    counts, launches = counting(50)
    timer = make_timer(launches, None)
    before = list(counts)
    timer.once()
    assert [now - was for now, was in zip(counts, before, strict=True)] == [1] * 50


def test_long_launches_are_fewer(monkeypatch):
    monkeypatch.setattr(timing, "LONG_SAMPLE_US", 1000.0)
    timer = make_timer([lambda: time.sleep(2e-3)] * 2, None)
    assert timer.launches == 1
    assert timer.sample(1)[0] == pytest.approx(2000, rel=0.9)
