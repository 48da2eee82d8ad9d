"""A random choice for rows of one kind, from how far each token is below the best.

All is kept as *gaps*, (largest logit - logit) / temperature, which are never negative: the weight
of a token is exp(-gap), and `argmax(noise - gap)` draws by weight. Filters raise a gap to
infinity.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from tvr.core.philox import gumbel_noise, gumbel_noise_at
from tvr.core.sampler_state import Kind

_LOW_32 = 0xFFFFFFFF


@dataclass(frozen=True, slots=True)
class Draw:
    """What a draw takes, for r rows.

    Attributes:
        gaps: [r, vocab] fp32, at least 0; infinity for a token ruled out.
        top_k: [r] int64; the vocabulary's size is off.
        top_p: [r] fp64; 1 is off.
        seeds, positions: [r] int64, of the random numbers.
    """

    gaps: Tensor
    top_k: Tensor
    top_p: Tensor
    seeds: Tensor
    positions: Tensor

    def take(self, kind: Kind, width: int) -> Tensor:
        """Return the chosen token ids [r] of rows of one `kind`.

        Args:
            kind: what the rows need; not GREEDY.
            width: how many of the best tokens a NARROW or NUCLEUS row has to look at.
        """
        if kind is Kind.PLAIN:
            return self._from_all(self.gaps)
        if kind is Kind.NARROW:
            gaps, ids = best_tokens(self.gaps, width)
            return self._from_best(self._filter(gaps), ids)
        # Whether the best tokens hold the mass is known at once on the CPU only; elsewhere
        # asking would make the host wait for the device.
        if kind is Kind.NUCLEUS and self.gaps.device.type == "cpu":
            return self._nucleus(width)
        return self._wide()

    def _nucleus(self, width: int) -> Tensor:
        """Draw from the best `width` tokens where they hold the mass, else from all."""
        mass = self.gaps.double().neg_().exp_().sum(dim=-1)  # [r]
        gaps, ids = best_tokens(self.gaps, width)
        suffices = gaps.double().neg().exp().sum(dim=-1) >= self.top_p * mass
        tokens = self._from_best(self._filter(gaps, mass), ids)
        if not suffices.all():
            rest = ~suffices
            tokens[rest] = Draw(
                self.gaps[rest],
                self.top_k[rest],
                self.top_p[rest],
                self.seeds[rest],
                self.positions[rest],
            )._wide()
        return tokens

    def _wide(self) -> Tensor:
        gaps, ids = best_tokens(self.gaps, self.gaps.shape[1])
        return self._from_all(torch.empty_like(gaps).scatter_(1, ids, self._filter(gaps)))

    def _filter(self, gaps: Tensor, mass: Tensor | None = None) -> Tensor:
        """Return rising `gaps` [r, w] with those past top_k and then past top_p at infinity.

        Args:
            gaps: [r, w] fp32, the smallest of each row.
            mass: [r] fp64, the weight of the whole row; None if `gaps` hold all of it.
        """
        rank = torch.arange(gaps.shape[1], device=gaps.device)
        gaps = torch.where(rank < self.top_k[:, None], gaps, torch.inf)
        # fp64, so that the order of summing does not decide where the nucleus ends.
        weights = gaps.double().neg_().exp_()
        upto = weights.cumsum(dim=-1)
        if mass is None:
            mass = upto[:, -1]
        before = upto - weights  # mass of the better tokens; 0 for the best
        return torch.where(before < (self.top_p * mass)[:, None], gaps, torch.inf)

    def _from_all(self, gaps: Tensor) -> Tensor:
        """Draw from [r, vocab] gaps in order of token id."""
        noise = gumbel_noise(self.seeds, self.positions, gaps.shape[1])
        return noise.sub_(gaps).argmax(dim=-1)

    def _from_best(self, gaps: Tensor, ids: Tensor) -> Tensor:
        """Draw from [r, w] gaps of the tokens `ids` [r, w]."""
        noise = gumbel_noise_at(self.seeds, self.positions, ids)
        return ids.gather(1, noise.sub_(gaps).argmax(dim=-1, keepdim=True)).squeeze(1)


def best_tokens(gaps: Tensor, width: int) -> tuple[Tensor, Tensor]:
    """Return the `width` smallest gaps of each row, rising, and their ids; lower ids first.

    Args:
        gaps: [r, vocab] fp32, at least 0.
        width: how many, up to the vocabulary's size.

    Returns:
        [r, width] fp32 and int64.
    """
    # The bits of floats that are not negative order as integers do. With the id below them every
    # key is unique, so no device has a choice among equal gaps.
    ids = torch.arange(gaps.shape[1], device=gaps.device)
    keys = (gaps.view(torch.int32).long() << 32) | ids
    if width < gaps.shape[1]:
        keys = keys.topk(width, dim=-1, largest=False, sorted=True).values
    else:
        keys = keys.sort(dim=-1).values
    ids = keys & _LOW_32
    return gaps.gather(1, ids), ids
