"""USP attention: Ulysses across neighbouring ranks, a zigzag ring across their groups, by composition.

Source: https://arxiv.org/abs/2405.07719.
"""

from __future__ import annotations

import torch.distributed as dist
from torch import Tensor

from easy_context.comm.ring import Ring
from easy_context.kernels.base import Kernel
from easy_context.masks import SequenceMask
from easy_context.ulysses_attn.attention import ulysses_attention
from easy_context.zigzag_ring_attn.attention import zigzag_ring_attention


def usp_attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    *,
    softmax_scale: float,
    mask: SequenceMask,
    ring: Ring,
    ulysses_group: dist.ProcessGroup | None,
    kernel: Kernel,
) -> Tensor:
    """Return exact causal attention of the whole sequence for the queries of this rank.

    Args:
        q: (B, S, H, D) at the positions of ``usp_positions``; H is a multiple of the Ulysses size.
        k, v: (B, S, H_kv, D) at the same positions.
        softmax_scale, mask, kernel: as for the zigzag ring.
        ring: the ranks with the same place in their Ulysses group.
        ulysses_group: neighbouring ranks, which together hold one part of the zigzag.

    Returns: (B, S, H, D).

    Communication per rank: that of Ulysses within ``ulysses_group``, and that of the zigzag ring for the
    key/value heads that a rank is left with.
    """

    def attend(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        return zigzag_ring_attention(
            q, k, v, softmax_scale=softmax_scale, mask=mask, ring=ring, kernel=kernel
        )

    return ulysses_attention(q, k, v, group=ulysses_group, attend=attend)
