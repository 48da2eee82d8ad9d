"""What is asked of a model: the very requests of nano-vllm's benchmark, or those of one size."""

from __future__ import annotations

import random

from tvr.bench.workload import nano_workload, random_prompts, random_workload


def test_nano_has_the_known_number_of_tokens():
    """nano-vllm's README states 133,966 tokens of output."""
    work = nano_workload(256, 128_256, 0)
    assert (work.num_prompt_tokens, sum(work.output_lens)) == (142_827, 133_966)
    assert work.longest == 2011
    assert len(work.prompts) == len(work.output_lens) == 256
    assert str(work) == "nano, 256 requests"


def test_nano_draws_as_the_random_module_does():
    random.seed(3)
    prompts = [
        [random.randint(0, 10000) for _ in range(random.randint(100, 1024))] for _ in range(4)
    ]
    lens = [random.randint(100, 1024) for _ in range(4)]
    work = nano_workload(4, 20_000, 3)
    assert (work.prompts, work.output_lens) == (prompts, lens)


def test_a_small_vocabulary_changes_the_ids_and_no_length():
    small, large = nano_workload(8, 100, 0), nano_workload(8, 128_256, 0)
    assert max(map(max, small.prompts)) < 100
    assert small.output_lens == large.output_lens
    assert [len(p) for p in small.prompts] == [len(p) for p in large.prompts]


def test_random_prompts_follow_the_seed_and_stay_in_the_vocabulary():
    first, again, other = (random_prompts(3, 40, 50, seed) for seed in (0, 0, 1))
    assert first == again != other
    assert [len(prompt) for prompt in first] == [40] * 3
    assert max(map(max, first)) < 50
    assert max(map(max, random_prompts(2, 500, 128_256, 0))) < 10_000


def test_requests_of_one_size():
    work = random_workload(3, 5, 7, 100, 1)
    assert (work.longest, work.num_prompt_tokens, work.output_lens) == (12, 15, [7] * 3)
    assert work.fields == {"num_prompts": 3, "input_len": 5, "output_len": 7, "seed": 1}
