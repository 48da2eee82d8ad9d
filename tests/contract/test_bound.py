"""`check_bound`: a BoundOp that core could not call is refused when it is bound."""

from __future__ import annotations

import functools

import pytest

from tvr.contract import OPS, BoundOp, check_bound
from tvr.errors import PluginLoadError


class Norm:
    def method(self, x, weight, *, eps, out): ...

    def __call__(self, x, weight, *, eps, out): ...


def norm(x, weight, *, eps, out): ...


def decode(q, k_cache, v_cache, step, *, scale, out, lse=None): ...


@pytest.mark.parametrize(
    "run",
    [
        norm,
        Norm().method,
        Norm(),
        lambda x, weight, eps, out: None,
        lambda x, weight, /, *, eps, out: None,
        lambda a, b, /, *, eps, out: None,
        lambda x, /, weight, *, eps, out: None,
        lambda x, weight, *, eps, out, extra=None: None,
        lambda *args, **kwargs: None,
        functools.partial(lambda block, x, weight, *, eps, out: None, 128),
    ],
)
def test_a_run_that_takes_the_calls_arguments_is_accepted(run):
    bound = BoundOp(run=run)
    assert check_bound("rms_norm", bound) is bound


@pytest.mark.parametrize("op", OPS)
def test_a_run_that_takes_anything_fits_every_op(op):
    check_bound(op, BoundOp(run=lambda *args, **kwargs: None))


@pytest.mark.parametrize(
    ("op", "run", "message"),
    [
        ("rms_norm", lambda x, weight, *, out: None, "cannot be called as run"),
        ("rms_norm", lambda x, weight, *, eps, out, more: None, "more"),
        ("rms_norm", lambda x, *, eps, out: None, "too many positional"),
        ("rms_norm", lambda weight, x, *, eps, out: None, "'weight' where the contract has 'x'"),
        ("rms_norm", lambda x, w, *, eps, out: None, "'w' where the contract has 'weight'"),
        ("rms_norm", "norm", "run is str, not a callable"),
        ("attention_decode", lambda q, k_cache, v_cache, step, *, scale, out: None, "lse"),
        (
            "attention_decode",
            lambda q, k_cache, v_cache, step, *, scale, out, lse: None,
            "missing a required",
        ),
        ("argmax", lambda logits: None, "out"),
    ],
)
def test_a_run_of_another_signature_is_refused(op, run, message):
    with pytest.raises(PluginLoadError, match=message):
        check_bound(op, BoundOp(run=run))


def test_an_optional_argument_may_be_left_out_by_the_caller():
    check_bound("attention_decode", BoundOp(run=decode))


@pytest.mark.parametrize("answer", [norm, object(), {"run": norm}, True])
def test_anything_but_a_bound_op_is_refused(answer):
    with pytest.raises(PluginLoadError, match="must return a BoundOp or None"):
        check_bound("rms_norm", answer)


@pytest.mark.parametrize(
    ("extra", "message"),
    [
        ({"workspace_bytes": lambda bounds: 8}, "must be given together"),
        ({"attach": lambda workspace: None}, "must be given together"),
        ({"plan": lambda: None}, "plan cannot be called"),
        ({"plan": 3}, "plan is int, not a callable"),
        ({"workspace_bytes": lambda: 8, "attach": lambda w: None}, "workspace_bytes cannot"),
        ({"workspace_bytes": lambda b: 8, "attach": lambda: None}, "attach cannot be called"),
        ({"pack": lambda weight, bias: weight}, "pack is for linear and fused_linear only"),
    ],
)
def test_the_other_callables_of_a_bound_op_are_checked_too(extra, message):
    with pytest.raises(PluginLoadError, match=message):
        check_bound("rms_norm", BoundOp(run=norm, **extra))


def test_pack_takes_weight_and_bias():
    run = lambda x, packed, *, out: None  # noqa: E731
    check_bound("linear", BoundOp(run=run, pack=lambda weight, bias: weight))
    with pytest.raises(PluginLoadError, match="pack cannot be called"):
        check_bound("linear", BoundOp(run=run, pack=lambda weight: weight))
