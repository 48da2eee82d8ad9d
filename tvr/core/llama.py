"""A Llama model, from token ids to logits.

One step computes T new tokens of any number of sequences, laid one after the other: first the
decodes (one token each), then prefill chunks. What came before them is in the KV cache. Every
operation is a plug-in's, but for looking up rows: of the embedding, and of the R tokens whose
logits are wanted.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
from torch import Tensor

from tvr.core.buffers import Buffers
from tvr.core.build_context import BuildContext
from tvr.core.config import ModelConfig
from tvr.core.kv_cache import KVCache
from tvr.core.layers import DecoderLayer
from tvr.core.parameters import LinearWeights, Weights
from tvr.core.products import Linear
from tvr.core.residual_stream import ResidualStream, RMSNorm
from tvr.core.rope import build_cos_sin_cache

if TYPE_CHECKING:
    from tvr.core.batch import ForwardBatch
    from tvr.core.ops import OpTable


class LlamaForCausalLM:
    """The model. It keeps no sequence state: that is in the batch and the KV cache."""

    def __init__(
        self,
        config: ModelConfig,
        weights: Weights,
        ops: OpTable,
        *,
        block_size: int,
        batch_invariant: bool = False,
        max_position: int,
    ) -> None:
        """Bind every op and pack the weights; `weights` itself need not be kept.

        Args:
            config: shape of the model.
            weights: on the device, in the activation dtype.
            ops: where ops are bound.
            block_size: tokens in a KV block.
            batch_invariant: bind only ops whose rows do not depend on their neighbours.
            max_position: positions reach from 0 to max_position - 1.

        Raises:
            UnsupportedSpec: no backend serves an op as this model needs it.
        """
        self.config = config
        self.device = weights.embedding.device
        self._dtype = weights.embedding.dtype
        ctx = BuildContext(
            ops=ops,
            config=config,
            dtype=self.logits_dtype,
            block_size=block_size,
            batch_invariant=batch_invariant,
        )
        cos_sin_cache = build_cos_sin_cache(config, max_position).to(self.device)
        self._embedding = weights.embedding
        self._layers = [
            DecoderLayer(ctx.at(f"layers.{idx}"), layer, cos_sin_cache)
            for idx, layer in enumerate(weights.layers)
        ]
        self._norm = RMSNorm(ctx.at("norm"), weights.norm)
        lm_head = LinearWeights(weight=weights.lm_head, bias=None)
        self._lm_head = Linear(ctx.at("lm_head"), lm_head)
        self._buffers = Buffers.allocate(config, 0, self._dtype, self.device)

    @property
    def logits_dtype(self) -> str:
        """Name of the dtype that logits, like all activations, come in."""
        return str(self._dtype).removeprefix("torch.")

    def forward(self, batch: ForwardBatch, kv_cache: KVCache) -> Tensor:
        """Return the final, normed hidden states [R, hidden] of `batch.logit_rows`.

        Where these are all tokens, the next step overwrites them.

        Mutates: the slots of `kv_cache` that `batch.slot_mapping` names.
        """
        self.run_layers(batch, kv_cache)
        return self.last_norm(len(batch.input_ids), batch.logit_rows)

    @torch.inference_mode()
    def run_layers(self, batch: ForwardBatch, kv_cache: KVCache) -> None:
        """Compute the hidden states of a step's tokens, which stay here until the next step."""
        buffers = self._buffers_for(len(batch.input_ids))
        x = _stream(buffers, has_delta=False)
        torch.index_select(self._embedding, 0, batch.input_ids, out=x.residual)
        for layer, kv in zip(self._layers, kv_cache.layers, strict=True):
            layer(x, batch, kv, buffers)

    @torch.inference_mode()
    def last_norm(self, num_tokens: int, rows: Tensor | None) -> Tensor:
        """Return the normed hidden states [R, hidden] of `rows`, of a step of so many tokens."""
        # As `run_layers` has left it, which may have been in a graph.
        has_delta = not self._layers[-1].adds_at_once(num_tokens)
        x = _stream(self._buffers_for(num_tokens), has_delta=has_delta)
        if rows is not None:  # only these rows go on, so only they are normed
            x.residual = x.residual[rows]  # [R, hidden]
            x.delta = x.delta[rows] if has_delta else x.delta
            x.normed = torch.empty_like(x.residual)
        return x.normed_by(self._norm)

    @torch.inference_mode()
    def compute_logits(self, hidden: Tensor, *, out: Tensor | None = None) -> Tensor:
        """Return the logits [R, vocab], in the activation dtype, of states [R, hidden]."""
        return self._lm_head(hidden, out=self.new_logits(len(hidden)) if out is None else out)

    def new_logits(self, num_rows: int) -> Tensor:
        """Return room for logits [num_rows, vocab]."""
        return self._embedding.new_empty(num_rows, self.config.vocab_size)

    def reserve(self, num_tokens: int) -> None:
        """Allocate activations for steps of up to `num_tokens`; smaller steps move nothing."""
        self._buffers_for(num_tokens)

    def _buffers_for(self, num_tokens: int) -> Buffers:
        if num_tokens > self._buffers.num_tokens:
            self._buffers = Buffers.allocate(self.config, num_tokens, self._dtype, self.device)
        return self._buffers.first(num_tokens)


def _stream(buffers: Buffers, *, has_delta: bool) -> ResidualStream:
    return ResidualStream(
        residual=buffers.residual,
        delta=buffers.delta,
        has_delta=has_delta,
        normed=buffers.normed,
    )
