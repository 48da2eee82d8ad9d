"""Speed of the torch backend on a CPU next to transformers' eager `generate`, same threads.

    python benchmarks/cpu_speed.py MODEL_DIR [--batch 1 8] [--dtype float32 bfloat16] [--json FILE]

Greedy, the same prompts and weights, no stop. The two take turns, several rounds; each is given
its best round, and the spread is printed. In fp32 their tokens must be equal, or nothing is timed.
"""

from __future__ import annotations

import argparse
import json
import platform
import sys
import time
from pathlib import Path

import torch
import transformers

from tvr import LLM, SamplingParams

PROMPT_TOKENS = 32


def main() -> None:
    """Measure and print; exit with 1 where fp32 tokens differ."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("model", help="directory of a checkpoint")
    parser.add_argument("--batch", type=int, nargs="+", default=[1, 8])
    parser.add_argument("--dtype", nargs="+", default=["float32", "bfloat16"])
    parser.add_argument("--new-tokens", type=int, default=48)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--json", type=Path)
    args = parser.parse_args()
    rows = []
    for dtype in args.dtype:
        reference = transformers.AutoModelForCausalLM.from_pretrained(
            args.model, dtype=getattr(torch, dtype), attn_implementation="eager"
        )
        with LLM(args.model, dtype=dtype, device="cpu", enable_prefix_caching=False) as llm:
            for batch in args.batch:
                rows.append(compare(reference, llm, dtype, batch, args))
    if args.json:
        numbers = {
            "machine": platform.machine(),
            "threads": torch.get_num_threads(),
            "python": platform.python_version(),
            "torch": torch.__version__,
            "transformers": transformers.__version__,
            "command": f"python benchmarks/cpu_speed.py MODEL_DIR --rounds {args.rounds}",
            "prompt_tokens": PROMPT_TOKENS,
            "new_tokens": args.new_tokens,
            "rows": rows,
        }
        args.json.write_text(json.dumps(numbers, indent=2) + "\n")


def compare(
    reference: transformers.PreTrainedModel,
    llm: LLM,
    dtype: str,
    batch: int,
    args: argparse.Namespace,
) -> dict[str, object]:
    """Return tokens per second of both, for one dtype and batch size."""
    generator = torch.Generator().manual_seed(0)
    vocab_size = llm.parts.model_config.vocab_size
    prompts = torch.randint(100, vocab_size, (batch, PROMPT_TOKENS), generator=generator)
    params = SamplingParams(temperature=0, max_tokens=args.new_tokens, ignore_eos=True)

    def ours() -> list[list[int]]:
        return [o.outputs[0].token_ids for o in llm.generate(prompts.tolist(), params)]

    def theirs() -> list[list[int]]:
        ids = reference.generate(
            prompts,
            attention_mask=torch.ones_like(prompts),
            max_new_tokens=args.new_tokens,
            min_new_tokens=args.new_tokens,
            do_sample=False,
            eos_token_id=None,
            pad_token_id=0,
        )
        return ids[:, PROMPT_TOKENS:].tolist()

    if ours() != theirs() and dtype == "float32":
        sys.exit(f"batch {batch}: fp32 tokens differ; nothing is timed")
    times: dict[str, list[float]] = {"tvr": [], "transformers": []}
    for _ in range(args.rounds):
        for name, run in (("tvr", ours), ("transformers", theirs)):
            began = time.perf_counter()
            run()
            times[name].append(time.perf_counter() - began)
    count = batch * args.new_tokens
    speeds = {name: sorted(count / t for t in found) for name, found in times.items()}
    ratio = speeds["tvr"][-1] / speeds["transformers"][-1]
    spread = {name: f"{s[-1]:.1f} ({s[0]:.1f} to {s[-1]:.1f})" for name, s in speeds.items()}
    print(
        f"{dtype:9} batch {batch}: tvr {spread['tvr']}, "
        f"transformers {spread['transformers']} tokens/s, ratio {ratio:.2f}"
    )
    return {"dtype": dtype, "batch": batch, "tokens_per_second": speeds, "ratio": ratio}


if __name__ == "__main__":
    main()
