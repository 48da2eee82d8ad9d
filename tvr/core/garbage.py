"""What the garbage collector does to a process that steps a model every millisecond."""

from __future__ import annotations

import gc


def leave_out_of_collections() -> None:
    """Leave all objects there are now out of later collections, until `take_back`.

    To look through the hundreds of thousands that torch and a model are made of takes a tenth of a
    second, in which a device has nothing to do. What is garbage now is collected first.
    """
    gc.collect()
    gc.freeze()


def take_back() -> None:
    """Let collections look at everything again."""
    gc.unfreeze()
