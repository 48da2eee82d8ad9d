"""tvr: a plug-in LLM runtime. `LLM` and `SamplingParams` are imported on first use."""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from pluggy import HookimplMarker

    from tvr.core.llm import LLM
    from tvr.core.outputs import CompletionOutput, Logprob, RequestOutput
    from tvr.core.sampling_params import SamplingParams

    hookimpl: HookimplMarker

__version__ = "0.1.0"

__all__ = [
    "LLM",
    "CompletionOutput",
    "Logprob",
    "RequestOutput",
    "SamplingParams",
    "__version__",
    "hookimpl",
]

# Resolved on first use, so that `import tvr` costs neither torch nor pluggy.
_LAZY = {
    "LLM": "tvr.core.llm",
    "SamplingParams": "tvr.core.sampling_params",
    "CompletionOutput": "tvr.core.outputs",
    "Logprob": "tvr.core.outputs",
    "RequestOutput": "tvr.core.outputs",
    "hookimpl": "tvr.hookspecs",
}


def __getattr__(name: str) -> Any:  # noqa: ANN401
    if name not in _LAZY:
        raise AttributeError(f"module 'tvr' has no attribute {name!r}")
    value = getattr(import_module(_LAZY[name]), name)
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return sorted(__all__)
