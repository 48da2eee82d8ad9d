"""What `tvr kernels build` builds is what the ops load."""

from __future__ import annotations

import pytest

from tvr.backends.pycuda_raw.catalog import standard_jobs
from tvr.backends.pycuda_raw.compile import SOURCE_DIR
from tvr.backends.pycuda_raw.plugin import HEAD_DIMS, OP_MODULES
from tvr.contract import DTYPES

SOURCES = {file.stem for file in SOURCE_DIR.glob("*.cu")}


@pytest.mark.parametrize("sm", [80, 86, 90, 120])
def test_every_op_loads_kernels_whose_sources_are_there(sm):
    jobs = standard_jobs(sm, DTYPES, HEAD_DIMS)
    assert {job.variant.source for job in jobs} <= SOURCES
    assert {op for job in jobs for op in job.ops} == set(OP_MODULES)
    assert len({(job.variant, job.sm) for job in jobs}) == len(jobs)


def test_every_source_is_loaded_by_an_op():
    jobs = [job for sm in (80, 90, 120) for job in standard_jobs(sm, DTYPES, HEAD_DIMS)]
    assert {job.variant.source for job in jobs} == SOURCES


def test_kernels_of_one_architecture_are_built_for_no_other():
    specific = {
        sm: {
            job.variant.source
            for job in standard_jobs(sm, DTYPES, HEAD_DIMS)
            if job.variant.arch_specific
        }
        for sm in (80, 90, 120)
    }
    assert specific == {80: set(), 90: {"prefill_sm90"}, 120: set()}


def test_what_has_no_heads_is_built_once_for_all_head_dims():
    for job in standard_jobs(90, ["bfloat16"], HEAD_DIMS):
        assert (job.variant.head_dim is None) == (
            f"_h{job.variant.head_dim}" not in job.variant.symbol
        )

    def headless(head_dims):
        return [j for j in standard_jobs(90, ["bfloat16"], head_dims) if j.variant.head_dim is None]

    assert headless([64]) == headless(HEAD_DIMS)


def test_the_kernels_of_decode_are_known_as_such():
    jobs = standard_jobs(90, ["bfloat16"], [64])
    decode = {job.variant.source for job in jobs if "attention_decode" in job.ops}
    assert {"fd_split", "fd_combine", "paged_attention"} <= decode
    assert "rope" not in decode


@pytest.mark.parametrize("dtype", DTYPES)
def test_products_of_one_row_are_built_for_rows_of_every_length(dtype):
    """Of SILU there is none without NORM in a model."""
    jobs = standard_jobs(90, [dtype], [64])
    found = {tuple(job.variant.defines) for job in jobs if job.variant.source == "gemv"}
    names = ("PACKS", "TILED", "NORM", "SILU")
    assert found == {
        tuple(zip(names, (*length, *fused), strict=True))
        for length in ((1, 0), (2, 0), (2, 1))
        for fused in ((0, 0), (1, 0), (1, 1))
    }
