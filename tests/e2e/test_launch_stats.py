"""`--stats` tells an author why steps are launched op by op."""

from __future__ import annotations

from dataclasses import replace
from types import SimpleNamespace

import pytest

from support import graph_safe
from support.engines import greedy, prompts_of, save_shape
from support.graphed import graphed, roomy
from tvr.backends.torch_ref import plugin
from tvr.cli.stats import print_stats
from tvr.contract import BackendInfo, Box
from tvr.core.graph_capture import obstacles, partial_obstacles
from tvr.hookspecs import hookimpl


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory):
    return save_shape(tmp_path_factory.mktemp("model"))


def third_party(name, op, *, flags=(), **limits):
    """Return a package's backend that serves one op as the reference does, declaring `flags`."""
    box = Box(dtypes=["float32"], devices=["cpu"], flags=frozenset(flags), **limits)
    info = BackendInfo(name=name, abi=(1, 0), ops={op: [box]})

    @hookimpl
    def bind(spec, device):
        return getattr(plugin, f"tvr_bind_{op}")(spec=spec, device=device)

    return SimpleNamespace(**{"tvr_backend_info": hookimpl(lambda: info), f"tvr_bind_{op}": bind})


def steps_line(llm, capsys, reasons):
    """Return what the stats say of steps where these are the reasons, as on a GPU."""
    (output,) = llm.generate(prompts_of([20]), greedy(5))
    llm.parts = replace(llm.parts, eager_reasons=tuple(reasons))
    print_stats(llm, output, 3)
    (line,) = [text for text in capsys.readouterr().err.splitlines() if text.startswith("steps ")]
    return " ".join(line.split())


def with_plugins(checkpoint, *plugins):
    return roomy(checkpoint, graph_safe.backend, more_plugins=plugins)


def test_the_op_and_the_package_that_keep_steps_from_being_graphs_are_named(checkpoint, capsys):
    with with_plugins(checkpoint, third_party("fastnorm", "rms_norm")) as llm:
        reasons = obstacles(llm.config, llm.parts.ops)
        assert steps_line(llm, capsys, reasons) == (
            "steps 0 as CUDA graphs, 5 op by op "
            "(rms_norm of backend 'fastnorm' is not declared cuda_graph)"
        )


def test_an_op_that_is_declared_is_no_reason(checkpoint):
    with with_plugins(checkpoint, third_party("fastnorm", "rms_norm", flags=["cuda_graph"])) as llm:
        assert llm.parts.ops.served()["rms_norm"] == ["fastnorm"]
        assert obstacles(llm.config, llm.parts.ops) == []
        assert partial_obstacles(llm.parts.ops) == []


def test_every_package_that_serves_an_op_without_the_flag_is_named(checkpoint):
    """Products of few rows and of many may come from two."""
    small = third_party("small", "linear", max_rows=8)
    large = third_party("large", "linear")
    with with_plugins(checkpoint, small, large) as llm:
        (reason,) = obstacles(llm.config, llm.parts.ops)
    assert reason == "linear of backend 'large' and 'small' is not declared cuda_graph"


def test_prompts_alone_op_by_op_are_explained(checkpoint, capsys):
    with with_plugins(checkpoint, third_party("fastfill", "attention_prefill")) as llm:
        assert obstacles(llm.config, llm.parts.ops) == []
        assert "steps with prompts: attention_prefill of backend 'fastfill' is not declared" in (
            steps_line(llm, capsys, partial_obstacles(llm.parts.ops))
        )


def test_steps_larger_than_every_graph_are_explained(checkpoint, capsys, monkeypatch):
    monkeypatch.setattr("tvr.core.chunk_graphs._TOKENS", (16,))
    monkeypatch.setattr("tvr.core.chunk_graphs._TOKENS_BESIDE_DECODES", (16,))
    with graphed(checkpoint, graph_safe.backend) as llm:
        assert steps_line(llm, capsys, []) == (
            "steps 4 as CUDA graphs, 1 op by op "
            "(graphs hold up to 8 decodes, or 16 tokens of 16 chunks beside 8 decodes)"
        )
        llm.parts.runner.counts["eager"] = 0
        (output,) = llm.generate(prompts_of([9], seed=1), greedy(5))
        print_stats(llm, output, 3)
        assert "0 op by op\n" in capsys.readouterr().err
