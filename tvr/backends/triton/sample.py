"""The next token of each row: four launches, whatever the rows ask for."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cache

import torch
import triton
from torch import Tensor

from tvr.backends.triton.configs import tuned
from tvr.backends.triton.launch import Config, Gpu, Kernel
from tvr.backends.triton.sample_choice import choice_kernel
from tvr.backends.triton.sample_kernels import before_kernel, best_kernel, race_kernel
from tvr.contract import BoundOp, Bounds, SampleSpec, SamplingTables

_WARPS_OF_AN_SM = 32  # where rows are shared: as many as their registers let in


@dataclass(frozen=True)
class Room:
    """What the kernels leave for one another, for so many rows.

    Attributes:
        rows: most rows of a call.
        keys: partial results of a row, of the largest logit.
        tiles: those of all else.
    """

    rows: int
    keys: int
    tiles: int

    @property
    def _arrays(self) -> dict[str, tuple[torch.dtype, int]]:
        by_tile = {
            "nearest": torch.float32,
            "winners": torch.int32,
            "masses": torch.float32,
            "counts_before": torch.int32,
            "masses_before": torch.float32,
        }
        tiles = {name: (dtype, self.tiles) for name, dtype in by_tile.items()}
        return {"partials": (torch.int64, self.keys), **tiles}

    @property
    def num_bytes(self) -> int:
        """Bytes of all arrays."""
        return sum(self.rows * columns * dtype.itemsize for dtype, columns in self._arrays.values())

    def arrays(self, workspace: Tensor) -> dict[str, Tensor]:
        """Return the arrays, flat, of a workspace of `num_bytes`."""
        found, begin = {}, 0
        for name, (dtype, columns) in self._arrays.items():
            end = begin + self.rows * columns * dtype.itemsize
            found[name] = workspace[begin:end].view(dtype)
            begin = end
        return found


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


def bind_sample(spec: SampleSpec, gpu: Gpu) -> BoundOp:
    vocab = spec.vocab_size
    best_config = tuned(
        "sample_best", gpu.sm, Config(num_warps=4, blocks={"BLOCK": 2048}), dtype=spec.dtype
    )
    tile_config = tuned("sample_race", gpu.sm, Config(num_warps=8, blocks={"BLOCK": 2048}))
    # A search goes through a row alone, so its programs are large.
    choice_config = tuned("sample_choice", gpu.sm, Config(num_warps=16, blocks={"WIDE": 2}))
    block = tile_config.blocks["BLOCK"]
    tiles = triton.cdiv(vocab, block)
    best_tiles = triton.cdiv(vocab, best_config.blocks["BLOCK"])
    sizes = {"KEYS": triton.next_power_of_2(best_tiles)}
    by_tile = {**sizes, "TILES": triton.next_power_of_2(tiles)}
    # Products are rounded before they are added to, as in the reference.
    best = Kernel(gpu, best_kernel, best_config, **sizes).unfused()
    race = Kernel(gpu, race_kernel, tile_config, **sizes).unfused()
    before = Kernel(gpu, before_kernel, tile_config, **by_tile).unfused()
    choice = Kernel(gpu, choice_kernel, choice_config, BLOCK=block, **by_tile).unfused()
    rooms: dict[str, Tensor] = {}

    def programs(config: Config) -> int:
        """Return how many run at a time."""
        return gpu.num_sms * max(1, _WARPS_OF_AN_SM // config.num_warps)

    room = Room(rows=0, keys=sizes["KEYS"], tiles=tiles)

    def run(
        logits: Tensor,
        rows: Tensor,
        output_positions: Tensor,
        tables: SamplingTables,
        last_token: Tensor,
        *,
        out: Tensor,
    ) -> Tensor:
        """out [R] int64: the token of each row of logits [R, vocab]; -1: none is finite."""
        n = len(logits)
        best_parts, best_tiles_of_part = shared(n, best_tiles, programs(best_config))
        parts, tiles_of_part = shared(n, tiles, programs(tile_config))
        penalties = (tables.repetition, tables.presence, tables.frequency, tables.counts)
        strides = (logits.stride(0), tables.counts.stride(0), vocab)
        ranked = (tables.temperature, tables.max_gap, tables.top_k, tables.top_p, tables.seeds)
        heat, most, _, top_p, seeds = ranked
        partials, nearest, winners, masses = (
            rooms[name] for name in ("partials", "nearest", "winners", "masses")
        )
        sums_before = (rooms["counts_before"], rooms["masses_before"])
        best((n, best_parts), logits, rows, *penalties, partials, *strides, best_tiles_of_part)
        race(
            (n, parts),
            *(logits, rows, output_positions, heat, most, top_p, seeds, *penalties),
            *(partials, nearest, winners, masses),
            *(*strides, tiles, best_parts, tiles_of_part),
        )
        before(
            (n, parts),
            *(logits, rows, output_positions, *ranked, *penalties),
            *(partials, nearest, winners, *sums_before),
            *(*strides, tiles, best_parts, tiles_of_part),
        )
        choice(
            (n,),
            *(logits, rows, output_positions, *ranked, *penalties),
            *(partials, nearest, winners, masses, *sums_before, last_token, out),
            *(*strides, tiles, best_parts),
        )
        return out

    def room_for(bounds: Bounds) -> Room:
        return Room(rows=bounds.max_num_seqs, keys=room.keys, tiles=room.tiles)

    def workspace_bytes(bounds: Bounds) -> int:
        """Return room for what the kernels find out about each tile of each row."""
        return room_for(bounds).num_bytes

    def attach(tensor: Tensor) -> None:
        """Take the workspace. Every run writes what it reads there."""
        rows = len(tensor) // Room(rows=1, keys=room.keys, tiles=room.tiles).num_bytes
        rooms.update(Room(rows=rows, keys=room.keys, tiles=room.tiles).arrays(tensor))

    return BoundOp(run=run, workspace_bytes=workspace_bytes, attach=attach)
