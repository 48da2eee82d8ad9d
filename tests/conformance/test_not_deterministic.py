"""A backend that sums in another order each time is right; its faults are found all the same."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from support.faults import FAULTS, faulty
from tvr.backends.torch_ref import plugin
from tvr.conformance import check_backend, format_results
from tvr.contract import OPS
from tvr.hookspecs import hookimpl

SUMS = ("attention_decode", "attention_prefill", "linear")
#: Found by comparing two runs, which without determinism cannot be done by bits.
RELATIONS = (
    *("unused_slots_are_never_read", "table_past_the_end_is_never_read"),
    *("block_order_does_not_matter", "interleaved_cache_is_read_right", "later_tokens_are_hidden"),
    *("nan_sequence_stays_alone", "nan_row_stays_alone", "empty_batch_is_accepted"),
)


def restless(backend, op):
    """Return `backend` with an `op` in fp32 whose elements are off by their last bit by chance."""
    right = getattr(backend, f"tvr_bind_{op}")
    generator = torch.Generator().manual_seed(0)

    @hookimpl
    def bind(spec, device):
        bound = right(spec=spec, device=device)
        if spec.batch_invariant or spec.dtype != "float32":
            return None

        def run(*args, **kwargs):
            result = bound.run(*args, **kwargs)
            out = kwargs["out"]
            up = torch.rand(out.shape, generator=generator) < 0.05
            larger = torch.nextafter(out, torch.tensor(torch.inf, dtype=out.dtype))
            out.copy_(torch.where(up & out.isfinite() & (out != 0), larger, out))
            return result

        return replace(bound, run=run)

    @hookimpl
    def info():
        info = plugin.tvr_backend_info()
        boxes = [replace(b, dtypes=["float32"], flags=frozenset()) for b in info.ops[op]]
        return replace(info, ops={op: boxes})

    hooks = {name: value for name, value in vars(backend).items() if name.startswith("tvr_")}
    for other in OPS:
        if other != op:
            hooks.pop(f"tvr_bind_{other}", None)
    changed = {f"tvr_bind_{op}": bind, "tvr_backend_info": info}
    return type("Restless", (), {k: staticmethod(v) for k, v in {**hooks, **changed}.items()})


@pytest.mark.parametrize("op", SUMS)
def test_a_right_backend_that_never_repeats_its_bits_passes(op):
    results = check_backend(restless(plugin, op), ops=[op])
    assert not any(r.failed for r in results), format_results(results)
    assert "is not declared deterministic" in {r.detail for r in results}


@pytest.mark.parametrize(
    "fault",
    [f for f in FAULTS if f.check in RELATIONS and f.op in SUMS and f.level == "smoke"],
    ids=lambda fault: f"{fault.check}-{fault.name}",
)
def test_its_faults_are_found_by_the_same_checks(fault):
    backend = restless(faulty(fault), fault.op)
    results = check_backend(backend, ops=[fault.op], checks=[fault.check], max_examples=0)
    assert any(r.failed for r in results), format_results(results)
