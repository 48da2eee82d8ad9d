"""How long a decode step takes the device, whatever the host does meanwhile."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Any

import torch

from tvr.bench.engine_text import check_lengths
from tvr.bench.gpu_timer import between_events
from tvr.core.runner import on_device
from tvr.core.sampling_params import SamplingParams

if TYPE_CHECKING:
    from tvr.core.llm import LLM

#: Launches of a sample, and samples.
_LAUNCHES, _SAMPLES = 10, 5


def decode_device_ms(
    llm: LLM, prompts: Sequence[list[int]], output_len: int, sampling: Mapping[str, Any]
) -> list[float]:
    """Return samples of the milliseconds that the CUDA graph of a decode step takes.

    Half of each answer is made, which leaves contexts as long as they are in the mean. The last
    step's graph is then launched over and over between two events, so that the device never waits
    for the host. The requests end there.

    Args:
        llm: the engine, which must serve nothing else and have no prefix cache.
        prompts, output_len, sampling: as they are timed.

    Returns:
        None at all where no graph has the whole of a step from its arrays to its tokens, or the
        answers are so short that not all requests decode together.

    Raises:
        CheckFailed: a request ended before its length.
    """
    runner = llm.parts.runner
    if runner.graphs is None:
        return []
    params = SamplingParams(
        max_tokens=output_len, ignore_eos=True, **{"temperature": 0.0, **sampling}
    )
    ids = [f"device-{i}" for i in range(len(prompts))]
    try:
        for request_id, prompt in zip(ids, prompts, strict=True):
            llm.add_request(request_id, prompt, params)
        _answer(llm, ids, output_len // 2)
        step = runner.last_in_graph
        if step is None or len(step.rows) < len(prompts):
            return []
        return _samples(llm, runner.graphs.decodes.again(step))
    finally:
        for request_id in ids:
            llm.abort(request_id)
        while llm.has_unfinished_requests():
            llm.step()


def _answer(llm: LLM, ids: Sequence[str], num_tokens: int) -> None:
    """Step until each request has so many tokens of its answer."""
    lengths = dict.fromkeys(ids, 0)
    while min(lengths.values()) < num_tokens:
        for output in llm.step():
            if output.finished:
                check_lengths([output])
            lengths[output.request_id] = len(output.outputs[0].token_ids)


def _samples(llm: LLM, launch: Callable[[], None]) -> list[float]:
    def some() -> None:
        for _ in range(_LAUNCHES):
            launch()

    with on_device(torch.device(str(llm.parts.device)), llm.parts.ops.stream):
        us = between_events(some, _SAMPLES, _LAUNCHES, torch.cuda.current_stream())
    return [one / 1e3 for one in us]
