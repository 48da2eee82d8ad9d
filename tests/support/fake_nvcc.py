"""A compiler that looks like nvcc, needs no CUDA and does at once what a test wants of it."""

from __future__ import annotations

import textwrap
from pathlib import Path

LOG = """\
ptxas info    : 0 bytes gmem
ptxas info    : Compiling entry function 'KERNEL' for 'sm_90'
ptxas info    : Function properties for KERNEL
    {stack} bytes stack frame, {stores} bytes spill stores, {loads} bytes spill loads
ptxas info    : Used {registers} registers, used 1 barriers, 512 bytes smem
"""


def ptxas_log(registers=40, *, stack=0, stores=0, loads=0) -> str:
    return LOG.format(registers=registers, stack=stack, stores=stores, loads=loads)


def fake_nvcc(folder: Path, *, version="13.0", body="", log: str | None = None) -> Path:
    """Write `folder/nvcc` and return its path.

    Args:
        body: shell commands that run before the result is written. `$args` are all arguments,
            `$out` the file asked for, `$source` the source, `$kernel` the kernel's name; `tell`
            prints a file as the log.
        log: printed by a compiler that succeeds, with `$kernel` where it has KERNEL.
    """
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "log").write_text(ptxas_log() if log is None else log)
    script = f"""\
        #!/bin/sh
        case "$1" in
        --version) echo "Cuda compilation tools, release {version}, V{version}.1"; exit ;;
        --list-gpu-arch) printf 'compute_%s\\n' 80 90 120; exit ;;
        esac
        args="$*"
        while [ $# -gt 0 ]; do
            case "$1" in -o) out=$2 ;; *.cu) source=$1 ;; esac
            shift
        done
        kernel=$(basename "$out"); kernel=${{kernel%%-*}}
        tell() {{ sed "s/KERNEL/$kernel/" "$1"; }}
        echo "$args" >> '{folder}/runs'
        {textwrap.indent(body, " " * 8).strip()}
        cat "$source" > "$out" && tell '{folder}/log'
        """
    path = folder / "nvcc"
    path.write_text(textwrap.dedent(script))
    path.chmod(0o755)
    return path


def runs(nvcc: Path) -> list[str]:
    """Return the arguments of every compilation so far."""
    file = nvcc.parent / "runs"
    return file.read_text().splitlines() if file.exists() else []
