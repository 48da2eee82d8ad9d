"""Small inputs whose answers can be worked out by hand, asked of the oracle and of the reference.

The suite's checks make these kinds of input in every size; here stand the numbers.
"""

from __future__ import annotations

import pytest
import torch

from support.fakes import CPU
from tvr.backends.torch_ref import plugin
from tvr.conformance import oracle
from tvr.conformance.attending import run
from tvr.conformance.case import Case
from tvr.conformance.sequences import Sequences
from tvr.conformance.subject import Subject
from tvr.contract import AttentionDecodeSpec, AttentionPrefillSpec, RmsNormSpec, RopeSpec


def attend(op, q_len, values, *, q=1.0, k=None, dtype="float32", scale=1.0, **fields):
    """Output [q_len] in the first channel of one head, of the oracle and of the reference."""
    spec_type = AttentionDecodeSpec if op == "decode" else AttentionPrefillSpec
    shape = {"num_heads": 1, "num_kv_heads": 1, "head_dim": 64, "block_size": 16}
    case = Case(
        spec=spec_type(dtype=dtype, **shape, **fields), q_lens=(q_len,), kv_lens=(len(values),)
    )
    keys = torch.zeros(len(values)) if k is None else torch.tensor(k)
    of_dtype = getattr(torch, dtype)

    def in_all_channels(x):
        return x.view(-1, 1, 1).expand(-1, 1, 64).to(of_dtype)

    sequences = Sequences(
        q=[in_all_channels(torch.full((q_len,), q))],
        k=[in_all_channels(keys)],
        v=[in_all_channels(torch.as_tensor(values))],
        scale=scale,
    )
    wanted = oracle.attention(case.spec, scale, sequences.q[0], sequences.k[0], sequences.v[0]).out
    found = run(Subject(plugin, CPU), case, sequences)["out"]
    assert found[:, 0, 0].tolist() == pytest.approx(wanted[:, 0, 0].tolist())
    return wanted[:, 0, 0].tolist()


def test_two_new_tokens_of_five_see_four_keys_and_five():
    """Aligned top-left they would see one and two, and give 1.0 and 1.5."""
    assert attend("prefill", 2, [1.0, 2.0, 3.0, 4.0, 5.0]) == pytest.approx([2.5, 3.0])


def test_five_new_tokens_of_two_are_empty_but_for_the_last_two():
    assert attend("prefill", 5, [1.0, 2.0]) == pytest.approx([0.0, 0.0, 0.0, 1.0, 1.5])


@pytest.mark.parametrize("op", ["decode", "prefill"])
def test_a_window_of_four_counts_the_query_itself(op):
    values = torch.arange(10.0)  # position 9 sees 6, 7, 8 and 9
    assert attend(op, 1, values, window=4) == pytest.approx([7.5])


@pytest.mark.parametrize(("kv_len", "mean"), [(131072, 0.5), (65537, 1 / 65537)])
def test_values_from_token_65536_on_count(kv_len, mean):
    assert attend("decode", 1, (torch.arange(kv_len) >= 65536).float()) == pytest.approx([mean])


def test_a_product_of_five_million_does_not_overflow_half_precision():
    """64 * 300 * 300 is 5.76e6, and fp16 ends at 65504."""
    found = attend("decode", 1, [7.0, 9.0], q=300.0, k=[300.0, 299.0], dtype="float16")
    assert found == pytest.approx([7.0])


def test_one_key_gives_its_value():
    assert attend("prefill", 1, [3.25], q=5.0, k=[-2.0]) == [3.25]


def test_rope_turns_the_halves_and_not_neighbours():
    """Turned with its neighbour, 1 would become -1.142640."""
    spec = RopeSpec(dtype="float32", num_heads=1, num_kv_heads=1, head_dim=4)
    angles = torch.tensor([[0.0, 0.0], [1.0, 0.01]])  # theta 10,000, positions 0 and 1
    table = torch.cat([angles.cos(), angles.sin()], dim=1)
    x, position = torch.tensor([[[1.0, 2.0, 3.0, 4.0]]]), torch.tensor([1])
    by_hand = [-1.984111, 1.959901, 2.462378, 4.019800]
    wanted, _ = oracle.rope(x, position, table)
    assert wanted.flatten().tolist() == pytest.approx(by_hand)
    found = torch.empty_like(x)
    bound = plugin.tvr_bind_rope(spec=spec, device=CPU)
    bound.run(x, x, position, table, q_out=found, k_out=torch.empty_like(x))
    assert found.flatten().tolist() == pytest.approx(by_hand)


@pytest.mark.parametrize(
    ("dtype", "value", "eps", "wanted"),
    [
        # 1e-4 / sqrt(1e-8 + eps); with eps outside the root the first would be 0.909.
        ("float32", 1e-4, 1e-5, 0.0316070),
        ("float32", 1e-4, 1e-6, 0.0995037),
        ("float32", 0.0, 1e-5, 0.0),
        # 300 squared, and a sum of squares of anything, overflow fp16.
        ("float16", 300.0, 1e-5, 1.0),
        ("float16", 60000.0, 1e-5, 1.0),
    ],
)
def test_a_norm_of_equal_elements(dtype, value, eps, wanted):
    x = torch.full((2, 4096), value, dtype=getattr(torch, dtype))
    weight, found = torch.ones(4096, dtype=x.dtype), torch.empty_like(x)
    exact = oracle.rms_norm(x, weight, eps, "twice")
    assert exact[0, 0].item() == pytest.approx(wanted)
    spec = RmsNormSpec(dtype=dtype, hidden_size=4096)
    plugin.tvr_bind_rms_norm(spec=spec, device=CPU).run(x, weight, eps=eps, out=found)
    assert found.flatten().tolist() == pytest.approx([wanted] * found.numel())
