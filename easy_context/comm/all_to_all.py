"""Scatter heads and gather the sequence over a group of ranks, and the inverse; both differentiable.

Which heads go where is the caller's business: a head may be asked for by several ranks, and then its
gradients are summed. Letters: B batch, S local sequence, H heads, h heads of one rank, D head_dim, n ranks.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor


@dataclass(frozen=True)
class HeadPlan:
    """Which heads each rank of a group receives.

    Attributes:
        heads_of: the head indices of each rank, in the order in which the rank gets them.
        num_heads: number of heads before the exchange.
        group: the ranks; None without ``torch.distributed``.
    """

    heads_of: Sequence[Sequence[int]]
    num_heads: int
    group: dist.ProcessGroup | None

    @property
    def rank(self) -> int:
        """Rank of this process in the group."""
        return dist.get_rank(self.group) if self.group is not None else 0


def scatter_heads(tensor: Tensor, plan: HeadPlan) -> Tensor:
    """Exchange (B, S, H, D), every head of a part of the sequence, for (B, n * S, h, D), some heads of all of
    it.

    The sequence comes out in rank order. Sent per rank: ``B * S * D`` elements for each head of another rank.
    """
    return _ScatterHeads.apply(tensor, plan)


def gather_heads(tensor: Tensor, plan: HeadPlan) -> Tensor:
    """Exchange (B, n * S, h, D) for (B, S, H, D): the transpose of :func:`scatter_heads`.

    A head that several ranks hold is summed over them; where each is held once, this is the inverse.
    """
    return _GatherHeads.apply(tensor, plan)


class _ScatterHeads(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, tensor: Tensor, plan: HeadPlan) -> Tensor:
        ctx.plan = plan
        return _scatter(tensor, plan)

    @staticmethod
    def backward(ctx: Any, *grad_outputs: Tensor) -> tuple[Tensor, None]:
        return _gather(grad_outputs[0], ctx.plan), None


class _GatherHeads(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, tensor: Tensor, plan: HeadPlan) -> Tensor:
        ctx.plan = plan
        return _gather(tensor, plan)

    @staticmethod
    def backward(ctx: Any, *grad_outputs: Tensor) -> tuple[Tensor, None]:
        return _scatter(grad_outputs[0], ctx.plan), None


def _scatter(tensor: Tensor, plan: HeadPlan) -> Tensor:
    batch_size, seq_len, _, head_dim = tensor.shape
    own, num_ranks = len(plan.heads_of[plan.rank]), len(plan.heads_of)
    # (B, S, H, D) -> (sum of h, B, S, D): what goes to one rank lies in one piece
    sent = tensor.permute(2, 0, 1, 3)[_all_heads(plan, tensor.device)].contiguous()
    received = tensor.new_empty(num_ranks * own, batch_size, seq_len, head_dim)
    _exchange(received, sent, [own] * num_ranks, [len(heads) for heads in plan.heads_of], plan.group)
    # (n * h, B, S, D) -> (B, n * S, h, D)
    return received.unflatten(0, (num_ranks, own)).permute(2, 0, 3, 1, 4).flatten(1, 2)


def _gather(tensor: Tensor, plan: HeadPlan) -> Tensor:
    num_ranks = len(plan.heads_of)
    batch_size, _, own, head_dim = tensor.shape
    # (B, n * S, h, D) -> (n * h, B, S, D)
    sent = tensor.unflatten(1, (num_ranks, -1)).permute(1, 3, 0, 2, 4).contiguous().flatten(0, 1)
    seq_len = sent.shape[2]
    counts = [len(heads) for heads in plan.heads_of]
    received = tensor.new_empty(sum(counts), batch_size, seq_len, head_dim)
    _exchange(received, sent, counts, [own] * num_ranks, plan.group)
    order = _all_heads(plan, tensor.device)
    if sorted(order.tolist()) == list(range(plan.num_heads)):
        return received[order.argsort()].permute(1, 2, 0, 3).contiguous()
    wide = torch.promote_types(tensor.dtype, torch.float32)
    summed = received.new_zeros(plan.num_heads, batch_size, seq_len, head_dim, dtype=wide)
    summed.index_add_(0, order, received.to(wide))
    return summed.permute(1, 2, 0, 3).to(tensor.dtype).contiguous()


def _all_heads(plan: HeadPlan, device: torch.device) -> Tensor:
    return torch.tensor([head for heads in plan.heads_of for head in heads], device=device)


def _exchange(
    received: Tensor,
    sent: Tensor,
    received_counts: list[int],
    sent_counts: list[int],
    group: dist.ProcessGroup | None,
) -> None:
    if group is None:
        received.copy_(sent)
    else:
        dist.all_to_all_single(received, sent, received_counts, sent_counts, group=group)
