"""Sampling on a CUDA device: the CPU's tokens, and no wait of the host."""

from __future__ import annotations

import warnings
from contextlib import contextmanager, nullcontext

import pytest
import torch

from support.sampling import reset
from tvr.core.sampler import SamplerState, sample
from tvr.core.sampling_params import SamplingParams

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device"),
]

VOCAB = 2000
STEPS = 6

REQUESTS = [
    SamplingParams(temperature=0),
    SamplingParams(temperature=0.8),
    SamplingParams(top_k=5, logit_bias={3: 2.0, 9: -100.0}),
    SamplingParams(top_p=0.9, allowed_token_ids=list(range(0, VOCAB, 3))),
    SamplingParams(temperature=0, repetition_penalty=1.5, min_tokens=4, stop_token_ids=[2]),
    SamplingParams(min_p=0.05, presence_penalty=0.5, frequency_penalty=0.5),
    SamplingParams(temperature=0, allowed_token_ids=[6, 7]),
]
BAD_WORDS = [(), ((5,), (1, 2, 3)), (), (), (), ((4, 4),), ((6, 6), (7, 7))]


def argmax_op(logits, *, out):
    """The argmax op by its contract, without reading anything back."""
    best = logits.amax(dim=-1, keepdim=True)
    ids = torch.arange(logits.shape[1], device=logits.device)
    first = torch.where(logits == best, ids, logits.shape[1]).amin(dim=-1)
    return out.copy_(torch.where(best[:, 0].isnan(), -1, first))


@contextmanager
def waits_are_errors():
    """Raise where the host waits for the device."""
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # torch calls the mode a prototype
            torch.cuda.set_sync_debug_mode("error")
        yield
    finally:
        torch.cuda.set_sync_debug_mode("default")


def run(device):
    """Sample all requests for a few steps, with a bitmask in the last; return their tokens."""
    generator = torch.Generator().manual_seed(0)
    all_logits = (torch.randn(STEPS, len(REQUESTS), VOCAB, generator=generator) * 4).to(device)
    words = torch.full((len(REQUESTS), -(-VOCAB // 32)), 0x5555_5555, dtype=torch.int32).to(device)
    rows = torch.arange(len(REQUESTS)).to(device)
    state = SamplerState(len(REQUESTS), VOCAB, device, eos_token_ids=[1])
    tokens = []
    with waits_are_errors() if device == "cuda" else nullcontext():
        for row, (params, bad_words) in enumerate(zip(REQUESTS, BAD_WORDS, strict=True)):
            reset(state, row, params, 100 + row, [1, 2, 3], [], bad_words)
        for position, logits in enumerate(all_logits):
            positions = torch.full_like(rows, position)
            allowed = words if position == STEPS - 1 else None
            tokens.append(
                sample(
                    logits,
                    state,
                    rows,
                    positions,
                    argmax_op,
                    host_rows=range(len(REQUESTS)),
                    allowed=allowed,
                )
            )
    return torch.stack(tokens).tolist()


def test_the_device_gives_the_cpus_tokens_without_a_wait():
    assert run("cuda") == run("cpu")
