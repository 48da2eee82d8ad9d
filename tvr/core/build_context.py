"""What every part of a model needs to bind its ops."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from tvr.contract import BoundOp, OpSpec
    from tvr.core.config import ModelConfig
    from tvr.core.ops import OpTable


@dataclass(frozen=True, kw_only=True, slots=True)
class BuildContext:
    """`site` is where in the model the part stands, in the words of a checkpoint's tensor names."""

    ops: OpTable
    config: ModelConfig
    dtype: str
    block_size: int
    batch_invariant: bool
    site: str = ""

    def at(self, name: str) -> BuildContext:
        """Return the context of the part called `name` inside this one."""
        return replace(self, site=f"{self.site}.{name}" if self.site else name)

    def bind(self, spec: OpSpec) -> BoundOp:
        """Return the op bound for `spec` as this part is to call it."""
        return self.ops.bind_at(spec, self.site)
