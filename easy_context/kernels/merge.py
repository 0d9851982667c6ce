"""How attention over two sets of keys becomes attention over both. Knows tensors, and no kernel or rank."""

from __future__ import annotations

import math

import torch
from torch import Tensor

from easy_context.kernels.base import AttentionPart


def merge_partials(out: Tensor, lse: Tensor, block_out: Tensor, block_lse: Tensor) -> AttentionPart:
    """Fold one more block of keys into a running softmax attention.

    The new block's share of the total mass is ``sigmoid(block_lse - lse)``: no exponential of an lse is ever
    taken, so nothing overflows however far apart the two are. A side that has seen no key (``lse = -inf``,
    ``out = 0``) leaves the other as it is, to the last bit; where neither has seen one, the result is again 0
    and ``-inf``.

    Args:
        out: (B, S, H, D) float32 or float64, normalized over the keys seen so far.
        lse: (B, H, S), likewise, natural log of the sum of ``exp(softmax_scale * q @ k)`` over these keys.
        block_out: (B, S, H, D) of any floating dtype, normalized over the keys of the block.
        block_lse: (B, H, S), of the block.
    Returns: ``out`` and ``lse`` over the union of both key sets, typed like the first two, newly allocated.
    Source: online softmax, https://arxiv.org/abs/1805.02867, in the sigmoid form of
        https://github.com/zhuzilin/ring-flash-attention/pull/34.
    """
    unseen = block_lse == -math.inf  # -inf - -inf would be NaN
    block_share = (block_lse - lse).masked_fill(unseen, -math.inf).sigmoid()
    block_share = block_share.transpose(1, 2).unsqueeze(-1).to(out.dtype)  # (B, H, S) -> (B, S, H, 1)
    # lerp is exact at both ends: weight 0 gives out, weight 1 gives block_out.
    out = torch.lerp(out, block_out.to(out.dtype), block_share)
    return AttentionPart(out, torch.logaddexp(lse, block_lse))
