"""A stand-in for device and model that checks every block a step reads.

A slot of its KV pool holds a token and a digest of all tokens up to it, as K and V depend on all
tokens up to theirs. The next token is a function of the last digest, so a sequence that ever read
a wrong, unwritten or overwritten slot fails a check here, or ends with other tokens than alone.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from tvr.core import Entry, Result, ScheduleOutput, Scheduler, Sequence, SequenceUpdate

VOCAB = 16
_EMPTY = 0x9E3779B9


def extend(digest: int, token: int) -> int:
    """Return the digest of a sequence with one token more."""
    digest = ((digest ^ (token + 1)) * 0x9E3779B97F4A7C15 + 0x632BE59BD9B4E019) & (2**64 - 1)
    return digest ^ (digest >> 29)


def next_token(digest: int) -> int:
    return (digest >> 7) % VOCAB


def alone(
    prompt: list[int],
    *,
    max_tokens: int,
    max_model_len: int,
    min_tokens: int = 0,
    stop_token_ids: frozenset[int] = frozenset(),
) -> tuple[list[int], str]:
    """Generate without scheduler or pool; return the tokens and the finish reason."""
    digest = _EMPTY
    for token in prompt:
        digest = extend(digest, token)
    tokens: list[int] = []
    while True:
        token = next_token(digest)
        tokens.append(token)
        digest = extend(digest, token)
        if token in stop_token_ids and len(tokens) >= min_tokens:
            return tokens, "stop"
        if len(tokens) == max_tokens or len(prompt) + len(tokens) == max_model_len:
            return tokens, "length"


@dataclass
class Submitted:
    """A step sent to the device: prefill tokens travel with it, decode tokens do not."""

    output: ScheduleOutput
    sequences: list[Sequence]
    prefill_tokens: list[list[int]]


class FakeDevice:
    """Runs steps in order. Slots hold (token, digest), or None where nothing was written."""

    def __init__(self, scheduler: Scheduler) -> None:
        blocks = scheduler.block_manager
        self.block_size = blocks.block_size
        self.pool: list[tuple[int, int] | None] = [None] * (blocks.num_blocks * self.block_size)
        self.block_tables: dict[int, list[int]] = {}
        self.last_token: dict[int, int] = {}
        self.num_computed = 0

    def submit(self, output: ScheduleOutput, sequences: dict[str, Sequence]) -> Submitted:
        """Take what the host knows at the time of scheduling."""
        seqs = [sequences[entry.request_id] for entry in output.entries]
        prefills = [
            seq.token_ids[entry.start : entry.start + entry.num_tokens]
            for seq, entry in list(zip(seqs, output.entries, strict=True))[output.num_decodes :]
        ]
        return Submitted(output, seqs, prefills)

    def run(
        self, step: Submitted, *, broken: bool = False, unchecked: Callable[[Sequence], bool]
    ) -> list[Result]:
        """Run a step; all its reads come before its writes.

        Args:
            step: the step.
            broken: leave garbage in every slot the step writes and return nothing.
            unchecked: sequences whose slots may hold garbage.
        """
        output = step.output
        for reset in output.row_resets:
            self.block_tables[reset.row] = []
            self.last_token.pop(reset.row, None)
        writes: list[tuple[int, tuple[int, int]]] = []
        results: list[Result] = []
        for index, entry in enumerate(output.entries):
            table = self.block_tables[entry.row]
            table.extend(entry.new_block_ids)
            if index < output.num_decodes:
                tokens = [self.last_token.get(entry.row, -1)]
            else:
                tokens = step.prefill_tokens[index - output.num_decodes]
            assert len(tokens) == entry.num_tokens
            seq = step.sequences[index]
            is_checked = not unchecked(seq)
            digest = self._read(table, entry, seq) if is_checked else _EMPTY
            if broken:
                digest ^= 0xBAD
            for offset, token in enumerate(tokens):
                digest = extend(digest, token)
                writes.append((self._slot(table, entry.start + offset), (token, digest)))
            self.num_computed += len(tokens)
            if entry.samples:
                token = next_token(digest)
                self.last_token[entry.row] = token
                results.append(Result(entry.request_id, entry.epoch, token))
        slots = [slot for slot, _ in writes]
        assert len(set(slots)) == len(slots), "a slot is written twice in one step"
        for slot, content in writes:
            self.pool[slot] = content
        return results

    def _slot(self, table: list[int], position: int) -> int:
        return table[position // self.block_size] * self.block_size + position % self.block_size

    def _read(self, table: list[int], entry: Entry, seq: Sequence) -> int:
        """Check that the slots before `entry` hold its sequence; return the last digest."""
        digest = _EMPTY
        for position in range(entry.start):
            content = self.pool[self._slot(table, position)]
            assert content is not None, f"{entry}: position {position} was never written"
            token, stored = content
            digest = extend(digest, token)
            assert stored == digest, f"{entry}: position {position} belongs to another sequence"
            if seq.request_id == entry.request_id and position < len(seq.token_ids):
                assert token == seq.token_ids[position], f"{entry}: wrong token at {position}"
        return digest


class Loop:
    """Scheduler and device together, as an engine runs them."""

    def __init__(self, *, lag: int = 1, **options: object) -> None:
        settings: dict[str, object] = {
            "num_blocks": 64,
            "max_num_seqs": 8,
            "max_num_batched_tokens": 64,
            "max_model_len": 256,
            "max_lag": lag,
        }
        self.scheduler = Scheduler(**(settings | options))  # type: ignore[arg-type]
        self.lag = lag
        self.device = FakeDevice(self.scheduler)
        self.sequences: dict[str, Sequence] = {}
        self.in_flight: list[Submitted] = []
        self.outputs: list[ScheduleOutput] = []
        self.broken: set[int] = set()  # id() of sequences whose slots hold garbage

    def add(self, request_id: str, prompt: list[int], **options: object) -> Sequence:
        seq = Sequence(request_id, prompt, **({"max_tokens": 4} | options))  # type: ignore[arg-type]
        self.scheduler.add(seq)
        self.sequences[request_id] = seq
        return seq

    def schedule(self) -> ScheduleOutput | None:
        output = self.scheduler.schedule()
        if output is not None:
            self.outputs.append(output)
            self.in_flight.append(self.device.submit(output, self.sequences))
        return output

    def update(self) -> list[SequenceUpdate]:
        """Run and update the oldest step in flight: every other one by columns."""
        step = self.in_flight.pop(0)
        results = self.device.run(step, unchecked=lambda seq: id(seq) in self.broken)
        step_id = step.output.step_id
        if step_id % 2:
            return self.scheduler.update_columns(step_id, [result.token for result in results])
        return self.scheduler.update(step_id, results)

    def fail(self, error: str = "the device broke") -> list[SequenceUpdate]:
        """Let the oldest step in flight fail."""
        step = self.in_flight.pop(0)
        self.device.run(step, broken=True, unchecked=lambda seq: id(seq) in self.broken)
        self.broken |= {id(seq) for seq in step.sequences}
        return self.scheduler.fail_step(step.output.step_id, error)

    def step(self) -> list[SequenceUpdate]:
        """Schedule ahead as far as the lag allows, then update one step."""
        self.schedule()
        if len(self.in_flight) <= self.lag:
            self.schedule()
        return self.update() if self.in_flight else []

    def drain(self, max_steps: int = 10_000) -> None:
        """Step until nothing is unfinished and nothing in flight."""
        for _ in range(max_steps):
            if not self.scheduler.has_unfinished and not self.in_flight:
                return
            if not self.in_flight:
                assert self.schedule() is not None, "unfinished, nothing in flight, no work"
            self.step()
        raise AssertionError(f"not done after {max_steps} steps")

    def assert_as_alone(self, *seqs: Sequence) -> None:
        """Check that sequences which ended on their own got the tokens they get alone."""
        for seq in seqs:
            expected = alone(
                seq.token_ids[: seq.num_prompt_tokens],
                max_tokens=seq.max_tokens,
                max_model_len=self.scheduler.max_model_len,
                min_tokens=seq.min_tokens,
                stop_token_ids=seq.stop_token_ids,
            )
            assert (seq.output_token_ids, seq.finish_reason) == expected, seq

    def assert_empty(self) -> None:
        """Check that every block and row has come back."""
        counts = self.scheduler.block_manager.counts()
        assert counts.used == counts.held == 0
        assert counts.free + counts.cached == self.scheduler.block_manager.num_blocks
        assert self.scheduler.num_running == self.scheduler.num_waiting == 0
