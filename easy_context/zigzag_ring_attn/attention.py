"""Ring attention over a zigzag layout, forward and backward.

Keys and values travel around the ring while queries stay. Rank ``r`` of ``n`` holds chunks ``r`` and ``2n - 1
- r`` of ``2n``, so that in each step it computes either all its queries against the earlier chunk of a
visitor, or its
later queries against both chunks of the visitor: the same amount of work on every rank.

This file knows which blocks meet in which step, and nothing of Hugging Face, of process groups or of how a
kernel works. Letters: B batch, S local sequence, H query heads, H_kv key/value heads, D head_dim.

Source: Ring Attention, https://arxiv.org/abs/2310.01889; the zigzag balance,
https://github.com/zhuzilin/ring-flash-attention/issues/2.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
from torch import Tensor

from easy_context.comm.ring import Ring
from easy_context.kernels.base import Kernel
from easy_context.kernels.merge import merge_partials
from easy_context.layouts import zigzag_positions
from easy_context.masks import CAUSAL, FULL, BlockMask, SequenceMask


class RingStep(NamedTuple):
    """What a rank computes while the keys of rank ``owner`` visit it."""

    owner: int
    queries: slice
    keys: slice
    mask: BlockMask


def zigzag_step(step: int, *, ring_rank: int, ring_size: int, sequence: SequenceMask) -> RingStep:
    """Return what ``ring_rank`` computes in ``step``: which of its queries meet which of the visiting keys.

    Both slices are in local indices, 0 to ``seq_len / ring_size``.
    """
    local_len = sequence.seq_len // ring_size
    whole, earlier, later = slice(0, local_len), slice(0, local_len // 2), slice(local_len // 2, local_len)
    owner = (ring_rank - step) % ring_size
    if step == 0:
        queries, keys, mask = whole, whole, CAUSAL
    elif owner < ring_rank:
        queries, keys, mask = whole, earlier, FULL
    else:
        queries, keys, mask = later, whole, FULL
    if not sequence.is_plain_causal:
        q_index = zigzag_positions(sequence.seq_len, num_ranks=ring_size, rank=ring_rank)[queries]
        k_index = zigzag_positions(sequence.seq_len, num_ranks=ring_size, rank=owner)[keys]
        mask = sequence.block(q_index, k_index)
    return RingStep(owner, queries, keys, mask)


def zigzag_ring_attention(
    q: Tensor, k: Tensor, v: Tensor, *, softmax_scale: float, mask: SequenceMask, ring: Ring, kernel: Kernel
) -> Tensor:
    """Return exact causal attention of the whole sequence for the queries of this rank.

    Args:
        q: (B, S, H, D), queries at the rank's zigzag positions, ascending.
        k, v: (B, S, H_kv, D), keys and values at the same positions.
        softmax_scale: factor of ``q @ k`` before the softmax.
        mask: what the queries of the whole sequence may see.
        ring: the ranks that share the sequence.
        kernel: computes one block.

    Returns: (B, S, H, D), typed like ``q``. Partial results are merged in float32 (float64 for float64
    inputs).

    Communication per rank, with K the bytes of local ``k`` and ``v`` together and ``n`` ranks: ``(n - 1) *
    K`` sent in the forward pass; in the backward pass ``(n - 1) * K``, and their gradients in accumulation
    precision ``n * K * itemsize(accumulator) / itemsize(k)``.
    """
    return _ZigzagRingAttention.apply(q, k, v, softmax_scale, mask, ring, kernel)


class _ZigzagRingAttention(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        softmax_scale: float,
        mask: SequenceMask,
        ring: Ring,
        kernel: Kernel,
    ) -> Tensor:
        out, lse = _ring_forward(q, k, v, softmax_scale, mask, ring=ring, kernel=kernel)
        ctx.save_for_backward(q, k, v, out, lse)
        ctx.softmax_scale, ctx.mask, ctx.ring, ctx.kernel = softmax_scale, mask, ring, kernel
        return out

    @staticmethod
    def backward(ctx: Any, *grad_outputs: Tensor) -> tuple[Tensor | None, ...]:
        q, k, v, out, lse = ctx.saved_tensors
        # All three gradients are computed whichever are needed: every rank has to post the same rotations.
        dq, dk, dv = _ring_backward(
            grad_outputs[0], q, k, v, out, lse, ctx.softmax_scale, ctx.mask, ring=ctx.ring, kernel=ctx.kernel
        )
        return dq, dk, dv, None, None, None, None


def _ring_forward(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    softmax_scale: float,
    sequence: SequenceMask,
    *,
    ring: Ring,
    kernel: Kernel,
) -> tuple[Tensor, Tensor]:
    visitors = [k, v]
    out = lse = torch.empty(0)
    for step in range(ring.size):
        # The next keys travel while this step computes.
        rotation = ring.start(visitors) if step + 1 < ring.size else None
        plan = zigzag_step(step, ring_rank=ring.rank, ring_size=ring.size, sequence=sequence)
        if plan.mask.kind != "empty":
            keys, values = (visitor[:, plan.keys] for visitor in visitors)
            part = kernel.forward(
                q[:, plan.queries], keys, values, softmax_scale=softmax_scale, mask=plan.mask
            )
            if step == 0:  # the diagonal: every query sees at least itself, so lse is finite from here on
                out, lse = part.out.to(_accumulator_dtype(q)), part.lse
            else:
                rows = plan.queries
                out[:, rows], lse[:, :, rows] = merge_partials(
                    out[:, rows], lse[:, :, rows], part.out, part.lse
                )
        if rotation is not None:
            visitors = rotation.wait()
    return out.to(q.dtype), lse


def _ring_backward(
    dout: Tensor,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    out: Tensor,
    lse: Tensor,
    softmax_scale: float,
    sequence: SequenceMask,
    *,
    ring: Ring,
    kernel: Kernel,
) -> tuple[Tensor, Tensor, Tensor]:
    accumulator = _accumulator_dtype(q)
    visitors = [k, v]
    dq = torch.zeros_like(q, dtype=accumulator)
    # Gradients of the visitors travel with them, one hop behind, and come home after the last step.
    travelling = [torch.zeros_like(visitor, dtype=accumulator) for visitor in visitors]
    gradient_rotation = None
    for step in range(ring.size):
        rotation = ring.start(visitors) if step + 1 < ring.size else None
        plan = zigzag_step(step, ring_rank=ring.rank, ring_size=ring.size, sequence=sequence)
        grads = None
        if plan.mask.kind != "empty":
            rows, keys, values = plan.queries, visitors[0][:, plan.keys], visitors[1][:, plan.keys]
            grads = kernel.backward(
                dout[:, rows],
                q[:, rows],
                keys,
                values,
                out[:, rows],
                lse[:, :, rows],
                softmax_scale=softmax_scale,
                mask=plan.mask,
            )
            dq[:, rows] += grads.dq
        if gradient_rotation is not None:
            travelling = gradient_rotation.wait()
        if grads is not None:
            travelling[0][:, plan.keys] += grads.dk
            travelling[1][:, plan.keys] += grads.dv
        if ring.size > 1:
            gradient_rotation = ring.start(travelling)
        if rotation is not None:
            visitors = rotation.wait()
    if gradient_rotation is not None:
        travelling = gradient_rotation.wait()
    return dq.to(q.dtype), travelling[0].to(k.dtype), travelling[1].to(v.dtype)


def _accumulator_dtype(tensor: Tensor) -> torch.dtype:
    return torch.promote_types(tensor.dtype, torch.float32)
