"""Rows of a `SamplerState` given to requests, one at a time."""

from __future__ import annotations

from tvr.core.sampler_state import RowState


def reset(state, row, params, seed, prompt, outputs=(), bad_words=()):
    """Give a row to a request with that prompt and output."""
    state.reset(
        [
            RowState(
                row=row,
                params=params,
                seed=seed,
                prompt_token_ids=prompt,
                output_token_ids=outputs,
                bad_words=bad_words,
            )
        ]
    )
