"""What tests call in another process."""

from __future__ import annotations

import os
import time


class Target:
    """Its methods take and return bytes, like those of a server's reader."""

    def twice(self, data: bytes) -> bytes:
        return data + data

    def twice_slowly(self, data: bytes) -> bytes:
        time.sleep(1)
        return data + data

    def pid(self, data: bytes) -> int:
        return os.getpid()

    def fail(self, data: bytes) -> None:
        raise ZeroDivisionError("by mistake")

    def sleep(self, data: bytes) -> None:
        time.sleep(1000)
