"""What `tvr run --stats` prints, on stderr."""

from __future__ import annotations

import sys

from tvr.core.llm import LLM
from tvr.core.outputs import RequestOutput


def print_stats(llm: LLM, output: RequestOutput, most_blocks: int) -> None:
    """Print times, speed, KV use and which backend served each op.

    Args:
        llm: the engine.
        output: a finished output with one answer.
        most_blocks: KV blocks in use at the fullest moment.
    """
    metrics = output.metrics
    count = len(output.outputs[0].token_ids)
    lines = [
        ("model", f"{llm.parts.dtype} on {llm.parts.device}, {llm.limits}"),
        ("load", f"{llm.parts.load_seconds:.2f} s"),
        (
            "prompt",
            f"{len(output.prompt_token_ids)} tokens, {output.num_cached_tokens} from the cache",
        ),
        ("finish", f"{output.outputs[0].finish_reason} after {count} tokens"),
    ]
    if metrics.first_token_time is not None and metrics.finished_time is not None:
        ttft = metrics.first_token_time - metrics.arrival_time
        decode = metrics.finished_time - metrics.first_token_time
        lines.append(("TTFT", f"{ttft * 1e3:.1f} ms"))
        if count > 1:
            lines.append(("decode", f"{(count - 1) / decode:.1f} tokens/s"))
    share = 100 * most_blocks / llm.limits.num_blocks
    lines.append(("KV used", f"{most_blocks} of {llm.limits.num_blocks} blocks ({share:.1f}%)"))
    steps = llm.stats()
    graphs, eager = steps["num_graph_steps"], steps["num_eager_steps"]
    reasons = list(llm.parts.eager_reasons)
    if eager and llm.parts.runner.graphs is not None:
        reasons.append(f"graphs hold up to {llm.parts.runner.graphs}")
    why = f" ({'; '.join(reasons)})" if reasons else ""
    lines.append(("steps", f"{graphs} as CUDA graphs, {eager} op by op{why}"))
    served = llm.parts.ops.served()
    lines += [(f"op {op}", ", ".join(names)) for op, names in sorted(served.items())]
    lines += [
        (f"op {passed.op}", f"not {passed.backend}: {'; '.join(passed.reasons)}")
        for passed in llm.parts.ops.left_out
    ]
    width = max(len(name) for name, _ in lines)
    for name, value in lines:
        print(f"{name:<{width}}  {value}", file=sys.stderr)
