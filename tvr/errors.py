"""The exception tree. Every error a user or a plugin can cause is a `TvrError`.

A message has four parts: what was asked, what was found, what is allowed, what to do.
"""

from __future__ import annotations


class TvrError(Exception):
    """Base of all errors raised on purpose by tvr."""


class ConfigError(TvrError, ValueError):
    """A setting, a config file or an argument is not acceptable."""


class RequestError(TvrError, ValueError):
    """One request is not acceptable; the engine and its other requests are untouched."""


class PolicyError(TvrError):
    """A scheduling policy raised or gave a useless answer; no request is lost."""


class CheckpointError(TvrError):
    """A model directory is incomplete, damaged or not supported."""


class CapacityError(TvrError):
    """The memory at hand cannot hold what was asked for."""


class PluginError(TvrError):
    """A plugin or the plug-in configuration is not acceptable."""


class PluginLoadError(PluginError):
    """A plugin could not be imported, or its hooks break the contract."""


class AbiMismatch(PluginError):
    """A plugin was written for another version of the backend contract."""


class BackendUnavailable(TvrError):
    """A backend asked for by name cannot run on this machine."""


class UnsupportedSpec(TvrError):
    """No backend, or not the pinned one, serves an op with the needed properties."""


class KernelError(TvrError):
    """A kernel failed to compile or to launch."""


class OpFault(TvrError):
    """An op's result is over its limit, found by repeating the op on a reference."""


class CompileError(KernelError):
    """A kernel source did not compile.

    Attributes:
        found: what is wrong, whichever kernel was compiled: file, line, the compiler's words.
        source: name of the source file.
        command: the compiler's command line.
        log: what the compiler printed.
    """

    def __init__(self, found: str, *, kernel: str, source: str, command: str, log: str) -> None:
        super().__init__(f"{found}; {kernel} from {source} was compiled by: {command}")
        self.found = found
        self.source = source
        self.command = command
        self.log = log
