"""Objects that a long-lived engine is made of are no work for the garbage collector."""

from __future__ import annotations

import gc
import subprocess
import sys
import weakref

import pytest

from tvr.core.garbage import FrozenObjects, frozen_objects


class Ring:
    """Refers to itself, so that only the collector can free it."""

    def __init__(self):
        self.me = self


def is_left_out(ring):
    return all(o is not ring for o in gc.get_objects())


@pytest.fixture
def frozen():
    """What freezes and unfreezes, in a process where nobody else has frozen anything."""
    yield FrozenObjects()
    gc.unfreeze()


@pytest.fixture
def of_python(frozen):
    """How many objects are frozen when nobody has: Python 3.12 does so to immortal ones."""
    gc.unfreeze()
    gc.collect()
    return gc.get_freeze_count()


def test_what_is_left_out_comes_back_and_is_freed(frozen, of_python):
    kept, garbage = Ring(), Ring()
    ghosts = weakref.ref(kept), weakref.ref(garbage)
    del garbage
    assert frozen.freeze()
    assert ghosts[1]() is None  # what was garbage before is gone
    assert gc.get_freeze_count() > 1000
    assert len(gc.get_objects()) < 1000
    del kept
    gc.collect()
    assert ghosts[0]() is not None
    frozen.unfreeze()
    gc.collect()
    assert ghosts[0]() is None
    assert gc.get_freeze_count() == of_python


def test_the_first_engine_to_close_leaves_the_others_objects_frozen(frozen, of_python):
    rings = []
    for _ in range(2):
        rings.append(Ring())
        assert frozen.freeze()
    frozen.unfreeze()
    assert all(is_left_out(ring) for ring in rings)
    frozen.unfreeze()
    gc.collect()
    assert gc.get_freeze_count() == of_python
    assert frozen.freeze()  # and an engine that is loaded afterwards is left out again
    assert is_left_out(rings[0])


def test_what_somebody_froze_before_is_left_to_him(frozen):
    theirs = Ring()
    gc.freeze()
    ours = Ring()
    assert not frozen.freeze()
    assert is_left_out(theirs)
    assert not is_left_out(ours)


def test_immortal_objects_keep_no_engine_from_freezing(frozen, monkeypatch):
    ring = Ring()
    monkeypatch.setattr(gc, "get_freeze_count", lambda: 375)  # as in Python 3.12
    assert frozen.freeze()
    assert is_left_out(ring)


def test_the_first_engine_of_a_process_freezes():
    code = "from tvr.core.garbage import frozen_objects as f; assert f().freeze()"
    subprocess.run([sys.executable, "-c", code], check=True, timeout=60)


@pytest.mark.parametrize("num_engines_after", [0, 1])
def test_what_somebody_froze_since_stays_frozen(frozen, num_engines_after):
    assert frozen.freeze()
    theirs = Ring()
    gc.freeze()
    for _ in range(num_engines_after):
        assert frozen.freeze()
    for _ in range(1 + num_engines_after):
        frozen.unfreeze()
    assert is_left_out(theirs)


def test_what_somebody_unfroze_is_no_trouble(frozen, of_python):
    assert frozen.freeze()
    gc.unfreeze()
    frozen.unfreeze()
    gc.collect()
    assert gc.get_freeze_count() == of_python
    assert frozen.freeze()


def test_all_engines_of_a_process_share_what_freezes():
    assert frozen_objects() is frozen_objects()


def test_what_freezes_is_there_before_two_threads_can_ask_for_it_at_once():
    code = "from tvr.core.garbage import frozen_objects as f; assert f.cache_info().currsize == 1"
    subprocess.run([sys.executable, "-c", code], check=True, timeout=60)
