"""A backend for tests of isolation: the reference, but each op does something bad on some cases.

Installed as a package, so that another process can load it.
"""

from __future__ import annotations

from pathlib import Path

from support.plugins import install

#: The backend's name.
NAME = "troubled"

#: What a test may look at: the backend writes the id of its own process, or of one it started.
PID_FILE = "pid"

_SOURCE = """
import ctypes
import os
import subprocess
import sys
import time
from dataclasses import replace
from pathlib import Path

from tvr.backends.torch_ref import plugin
from tvr.contract import BackendInfo
from tvr.hookspecs import hookimpl

HERE = Path(__file__).parent


def crash():
    print("about to crash")
    ctypes.string_at(0)


def leave():
    os._exit(3)


def hang():
    (HERE / "pid").write_text(str(os.getpid()))
    time.sleep(600)


def give_up():
    sys.exit("giving up")


def talk():
    print("hello from a kernel")
    os.write(1, b\'{"result": {"outcome": "failed"}}\\n{"done": true}\\n\')


def lose_the_device():
    from tvr.conformance import subject

    subject.Subject.answers = lambda self: False
    print("no longer there")
    raise RuntimeError("CUDA error: an illegal memory access was encountered")


def leave_a_process():
    command = [sys.executable, "-c", "import time; time.sleep(600)"]
    (HERE / "pid").write_text(str(subprocess.Popen(command).pid))


def never_again():
    (HERE / "never_again").touch()
    os._exit(4)


# op -> what it does, on float16 specs that have this value of this field
TROUBLES = {
    "rope": (crash, "num_heads", 9),
    "argmax": (leave, "vocab_size", 4099),
    "silu_mul": (hang, "intermediate_size", 1536),
    "linear": (give_up, "in_features", 576),
    "rms_norm": (talk, "hidden_size", 72),
    "add_rms_norm": (lose_the_device, "hidden_size", 72),
    "kv_write": (leave_a_process, "block_size", 8),
    "rope_kv_write": (never_again, "num_heads", 9),
}
if (HERE / "never_again").exists():
    os._exit(5)


@hookimpl
def tvr_backend_info():
    ops = plugin.tvr_backend_info().ops
    return BackendInfo(name="troubled", abi=(1, 0), ops={op: ops[op] for op in TROUBLES})


def hook_of(op):
    trouble, field, value = TROUBLES[op]

    @hookimpl
    def bind(spec, device):
        bound = getattr(plugin, f"tvr_bind_{op}")(spec=spec, device=device)

        def run(*args, **kwargs):
            trouble()
            return bound.run(*args, **kwargs)

        has_trouble = spec.dtype == "float16" and getattr(spec, field) == value
        return replace(bound, run=run) if has_trouble else bound

    return bind


for op in TROUBLES:
    globals()[f"tvr_bind_{op}"] = hook_of(op)
"""


def install_troubled(site: Path) -> Path:
    """Install it into the folder `site`, and return that."""
    return install(
        site,
        "tvr-troubled",
        entry_points={NAME: "tvr_troubled"},
        sources={"tvr_troubled.py": _SOURCE},
    )
