"""Measures how the Triton backend's kernels are compiled best, and writes the table that ships.

    python tools/tune_triton.py [--op OP ...] [--dtype bfloat16 ...] [--head-dim 64 ...]
                                [--products HIDDEN,QKV,INTERMEDIATE,VOCAB]

Needs an NVIDIA GPU. `triton_trials.py` says what is tried and how it is measured. The default stays
unless a candidate is faster by more than the spread. Under TRITON_INTERPRET=1 all but the compiling
is done on the CPU, to try the tool: such times mean nothing, and no table is written.
"""

from __future__ import annotations

import argparse
import os
import sys
from pathlib import Path
from typing import NoReturn

import torch

from tvr.backends.triton import plugin
from tvr.backends.triton.probe import why_no_triton, why_not_on
from tvr.bench.op_cells import PRODUCTS, Products
from tvr.conformance.report import write_report
from tvr.conformance.subject import device_facts
from tvr.contract import DTYPES, OPS, DeviceFacts
from tvr.errors import BackendUnavailable, ConfigError, TvrError

TABLE = Path(plugin.__file__).with_name("tuned.json")
EMPTY = '{"header": {}, "entries": []}'


class Parser(argparse.ArgumentParser):
    """Refuses arguments as everything else is refused, without its usage."""

    def error(self, message: str) -> NoReturn:
        raise ConfigError(message)


def products(text: str) -> Products:
    """Return the sizes in `text`.

    Raises:
        ArgumentTypeError: it is something else.
    """
    sizes = text.split(",")
    if len(sizes) != len(PRODUCTS) or not all(s.isdecimal() and int(s) > 0 for s in sizes):
        raise argparse.ArgumentTypeError(
            f"is {text!r}; it must be four sizes, as in {','.join(map(str, PRODUCTS))}"
        )
    return Products(*map(int, sizes))


def parse_args() -> argparse.Namespace:
    """Return the arguments.

    Raises:
        ConfigError: one is not acceptable.
    """
    parser = Parser(description=__doc__.split("\n")[0])
    parser.add_argument("--op", action="append", choices=OPS, help="default: all")
    parser.add_argument("--dtype", action="append", choices=DTYPES, help="default: bfloat16")
    parser.add_argument(
        "--head-dim",
        action="append",
        type=int,
        choices=plugin.HEAD_DIMS,
        help="default: 64 and 128",
    )
    parser.add_argument(
        "--products",
        type=products,
        default=PRODUCTS,
        metavar="HIDDEN,QKV,INTERMEDIATE,VOCAB",
        help="sizes of a model's matrix products, as 4096,6144,14336,128256; default: Llama-3.2-1B",
    )
    parser.add_argument("--out", type=Path, default=TABLE)
    parser.add_argument("--jobs", type=int, default=os.cpu_count(), help="processes that compile")
    args = parser.parse_args()
    if args.jobs < 1:
        parser.error(f"argument --jobs: is {args.jobs}; it must be 1 or more")
    return args


def device_to_tune() -> DeviceFacts:
    """Return the current GPU, or the CPU under the interpreter.

    Raises:
        BackendUnavailable: there is no Triton, or no GPU that its kernels run on.
    """
    reasons = why_no_triton()
    if not reasons:
        from tvr.backends.triton.launch import is_interpreted

        try:
            device = device_facts("cpu" if is_interpreted() else "cuda")
        except BackendUnavailable as error:
            raise BackendUnavailable(
                f"{error}; times are measured on an NVIDIA GPU, TRITON_INTERPRET=1 tries the tool "
                "without one"
            ) from error
        reasons = why_not_on(device)
        if not reasons:
            return device
    raise BackendUnavailable("; ".join(reasons))


def require_writable(out: Path) -> None:
    """Refuse a file that could not be written when everything has been measured.

    Raises:
        ConfigError: says why.
    """
    if out.is_dir():
        raise ConfigError(f"--out {out} is a folder; name a file")
    if not out.parent.is_dir():
        raise ConfigError(f"--out {out} cannot be written: there is no folder {out.parent}")
    wanted = (out, os.R_OK | os.W_OK) if out.exists() else (out.parent, os.W_OK)
    if not os.access(*wanted):
        raise ConfigError(f"--out {out} cannot be written: no permission; name another file")


def earlier(out: Path) -> str:
    """Return the text of the table in `out`; an empty one, and a word on stderr, if it has none.

    Raises:
        ConfigError: the file is there and cannot be read.
    """
    from tvr.backends.triton.configs import read_table

    try:
        text = out.read_text(encoding="utf-8")
        read_table(text)
    except FileNotFoundError:
        print(f"{out} is not there: a new table of these findings is written", file=sys.stderr)
    except ValueError as error:
        print(
            f"{out} is broken ({error}): a new table of these findings alone takes its place",
            file=sys.stderr,
        )
    except OSError as error:
        raise ConfigError(f"--out {out} cannot be read: {error.strerror}") from error
    else:
        return text
    return EMPTY


def run(args: argparse.Namespace) -> None:
    """Measure, print each finding, and write the table.

    Raises:
        TvrError: it cannot be done, and says why.
    """
    device = device_to_tune()
    on_cpu = device.type == "cpu"
    dtypes = args.dtype or ["float32" if on_cpu else "bfloat16"]
    allowed = plugin.INTERPRETED_DTYPES if on_cpu else DTYPES
    if refused := [dtype for dtype in dtypes if dtype not in allowed]:
        raise ConfigError(
            f"--dtype {', '.join(refused)} does not run in the interpreter; "
            f"allowed on a CPU: {', '.join(allowed)}"
        )
    if not on_cpu:
        require_writable(args.out)
    import triton
    from triton_trials import cells_of, line, merged, tune

    cells = [
        cell
        for dtype in dtypes
        for cell in cells_of(
            args.op or OPS, dtype, args.head_dim or (64, 128), on_cpu, args.products
        )
    ]
    findings = []
    for finding in tune(cells, device, args.jobs):
        findings.append(finding)
        print(line(finding), flush=True)
        for config, why in finding.failed.items():
            print(f"  {config}: {why}", flush=True)
    if on_cpu:
        print("times of the interpreter mean nothing: no table is written")
        return
    facts = {"gpu": str(device.name), "triton": triton.__version__, "torch": torch.__version__}
    write_report(args.out, merged(earlier(args.out), findings, device.sm or 0, facts))
    print(f"written: {args.out}")


def main() -> None:
    """Run the tool; whatever fails is one line and exit code 2."""
    try:
        run(parse_args())
    except TvrError as error:
        print(f"tune_triton: {' '.join(str(error).split())}", file=sys.stderr)
        raise SystemExit(2) from error


if __name__ == "__main__":
    main()
