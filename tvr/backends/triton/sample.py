"""The next token of each row: the same launches whatever the rows ask for."""

from __future__ import annotations

from dataclasses import dataclass, replace

import torch
import triton
from torch import Tensor

from tvr.backends.triton.configs import tuned
from tvr.backends.triton.launch import Config, Gpu, Kernel
from tvr.backends.triton.sample_bracket import MARKS
from tvr.backends.triton.sample_choice import choice_kernel, pick_kernel
from tvr.backends.triton.sample_kernels import before_kernel, best_kernel, race_kernel
from tvr.backends.triton.sample_search import narrow_kernel, redraw_kernel
from tvr.backends.triton.sharing import programs_at_a_time, shared
from tvr.contract import BoundOp, Bounds, SampleSpec, SamplingTables

_ROUNDS = 2  # of marks: gaps at the end of the kept tokens are then known to 1 in 17 * 17
_TILES_OF_CHUNK = 4  # of a row that is searched; few rows are, and all programs share them


@dataclass(frozen=True)
class Room:
    """What the kernels leave for one another, for so many rows.

    Attributes:
        rows: most rows of a call.
        keys: partial results of a row, of the largest logit.
        tiles: the most parts that a row is cut into.
        chunks: parts of a row that is searched.
    """

    rows: int
    keys: int
    tiles: int
    chunks: int

    @property
    def _arrays(self) -> dict[str, tuple[torch.dtype, int]]:
        """Each array's type and numbers of a row, those of 8 bytes first."""
        of_marks = _ROUNDS * self.chunks * MARKS.value
        return {
            "partials": (torch.int64, self.keys),
            "drawn_places": (torch.int64, 1),
            "limits": (torch.int64, 1),
            "winners": (torch.int32, self.tiles),
            "masses": (torch.float32, self.tiles),
            "counts_before": (torch.int32, self.tiles),
            "masses_before": (torch.float32, self.tiles),
            "counts_upto": (torch.int32, of_marks),
            "masses_upto": (torch.float32, of_marks),
            "searched": (torch.int32, 1),
            "num_searched": (torch.int32, 1),  # the first row's is that of all
        }

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


def bind_sample(spec: SampleSpec, gpu: Gpu) -> BoundOp:
    vocab = spec.vocab_size
    best_config = tuned(
        "sample_best", gpu.sm, Config(num_warps=4, blocks={"BLOCK": 2048}), dtype=spec.dtype
    )
    race_config = tuned("sample_race", gpu.sm, Config(num_warps=8, blocks={"BLOCK": 1024}))
    before_config = tuned("sample_before", gpu.sm, Config(num_warps=8, blocks={"WIDE": 2}))
    search_config = Config(num_warps=8)
    # A search to the last token goes through a row alone, so its programs are large.
    choice_config = tuned("sample_choice", gpu.sm, Config(num_warps=16, blocks={"WIDE": 2}))
    block = race_config.blocks["BLOCK"]
    tiles = triton.cdiv(vocab, block)
    chunks = triton.cdiv(tiles, _TILES_OF_CHUNK)
    before_tiles = triton.cdiv(tiles, before_config.blocks["WIDE"])
    best_tiles = triton.cdiv(vocab, best_config.blocks["BLOCK"])
    keys = {"KEYS": triton.next_power_of_2(best_tiles)}
    by_tile = {**keys, "TILES": triton.next_power_of_2(tiles)}
    by_chunk = {**by_tile, "BLOCK": block, "CHUNKS": triton.next_power_of_2(chunks), "MARKS": MARKS}
    after = {**by_chunk, "ROUNDS": _ROUNDS}
    # Products are rounded before they are added to, as in the reference.
    best = Kernel(gpu, best_kernel, best_config, **keys).unfused()
    race = Kernel(gpu, race_kernel, race_config, max_registers=64, **by_tile).unfused()
    before = Kernel(gpu, before_kernel, before_config, BLOCK=block, **by_tile).unfused()
    pick = Kernel(gpu, pick_kernel, Config(num_warps=2), **by_tile).unfused()
    narrow = [
        Kernel(gpu, narrow_kernel, search_config, max_registers=128, ROUND=i, **by_chunk).unfused()
        for i in range(_ROUNDS)
    ]
    redraw = Kernel(gpu, redraw_kernel, search_config, max_registers=64, **after).unfused()
    choice = Kernel(gpu, choice_kernel, choice_config, **after).unfused()
    rooms: dict[str, Tensor] = {}
    configs = best_config, race_config, before_config, search_config
    programs = [programs_at_a_time(gpu, config) for config in configs]
    best_programs, race_programs, before_programs, search_programs = programs
    row_room = Room(rows=1, keys=keys["KEYS"], tiles=tiles, chunks=chunks)

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
        best_parts, best_tiles_of_part = shared(n, best_tiles, best_programs)
        race_parts, tiles_of_race = shared(n, tiles, race_programs)
        parts, tiles_of_part = shared(n, before_tiles, before_programs)
        penalties = (tables.repetition, tables.presence, tables.frequency, tables.counts)
        strides = (logits.stride(0), tables.counts.stride(0), vocab)
        heat = (tables.temperature, tables.max_gap)
        filters = (tables.top_k, tables.top_p)
        drawing = (logits, rows, output_positions, *heat)
        x = rooms
        sums_before = (x["counts_before"], x["masses_before"], x["masses"])
        to_search = (x["limits"], x["searched"], x["num_searched"])
        sums_upto = (x["counts_upto"], x["masses_upto"])
        in_chunks = (n * chunks * MARKS.value, chunks)
        best(
            (n, best_parts),
            *(logits, rows, *penalties, x["partials"], x["num_searched"]),
            *(*strides, best_tiles_of_part),
        )
        race(
            (n, race_parts),
            *(*drawing, tables.seeds, *penalties, x["partials"], x["winners"]),
            *(*strides, tiles, best_parts, tiles_of_race),
        )
        before(
            (n, parts),
            *(*drawing, *filters, tables.seeds, *penalties),
            *(x["partials"], x["winners"], *sums_before),
            *(*strides, tiles, best_parts, race_parts, tiles_of_part),
        )
        pick(
            (n,),
            *(*drawing, *filters, tables.seeds, *penalties),
            *(x["partials"], x["winners"], *sums_before, x["drawn_places"], *to_search),
            *(*strides, tiles, best_parts, race_parts, parts),
        )
        searchers = (min(n * chunks, search_programs),)
        for round_of_marks in narrow:
            round_of_marks(
                searchers,
                *(logits, rows, *heat, *filters, *penalties),
                *(x["partials"], x["masses"], *to_search, *sums_upto),
                *(*strides, tiles, best_parts, parts, *in_chunks, _TILES_OF_CHUNK),
            )
        redraw(
            searchers,
            *(*drawing, *filters, tables.seeds, *penalties),
            *(x["partials"], x["winners"], x["masses"], *to_search, *sums_upto),
            *(*strides, tiles, best_parts, parts, *in_chunks, _TILES_OF_CHUNK),
        )
        choice(
            (n,),
            *(*drawing, *filters, tables.seeds, *penalties),
            *(x["partials"], x["winners"], x["masses"], x["drawn_places"], x["limits"]),
            *(*sums_upto, last_token, out),
            *(*strides, tiles, best_parts, parts, *in_chunks),
        )
        return out

    def workspace_bytes(bounds: Bounds) -> int:
        """Return room for what the kernels find out about each row."""
        return replace(row_room, rows=bounds.max_num_seqs).num_bytes

    def attach(tensor: Tensor) -> None:
        """Take the workspace. Every run writes what it reads there."""
        rows = len(tensor) // row_room.num_bytes
        rooms.update(replace(row_room, rows=rows).arrays(tensor))

    return BoundOp(run=run, workspace_bytes=workspace_bytes, attach=attach)
