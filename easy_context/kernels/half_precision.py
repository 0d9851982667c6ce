"""What the fast CUDA kernels share: half precision, head dimensions in steps of 8, full and causal masks.

A kernel fills in two calls, on tensors that have been made fit for it. Knows no package and no operator.

Letters: B batch, Sq queries, Sk keys, H query heads, H_kv key/value heads, D head_dim.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from easy_context.kernels.base import AttentionGradients, AttentionPart
from easy_context.masks import BlockMask

_HEAD_DIM_STEP = 8  # 16 bytes, the width of a vector load in fp16 and bf16


class BackwardInputs(NamedTuple):
    """What a backward pass starts from; the last dim of each is contiguous, and ``lse`` is so as a whole."""

    dout: Tensor
    q: Tensor
    k: Tensor
    v: Tensor
    out: Tensor
    lse: Tensor

    def gradient_buffers(self) -> AttentionGradients:
        """Return uninitialized ``dq``, ``dk``, ``dv`` for a function that writes into them."""
        dq, dk, dv = (
            torch.empty_like(t, memory_format=torch.contiguous_format) for t in (self.q, self.k, self.v)
        )
        return AttentionGradients(dq, dk, dv)


class HalfPrecisionKernel(ABC):
    """A CUDA kernel for fp16 and bf16.

    Attributes:
        capabilities: the major compute capabilities that it runs on.
        max_head_dim: the largest head_dim that it takes.
    """

    name: str
    mask_kinds = frozenset({"full", "causal"})
    capabilities: range
    max_head_dim: int = 256

    @classmethod
    def refusal(cls, device: torch.device, dtype: torch.dtype, head_dim: int) -> str | None:
        """Return why it cannot serve such tensors, or None if it can. Imports nothing."""
        if device.type != "cuda":
            return f"needs a CUDA GPU, got device {device}"
        major, minor = torch.cuda.get_device_capability(device)
        if major not in cls.capabilities:
            last = cls.capabilities[-1]
            wanted = (
                f"{cls.capabilities[0]}.x"
                if len(cls.capabilities) == 1
                else f"{cls.capabilities[0]}.0 to {last}.x"
            )
            return f"needs a GPU of compute capability {wanted}, got {major}.{minor}"
        if dtype not in (torch.float16, torch.bfloat16):
            return f"needs torch.float16 or torch.bfloat16, got {dtype}"
        if head_dim > cls.max_head_dim:
            return f"needs head_dim up to {cls.max_head_dim}, got {head_dim}"
        return None

    def forward(
        self, q: Tensor, k: Tensor, v: Tensor, *, softmax_scale: float, mask: BlockMask
    ) -> AttentionPart:
        """Return the attention of ``q`` over this block of keys."""
        head_dim = q.shape[-1]
        q, k, v = (_fit(t) for t in (q, k, v))
        out, lse = self._attend(q, k, v, softmax_scale=softmax_scale, causal=mask.kind == "causal")
        return AttentionPart(out[..., :head_dim], lse.contiguous())

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
        head_dim = q.shape[-1]
        dout, q, k, v, out = (_fit(t) for t in (dout, q, k, v, out))
        given = BackwardInputs(dout, q, k, v, out, lse.contiguous())
        dq, dk, dv = self._attend_backward(given, softmax_scale=softmax_scale, causal=mask.kind == "causal")
        return AttentionGradients(dq[..., :head_dim], dk[..., :head_dim], dv[..., :head_dim])

    @abstractmethod
    def _attend(
        self, q: Tensor, k: Tensor, v: Tensor, *, softmax_scale: float, causal: bool
    ) -> tuple[Tensor, Tensor]:
        """Return ``out`` (B, Sq, H, D) and ``lse`` (B, H, Sq) float32."""

    @abstractmethod
    def _attend_backward(
        self, given: BackwardInputs, *, softmax_scale: float, causal: bool
    ) -> tuple[Tensor, Tensor, Tensor]:
        """Return ``dq``, ``dk``, ``dv``, shaped like ``q``, ``k``, ``v``."""


def _fit(tensor: Tensor) -> Tensor:
    """Make the last dim contiguous and a multiple of 8 long; zeros change no product."""
    missing = -tensor.shape[-1] % _HEAD_DIM_STEP
    if missing:
        return F.pad(tensor, (0, missing))
    return tensor if tensor.stride(-1) == 1 else tensor.contiguous()
