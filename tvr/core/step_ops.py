"""The ops that a step calls before and behind the model's layers."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

from torch import Tensor

from tvr.contract import ArgmaxSpec, PrepareStepSpec, SampleSpec, TopLogprobsSpec
from tvr.core.batch import DeviceTables
from tvr.core.ops import OpTable
from tvr.core.sampler_state import SamplerState
from tvr.core.sampling_params import MAX_LOGPROBS


class StepOps(NamedTuple):
    """The `run` of bound ops.

    Attributes:
        prepare_step: makes the arrays of a step of decodes.
        argmax: chooses greedy tokens.
        sample: chooses tokens as the tables ask, without waiting for the host; None: what is bound
            cannot be captured, and torch chooses, row by row as the host knows them.
        top_logprobs: log-probabilities of tokens and of the likeliest, `MAX_LOGPROBS` at most.
    """

    prepare_step: Callable[..., Any]
    argmax: Callable[..., Tensor]
    sample: Callable[..., Tensor] | None
    top_logprobs: Callable[..., Any]

    @classmethod
    def bind(
        cls,
        ops: OpTable,
        *,
        dtype: str,
        block_size: int,
        vocab_size: int,
        batch_invariant: bool = False,
    ) -> StepOps:
        """Bind them for a model's activation dtype, KV blocks and vocabulary.

        Raises:
            UnsupportedSpec: no backend serves one of them.
        """
        prepare = PrepareStepSpec(
            dtype=dtype, batch_invariant=batch_invariant, block_size=block_size
        )
        argmax = ArgmaxSpec(dtype=dtype, batch_invariant=batch_invariant, vocab_size=vocab_size)
        choice = SampleSpec(dtype=dtype, batch_invariant=batch_invariant, vocab_size=vocab_size)
        sample = ops.bind_at(choice, "sampler").run
        logprobs = TopLogprobsSpec(
            dtype=dtype,
            batch_invariant=batch_invariant,
            vocab_size=vocab_size,
            num_top=min(MAX_LOGPROBS, vocab_size),
        )
        return cls(
            prepare_step=ops.bind_at(prepare, "inputs").run,
            argmax=ops.bind_at(argmax, "sampler").run,
            sample=sample if "cuda_graph" in ops.flags(choice) else None,
            top_logprobs=ops.bind_at(logprobs, "logprobs").run,
        )

    def choose(
        self,
        logits: Tensor,
        rows: Tensor,
        positions: Tensor,
        sampler: SamplerState,
        tables: DeviceTables,
        *,
        out: Tensor,
    ) -> Tensor:
        """Return `out` with the tokens that the sampler's tables ask for, by the op `sample`.

        Args:
            logits: [R, vocab] in the activation dtype.
            rows, positions: [R] int64, of the newest token of each row.
            sampler: what rows ask for; `is_usual` must hold of these.
            tables: where the next step reads its tokens.
            out: [R] int64; -1 for a row without a finite logit.

        Mutates: `out`, the sampler's counts and `tables.last_token`.
        """
        assert self.sample is not None, "whoever chooses so has looked"
        output_positions = sampler.output_positions(rows, positions)
        self.sample(logits, rows, output_positions, sampler.tables, tables.last_token, out=out)
        return out
