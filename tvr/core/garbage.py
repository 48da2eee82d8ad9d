"""What the garbage collector does to a process that steps a model every millisecond.

To look through the hundreds of thousands of objects that torch and a model are made of takes it a
tenth of a second, in which a device has nothing to do. So an engine on a GPU freezes what there is
when it is loaded: collections leave it out. Freezing is a matter of the whole process, and there
is no taking back a part of it, hence the rules here:

- objects stay frozen until the last engine is closed, since an engine that ends early must not
  bring collections back to one that still steps;
- then they are unfrozen, and not kept: what an engine leaves behind in cycles could never be freed;
- whoever freezes objects without us has a plan of his own. What was frozen before the first engine
  stays so, which means that no engine freezes; after a freeze that came later, none unfreezes.
  Immortal objects are nobody's plan: Python 3.12 freezes those it comes upon (375 of its own).
"""

from __future__ import annotations

import gc
import threading
from functools import cache

#: With more frozen objects it was not Python: whoever freezes takes thousands, even at the start.
_MOST_IMMORTAL = 2000


class _Mark:
    """Something that the garbage collector tracks."""

    __slots__ = ("me",)


class FrozenObjects:
    """Freezes what there is for as long as an engine wants it; any thread may ask."""

    def __init__(self) -> None:
        # Reentrant: a collection here may run a finaliser that closes another engine.
        self._lock = threading.RLock()
        self._num_engines = 0
        self._mark: _Mark | None = None

    def freeze(self) -> bool:
        """Leave all objects there are out of collections, for one engine more; see `unfreeze`.

        What is garbage is collected first.

        Returns:
            Whether it was done: not if somebody else froze objects before.
        """
        with self._lock:
            gc.collect()
            if self._num_engines == 0 and gc.get_freeze_count() > _MOST_IMMORTAL:
                return False
            alone = self._num_engines == 0 or self._is_ours()
            gc.freeze()
            self._num_engines += 1
            # Made behind the freeze, so another one shows by taking it along.
            self._mark = _Mark() if alone else None
            return True

    def unfreeze(self) -> None:
        """Take back one `freeze` that was done; with the last, collections look at everything."""
        with self._lock:
            self._num_engines -= 1
            if self._num_engines == 0:
                if self._is_ours():
                    gc.unfreeze()
                self._mark = None

    def _is_ours(self) -> bool:
        """Whether nobody else has frozen objects since we did."""
        # The list has what is tracked and not frozen.
        return self._mark is not None and any(o is self._mark for o in gc.get_objects())


@cache
def frozen_objects() -> FrozenObjects:
    """Return the one of this process."""
    return FrozenObjects()


# Made by the import, which one thread does: two that load their first engines at once would each
# make their own.
frozen_objects()
