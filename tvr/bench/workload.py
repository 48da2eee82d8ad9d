"""What the benchmarks of whole models ask for: random prompts, and how long the answers are."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from random import Random
from typing import Any

#: Ids of random tokens are below this, or below the vocabulary's size.
LARGEST_ID = 10_000

#: Of nano-vllm's workload: the shortest and the longest prompt and answer.
NANO_LENGTHS = (100, 1024)


@dataclass(frozen=True, kw_only=True)
class Workload:
    """Requests that are made all at once.

    Attributes:
        name: "random" or "nano".
        prompts: token ids of each.
        output_lens: new tokens of each.
        fields: what tells it from others, for its rows.
    """

    name: str
    prompts: Sequence[list[int]]
    output_lens: Sequence[int]
    fields: dict[str, Any]

    @property
    def longest(self) -> int:
        """Tokens of the longest request, prompt and answer."""
        pairs = zip(self.prompts, self.output_lens, strict=True)
        return max(len(prompt) + new for prompt, new in pairs)

    @property
    def num_prompt_tokens(self) -> int:
        """Tokens of all prompts."""
        return sum(map(len, self.prompts))

    def __str__(self) -> str:
        return f"{self.name}, {len(self.prompts)} requests"


def random_prompts(num_prompts: int, input_len: int, vocab_size: int, seed: int) -> list[list[int]]:
    """Return prompts of random ids, `input_len` tokens each."""
    rng = Random(seed)
    end = min(LARGEST_ID, vocab_size)
    return [[rng.randrange(end) for _ in range(input_len)] for _ in range(num_prompts)]


def random_workload(
    num_prompts: int, input_len: int, output_len: int, vocab_size: int, seed: int
) -> Workload:
    """Return requests of one size."""
    return Workload(
        name="random",
        prompts=random_prompts(num_prompts, input_len, vocab_size, seed),
        output_lens=[output_len] * num_prompts,
        fields={
            "num_prompts": num_prompts,
            "input_len": input_len,
            "output_len": output_len,
            "seed": seed,
        },
    )


def nano_workload(num_prompts: int, vocab_size: int, seed: int) -> Workload:
    """Return the requests of nano-vllm's benchmark: prompts and answers of 100 to 1024 tokens.

    With 256 prompts and seed 0 they are that benchmark's very requests, but for ids past a small
    vocabulary, which are taken modulo its size; the lengths are the same then, too.

    Source: github.com/GeeeekExplorer/nano-vllm, bench.py (MIT): the order in which its random
    numbers are drawn.
    """
    rng = Random(seed)
    shortest, longest = NANO_LENGTHS
    prompts = []
    for _ in range(num_prompts):
        length = rng.randint(shortest, longest)  # before the ids
        prompts.append([rng.randint(0, LARGEST_ID) % vocab_size for _ in range(length)])
    return Workload(
        name="nano",
        prompts=prompts,
        output_lens=[rng.randint(shortest, longest) for _ in range(num_prompts)],
        fields={"num_prompts": num_prompts, "seed": seed},
    )
