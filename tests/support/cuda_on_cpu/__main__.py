"""`python -m support.cuda_on_cpu OP [...]`: the conformance of one op of the CUDA backend."""

from __future__ import annotations

import argparse
import sys

import torch

from support.cuda_on_cpu.backend import PycudaOnCpu
from support.cuda_on_cpu.gpu import CpuGpu
from support.cuda_on_cpu.library import why_not
from tvr.conformance import CheckResult, check_backend, format_results
from tvr.errors import ConfigError, PluginError


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m support.cuda_on_cpu", description=__doc__)
    parser.add_argument("op", nargs="+")
    parser.add_argument("--level", default="smoke", choices=("smoke", "quick", "full"))
    parser.add_argument("--case", action="append", help="a case's name or text; of one op")
    parser.add_argument("--check", action="append", help="a check's name")
    parser.add_argument("--seed", type=int, default=0, help="of the inputs")
    parser.add_argument("--order", type=int, default=1, help="of blocks and warps; 0: natural")
    parser.add_argument("--sms", type=int, default=4, help="multiprocessors the host code sees")
    parser.add_argument("--max-examples", type=int, help="cases drawn for each check")
    parser.add_argument("--checked", action="store_true", help="check every access to memory")
    parser.add_argument("--debug", action="store_true", help="compile with -O0 -g")
    parser.add_argument("-v", action="store_true", help="a line for each case")
    args = parser.parse_args()
    if reason := why_not():
        print(reason, file=sys.stderr)
        return 2
    torch.set_num_threads(1)
    gpu = CpuGpu(seed=args.order, num_sms=args.sms, checked=args.checked, debug=args.debug)

    def tell(result: CheckResult) -> None:
        if args.v:
            print(
                f"{result.seconds:7.2f}s {result.outcome} {result.check} {result.case}", flush=True
            )

    try:
        results = check_backend(
            PycudaOnCpu(gpu),
            ops=args.op,
            checks=args.check,
            cases=args.case,
            level=args.level,
            seed=args.seed,
            max_examples=args.max_examples,
            on_result=tell,
        )
    except (ConfigError, PluginError) as error:
        parser.error(str(error))
    print(format_results(results))
    # All skipped proves nothing.
    return int(any(r.failed for r in results) or all(r.outcome == "skipped" for r in results))


if __name__ == "__main__":
    sys.exit(main())
