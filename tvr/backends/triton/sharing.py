"""How rows of logits are shared out among programs, where there may be fewer rows than room."""

from __future__ import annotations

from functools import cache

from tvr.backends.triton.launch import Config, Gpu

_WARPS_OF_AN_SM = 32  # as many as their registers let in


def programs_at_a_time(gpu: Gpu, config: Config) -> int:
    """Return how many programs of a kernel that shares rows run at a time."""
    return gpu.num_sms * max(1, _WARPS_OF_AN_SM // config.num_warps)


@cache
def shared(num_rows: int, tiles: int, programs: int) -> tuple[int, int]:
    """Return into how many parts a row is cut, and of how many tiles each is.

    Programs come in waves of `programs`, and what each does first takes as long as a tile: that
    the last wave be full and that there be few programs are weighed against each other.
    """

    def tile_times(parts: int) -> int:
        waves = -(-num_rows * parts // programs)
        return waves * (-(-tiles // parts) + 1)

    tiles_of_part = -(-tiles // min(range(1, tiles + 1), key=tile_times))
    return -(-tiles // tiles_of_part), tiles_of_part
