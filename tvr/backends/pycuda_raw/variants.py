"""Which kernel, compiled how."""

from __future__ import annotations

from dataclasses import dataclass

MIN_SM = 80  # bf16 matrix instructions and asynchronous copies

#: Names of the dtypes in the sources.
SHORT_DTYPES = {"float32": "fp32", "float16": "fp16", "bfloat16": "bf16"}


@dataclass(frozen=True, kw_only=True)
class KernelVariant:
    """A kernel source and the constants it is compiled with.

    Attributes:
        source: the file is `cuda/<source>.cu`, and its kernel is named after it.
        dtype: activation dtype in the contract's words.
        head_dim: for kernels that have heads.
        defines: further constants, (name, value).
        arch_specific: needs instructions of one architecture only (`sm_90a`, not `sm_90`).
    """

    source: str
    dtype: str
    head_dim: int | None = None
    defines: tuple[tuple[str, int], ...] = ()
    arch_specific: bool = False

    @property
    def symbol(self) -> str:
        """Name of the kernel in the compiled module: `fd_split_bf16_h64`."""
        heads = "" if self.head_dim is None else f"_h{self.head_dim}"
        return f"{self.source}_{SHORT_DTYPES[self.dtype]}{heads}"

    @property
    def flags(self) -> tuple[str, ...]:
        """The compiler's `-D` flags."""
        constants: list[tuple[str, object]] = [("DTYPE", SHORT_DTYPES[self.dtype])]
        if self.head_dim is not None:
            constants.append(("HEAD_DIM", self.head_dim))
        return tuple(f"-D{name}={value}" for name, value in (*constants, *self.defines))

    @property
    def constants(self) -> str:
        """The further constants, for people: `STAGES=3 CTAS=2`."""
        return " ".join(f"{name}={value}" for name, value in self.defines)

    def label(self, sm: int) -> str:
        """Return the kernel, its architecture and its further constants, for people."""
        return " ".join(filter(None, (self.symbol, self.arch(sm), self.constants)))

    def arch(self, sm: int) -> str:
        """Return the compiler's name of an architecture: 90 is `sm_90`, or `sm_90a`."""
        return f"sm_{sm}{'a' if self.arch_specific else ''}"
