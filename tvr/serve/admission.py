"""How many sequences a server has taken on: the bound of its queue."""

from __future__ import annotations

import threading
from http import HTTPStatus

from tvr.serve.errors import ApiError, bad_request

#: Seconds after which a client that was turned away may come again.
_RETRY_AFTER_S = 1


class Admission:
    """Counts the unfinished sequences; safe to share among threads.

    Args:
        capacity: most of them, running and waiting.
    """

    def __init__(self, capacity: int) -> None:
        self.capacity = capacity
        self.taken = 0
        self._lock = threading.Lock()

    def take(self, num: int, held: int = 0) -> None:
        """Take on sequences.

        Args:
            num: all that a request has.
            held: those of them that were taken on before.

        Raises:
            ApiError: 400, a request with more than the capacity; 429, no room now.
        """
        if num > self.capacity:
            raise bad_request(
                f"the request asks for {num} answers (n times its prompts); this server takes at "
                f"most {self.capacity} at a time: send several requests",
                code="too_many_answers",
            )
        with self._lock:
            if self.taken + num - held <= self.capacity:
                self.taken += num - held
                return
        raise ApiError(
            HTTPStatus.TOO_MANY_REQUESTS,
            f"the queue is full: {self.taken} of {self.capacity} answers are under way or wait; "
            f"try again in {_RETRY_AFTER_S} s",
            code="queue_full",
            headers={"Retry-After": str(_RETRY_AFTER_S)},
        )

    def give_back(self, num: int) -> None:
        """Count sequences as over."""
        with self._lock:
            self.taken -= num
