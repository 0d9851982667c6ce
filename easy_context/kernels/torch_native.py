"""Torch's own attention operators that give and take an lse: flash attention on CPU and CUDA, and cuDNN.

Nothing to install. The operators are private (``torch.ops.aten._...``) and called here and nowhere else.

Letters: B batch, Sq queries, Sk keys, H query heads, H_kv key/value heads, D head_dim.
"""

from __future__ import annotations

from functools import cache

import torch
from torch import Tensor

from easy_context.kernels.base import AttentionGradients, AttentionPart
from easy_context.kernels.half_precision import BackwardInputs, HalfPrecisionKernel
from easy_context.kernels.reference import ReferenceKernel
from easy_context.masks import BlockMask


class CpuFlashKernel:
    """Torch's flash attention for the CPU, in every floating dtype."""

    name = "cpu_flash"
    mask_kinds = frozenset({"full", "causal"})

    @classmethod
    def refusal(cls, device: torch.device, dtype: torch.dtype, head_dim: int) -> str | None:
        """Return why it cannot serve such tensors, or None if it can."""
        if device.type != "cpu":
            return f"needs the CPU, got device {device}"
        if dtype not in (torch.float32, torch.float64, torch.bfloat16, torch.float16):
            return f"needs float32, float64, bfloat16 or float16, got {dtype}"
        return None

    def forward(
        self, q: Tensor, k: Tensor, v: Tensor, *, softmax_scale: float, mask: BlockMask
    ) -> AttentionPart:
        """Return the attention of ``q`` over this block of keys."""
        out, lse = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu(
            *(_heads_first(t) for t in (q, k, v)), 0.0, mask.kind == "causal", scale=softmax_scale
        )
        # The operator's lse is laid out (B, Sq, H).
        return AttentionPart(out.transpose(1, 2), lse.contiguous())

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
        """Return this block's share of the gradients, from ``out`` and ``lse`` over all keys."""
        # In half precision the operator adds up the shares of query blocks and of grouped heads in half
        # precision: dk and dv then err up to six times as much as plain torch. lse is never half.
        dq, dk, dv = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu_backward(
            *(_heads_first(t.to(lse.dtype)) for t in (dout, q, k, v, out)),
            lse,
            0.0,
            mask.kind == "causal",
            scale=softmax_scale,
        )
        return AttentionGradients(*(grad.transpose(1, 2).to(q.dtype) for grad in (dq, dk, dv)))


class TorchFlashKernel(HalfPrecisionKernel):
    """FlashAttention-2 as torch ships it, for Ampere and newer."""

    name = "torch_flash"
    capabilities = range(8, 13)

    @classmethod
    def refusal(cls, device: torch.device, dtype: torch.dtype, head_dim: int) -> str | None:
        """Return why it cannot serve such tensors, or None if it can."""
        if not torch.backends.cuda.is_flash_attention_available():
            return "needs a torch built with flash attention for CUDA, got one without"
        return super().refusal(device, dtype, head_dim)

    def _attend(
        self, q: Tensor, k: Tensor, v: Tensor, *, softmax_scale: float, causal: bool
    ) -> tuple[Tensor, Tensor]:
        # No cumulative lengths: the dense form, which takes (B, S, H, D) and fewer KV heads.
        out, lse, _rng_state, _unused, _dropout_mask = torch.ops.aten._flash_attention_forward(
            q, k, v, None, None, q.shape[1], k.shape[1], 0.0, causal, False, scale=softmax_scale
        )
        return out, lse

    def _attend_backward(
        self, given: BackwardInputs, *, softmax_scale: float, causal: bool
    ) -> tuple[Tensor, Tensor, Tensor]:
        # The random state is read under dropout only, but must be a tensor.
        rng_state = torch.zeros(2, dtype=torch.uint64, device=given.q.device)
        num_queries, num_keys = given.q.shape[1], given.k.shape[1]
        return torch.ops.aten._flash_attention_backward(
            *given,
            *(None, None, num_queries, num_keys),
            *(0.0, causal, rng_state, torch.zeros_like(rng_state)),
            scale=softmax_scale,
        )


class CudnnKernel(HalfPrecisionKernel):
    """cuDNN's fused attention, for Ampere and newer; on Hopper about twice as fast as FlashAttention-2.

    It takes fewer KV heads as they are.
    """

    name = "cudnn"
    capabilities = range(8, 13)
    max_head_dim = 128

    def __init__(self):
        self._reference = ReferenceKernel()

    @classmethod
    def refusal(cls, device: torch.device, dtype: torch.dtype, head_dim: int) -> str | None:
        """Return why it cannot serve such tensors, or None if it can."""
        if not torch.backends.cudnn.is_available():
            return "needs a torch built with cuDNN, got one without"
        if torch.are_deterministic_algorithms_enabled():
            return "needs torch.use_deterministic_algorithms(False), its backward pass is not deterministic"
        return super().refusal(device, dtype, head_dim)

    def forward(
        self, q: Tensor, k: Tensor, v: Tensor, *, softmax_scale: float, mask: BlockMask
    ) -> AttentionPart:
        """Return the attention of ``q`` over this block of keys."""
        forward = self._reference.forward if _is_single_token(q, k) else super().forward
        return forward(q, k, v, softmax_scale=softmax_scale, mask=mask)

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
        """Return this block's share of the gradients, from ``out`` and ``lse`` over all keys."""
        backward = self._reference.backward if _is_single_token(q, k) else super().backward
        return backward(dout, q, k, v, out, lse, softmax_scale=softmax_scale, mask=mask)

    def _attend(
        self, q: Tensor, k: Tensor, v: Tensor, *, softmax_scale: float, causal: bool
    ) -> tuple[Tensor, Tensor]:
        out, lse = _cudnn_forward(
            *(_heads_first(t.contiguous()) for t in (q, k, v)), softmax_scale=softmax_scale, causal=causal
        )
        return out.transpose(1, 2), lse.view(lse.shape[:3])

    def _attend_backward(
        self, given: BackwardInputs, *, softmax_scale: float, causal: bool
    ) -> tuple[Tensor, Tensor, Tensor]:
        # Contiguous before the transpose: releases of torch look a compiled backward pass up by the shapes
        # and strides of q, k and v alone, and run it with whatever strides out and dout had the first time.
        dout, q, k, v, out = (_heads_first(t.contiguous()) for t in given[:5])
        lse = given.lse.view(*given.lse.shape, *(1,) * (_cudnn_lse_dims(q.device) - 3))
        unused_seed, unused_offset = torch.zeros(
            2, dtype=torch.int64, device=q.device
        )  # read under dropout only
        grads = torch.ops.aten._scaled_dot_product_cudnn_attention_backward(
            *(dout, q, k, v, out, lse, unused_seed, unused_offset),
            *(None, None, None, q.shape[2], k.shape[2], 0.0, causal),  # no bias, no cumulative lengths
            scale=softmax_scale,
        )
        dq, dk, dv = (grad.transpose(1, 2) for grad in grads)
        return dq, dk, dv


def _heads_first(tensor: Tensor) -> Tensor:
    """(B, S, H, D) -> (B, H, S, D) with a contiguous last dim, as most operators want it."""
    return (tensor if tensor.stride(-1) == 1 else tensor.contiguous()).transpose(1, 2)


def _is_single_token(q: Tensor, k: Tensor) -> bool:
    """Whether a block has one query or one key, which cuDNN does not promise to take."""
    return q.shape[1] == 1 or k.shape[1] == 1


def _cudnn_forward(
    q: Tensor, k: Tensor, v: Tensor, *, softmax_scale: float, causal: bool
) -> tuple[Tensor, Tensor]:
    out, lse, *_ = torch.ops.aten._scaled_dot_product_cudnn_attention(
        q, k, v, None, True, 0.0, causal, False, scale=softmax_scale
    )
    return out, lse


@cache
def _cudnn_lse_dims(device: torch.device) -> int:
    """Return how many dims the operator's lse has: its backward wants what its forward gives.

    (B, H, Sq, 1) in torch 2.11; other builds have (B, H, Sq) and add the last dim themselves. Asked once.
    """
    probe = torch.zeros(1, 1, 64, 64, dtype=torch.bfloat16, device=device)
    return _cudnn_forward(probe, probe, probe, softmax_scale=1.0, causal=False)[1].dim()
