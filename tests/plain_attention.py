"""Attention as a textbook writes it, with the whole S x S matrix: what kernels are compared with.

Shapes as in the package: ``q`` (B, Sq, H, D), ``k`` and ``v`` (B, Sk, H_kv, D).
"""

from __future__ import annotations

import torch
from torch import Tensor


def plain_scores(q: Tensor, k: Tensor, softmax_scale: float, visible: Tensor | None) -> Tensor:
    """Return ``softmax_scale * q @ k^T``, (B, H, Sq, Sk); ``visible`` is (1 or B, Sq, Sk) bool."""
    k = k.repeat_interleave(q.shape[2] // k.shape[2], dim=2)
    scores = torch.einsum("bqhd,bkhd->bhqk", q, k) * softmax_scale
    return scores if visible is None else scores.masked_fill(~visible[:, None], float("-inf"))


def plain_attention(
    q: Tensor, k: Tensor, v: Tensor, *, softmax_scale: float, visible: Tensor | None = None
) -> tuple[Tensor, Tensor]:
    """Return ``out`` (B, Sq, H, D) and ``lse`` (B, H, Sq), differentiable, all in the dtype of the inputs."""
    scores = plain_scores(q, k, softmax_scale, visible)
    v = v.repeat_interleave(q.shape[2] // v.shape[2], dim=2)
    probabilities = torch.nan_to_num(scores.softmax(dim=-1))  # a query that sees nothing: 0, not NaN
    return torch.einsum("bhqk,bkhd->bqhd", probabilities, v), scores.logsumexp(dim=-1)


def causal(num_tokens: int, device: torch.device | str = "cpu") -> Tensor:
    """Return the causal mask, (1, S, S) bool."""
    return torch.ones(1, num_tokens, num_tokens, dtype=torch.bool, device=device).tril()
