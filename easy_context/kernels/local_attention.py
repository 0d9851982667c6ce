"""Differentiable attention of queries and keys that are all on this device: one call of one kernel."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from easy_context.kernels.base import Kernel
from easy_context.masks import BlockMask


def local_attention(
    q: Tensor, k: Tensor, v: Tensor, *, softmax_scale: float, mask: BlockMask, kernel: Kernel
) -> Tensor:
    """Return softmax attention of ``q`` over ``k`` and ``v`` under one block mask.

    Shapes (B batch, S sequence, H heads, D head_dim): ``q`` (B, S, H, D), ``k`` and ``v`` (B, S, H_kv, D);
    the result is shaped and typed like ``q``.
    """
    return _LocalAttention.apply(q, k, v, softmax_scale, mask, kernel)


class _LocalAttention(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, q: Tensor, k: Tensor, v: Tensor, softmax_scale: float, mask: BlockMask, kernel: Kernel
    ) -> Tensor:
        part = kernel.forward(q, k, v, softmax_scale=softmax_scale, mask=mask)
        ctx.save_for_backward(q, k, v, part.out, part.lse)
        ctx.softmax_scale, ctx.mask, ctx.kernel = softmax_scale, mask, kernel
        return part.out

    @staticmethod
    def backward(ctx: Any, *grad_outputs: Tensor) -> tuple[Tensor | None, ...]:
        q, k, v, out, lse = ctx.saved_tensors
        grads = ctx.kernel.backward(
            grad_outputs[0], q, k, v, out, lse, softmax_scale=ctx.softmax_scale, mask=ctx.mask
        )
        return *grads, None, None, None
