"""The contract as one text. A change here is a change of the ABI, so it must be a deliberate one.

Adding an op, a hook, or a field that has a neutral value raises `ABI_MINOR`; any other change
raises `ABI_MAJOR` and with it the entry-point group. Note both under "Backend contract" in the
changelog, then replace the text of `frozen_contract.txt`.
"""

from __future__ import annotations

import dataclasses
import inspect
from pathlib import Path

from tvr import contract, hookspecs
from tvr.contract.capability import FLAGS
from tvr.core.plugin_checks import HOOKS

FROZEN = Path(__file__).with_name("frozen_contract.txt")


def signature(function) -> str:
    return str(inspect.signature(function)).replace("'", "")


def described_fields(cls) -> list[str]:
    lines = []
    for f in dataclasses.fields(cls):
        default = ""
        if f.default is not dataclasses.MISSING:
            default = f" = {sorted(f.default) if isinstance(f.default, frozenset) else f.default!r}"
        elif f.default_factory is not dataclasses.MISSING:
            default = f" = {f.default_factory.__name__}()"
        lines.append(f"    {f.name}: {f.type}{default}")
    return lines


def described_contract() -> str:
    lines = [f"abi {contract.ABI_MAJOR}.{contract.ABI_MINOR} group {contract.ENTRY_POINT_GROUP}"]
    lines += [f"dtypes {' '.join(contract.DTYPES)}", f"ops {' '.join(contract.OPS)}"]
    lines.append(f"flags {' '.join(sorted(FLAGS))}")
    lines += [f"composite {op} = {' + '.join(parts)}" for op, parts in contract.COMPOSITES.items()]
    lines += ["", "hooks"]
    lines += [f"    {name}{signature(getattr(hookspecs, name))}" for name in HOOKS]
    lines += ["", "run"]
    for op, protocol in contract.PROTOCOLS.items():
        lines.append(f"    {op}{signature(protocol.__call__).replace('self, ', '')}")
    data = [contract.BoundOp, contract.Bounds, contract.StepMeta]
    data += [contract.BackendInfo, contract.Box, contract.DeviceFacts, *contract.SPECS.values()]
    for cls in data:
        op = getattr(cls, "op", None)
        lines += ["", f"{cls.__name__}{f' ({op})' if op else ''}", *described_fields(cls)]
    return "\n".join(lines) + "\n"


def test_the_contract_is_the_frozen_one():
    assert described_contract() == FROZEN.read_text()


def test_the_frozen_text_would_show_a_changed_signature_and_a_changed_default():
    frozen = FROZEN.read_text()
    assert "tvr_bind_rope(spec: RopeSpec, device: DeviceFacts) -> BoundOp | None" in frozen
    assert "    argmax(logits: Tensor, *, out: Tensor) -> Tensor" in frozen
    assert "    batch_invariant: bool = False" in frozen
