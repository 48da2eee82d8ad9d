"""Some steps of a model under torch's profiler, with the phases of a step and its ops by name."""

from __future__ import annotations

import json
from collections.abc import Sequence
from contextlib import AbstractContextManager
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

from torch._C._profiler import _ExperimentalConfig
from torch.profiler import ProfilerActivity, profile, record_function

from tvr.bench.engine_model import BenchModel, synchronise
from tvr.bench.trace import HEADER_KEY
from tvr.bench.trace_ops import OpRanges
from tvr.core.llm import LLM
from tvr.core.phases import marked_phases
from tvr.core.sampling_params import SamplingParams
from tvr.errors import ConfigError


def load_for_profile(model: BenchModel, backend: str, *, context: int, num_seqs: int) -> LLM:
    """Return an engine whose ops are ranges of a profile, and without a prefix cache.

    Where the model is not to be launched eagerly, steps may be CUDA graphs. In these there are no
    calls to see, so ops are no ranges, and kernels have no name but their own.

    Args:
        model: what runs.
        backend: the one put first.
        context: most tokens of a request.
        num_seqs: requests that must run at once.

    Raises:
        TvrError: it cannot be loaded.
    """
    most_seqs, most_tokens = model.step_limits(num_seqs)
    return LLM(
        model.path,
        backend=backend,
        dtype=model.dtype,
        device=str(model.device),
        max_model_len=context,
        max_num_seqs=most_seqs,
        max_num_batched_tokens=most_tokens,
        enable_prefix_caching=False,
        load_format=model.load_format,
        plugins=model.plugins,
        batch_invariant=model.batch_invariant,
        enforce_eager=model.enforce_eager,
        shadow=OpRanges() if model.enforce_eager else None,
    )


def profile_steps(
    llm: LLM,
    path: Path,
    *,
    prompts: Sequence[list[int]],
    output_len: int,
    num_steps: int,
    header: dict[str, Any],
) -> int:
    """Trace the first steps of a batch of requests, and write them as a Chrome trace.

    The batch has run to its end once before, untraced: kernels are compiled then.

    Args:
        llm: the engine, which must serve nothing else.
        path: of the JSON.
        prompts: token ids of each request.
        output_len: tokens of each answer.
        num_steps: steps to trace; fewer where the requests end before. The engine runs ahead by
            one, and so sends off two at least.
        header: written into the trace, under `HEADER_KEY`.

    Returns:
        The steps that were traced.

    Raises:
        ConfigError: the file cannot be written.
        TvrError: the engine failed.
    """
    params = SamplingParams(temperature=0.0, max_tokens=output_len, ignore_eos=True)
    outputs = llm.generate(list(prompts), params)
    if failed := [o.outputs[0].error for o in outputs if o.outputs[0].error is not None]:
        raise ConfigError(f"the model failed before it was traced: {failed[0]}")
    activities = [ProfilerActivity.CPU]
    if llm.parts.device.type == "cuda":
        activities.append(ProfilerActivity.CUDA)
    ids = [f"profile-{i}" for i in range(len(prompts))]
    num_launched = 0

    def marked(phase: str) -> AbstractContextManager[object]:
        nonlocal num_launched
        num_launched += phase == "launch"
        return record_function(phase)

    synchronise(llm)
    # On a CPU the step is computed in a thread of its own, which must be seen, too.
    threads = _ExperimentalConfig(profile_all_threads=True)
    with (
        profile(activities=activities, experimental_config=threads, acc_events=True) as profiler,
        marked_phases(llm, marked),
    ):
        for request_id, prompt in zip(ids, prompts, strict=True):
            llm.add_request(request_id, prompt, params)
        while num_launched < num_steps and llm.has_unfinished_requests():
            llm.step()
        for request_id in ids:
            llm.abort(request_id)
        while llm.has_unfinished_requests():  # the steps in flight end within the trace
            llm.step()
        synchronise(llm)
        profiler.add_metadata_json(HEADER_KEY, json.dumps(header))
    _export(profiler, path)
    return num_launched


def _export(profiler: profile, path: Path) -> None:
    """Write the trace; where torch cannot, it leaves half a file beside an older one, silently."""
    with TemporaryDirectory(dir=path.parent, prefix=".tvr-trace-") as folder:
        whole = Path(folder) / path.name
        profiler.export_chrome_trace(str(whole))
        if not whole.exists():
            raise ConfigError(f"the trace {path} cannot be written; see if its disk is full")
        whole.replace(path)
