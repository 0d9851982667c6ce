"""The contract between a strategy and the kernel that computes one block of attention on one device.

A kernel knows tensors and one block mask. It does not know that ranks exist.

Letters: B batch, Sq queries, Sk keys, H query heads, H_kv key/value heads (H is a multiple of H_kv),
D head_dim.
"""

from __future__ import annotations

from typing import NamedTuple, Protocol

from torch import Tensor

from easy_context.masks import BlockMask


class AttentionPart(NamedTuple):
    """Attention over one block of keys.

    Attributes:
        out: (B, Sq, H, D), normalized over the keys of this block; 0 for a query that sees none.
        lse: (B, H, Sq) float32 (float64 for float64 inputs), contiguous: natural log of the sum of
            ``exp(softmax_scale * q @ k)`` over the keys of this block; ``-inf`` for a query that sees none.
    """

    out: Tensor
    lse: Tensor


class AttentionGradients(NamedTuple):
    """Gradients of one block, each shaped and typed like the tensor that it belongs to."""

    dq: Tensor
    dk: Tensor
    dv: Tensor


class Kernel(Protocol):
    """Computes one block of attention and its gradients.

    Shapes: ``q``, ``out``, ``dout`` (B, Sq, H, D); ``k``, ``v`` (B, Sk, H_kv, D); ``lse`` (B, H, Sq) float32.
    Inputs need not be contiguous. With a ``"causal"`` mask, Sq equals Sk. Kernels are never given an
    ``"empty"`` mask.
    """

    name: str
    mask_kinds: frozenset[str]  # the kinds of BlockMask that it computes itself

    def forward(
        self, q: Tensor, k: Tensor, v: Tensor, *, softmax_scale: float, mask: BlockMask
    ) -> AttentionPart:
        """Return the attention of ``q`` over this block of keys."""
        ...

    def backward(
        self,
        dout: Tensor,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        out: Tensor,
        lse: Tensor,
        *,
        softmax_scale: float,
        mask: BlockMask,
    ) -> AttentionGradients:
        """Return this block's share of the gradients.

        ``out`` and ``lse`` are those over ALL keys of the query, not over this block alone: then the shares
        of the blocks add up to the gradients of the whole (``p = exp(softmax_scale * q @ k - lse)``).
        """
        ...
