"""Objects that a long-lived engine is made of are no work for the garbage collector."""

from __future__ import annotations

import gc
import weakref

from tvr.core.garbage import leave_out_of_collections, take_back


class Ring:
    """Refers to itself, so that only the collector can free it."""

    def __init__(self):
        self.me = self


def test_what_is_left_out_comes_back_and_is_freed():
    kept, garbage = Ring(), Ring()
    ghosts = weakref.ref(kept), weakref.ref(garbage)
    del garbage
    try:
        leave_out_of_collections()
        assert ghosts[1]() is None  # what was garbage before is gone
        assert gc.get_freeze_count() > 1000
        assert len(gc.get_objects()) < 1000
        del kept
        gc.collect()
        assert ghosts[0]() is not None
    finally:
        take_back()
    gc.collect()
    assert ghosts[0]() is None
    assert gc.get_freeze_count() == 0
