"""Token-weighted loss over sharded sequences, with or without ever forming logits.

The loss of a batch is the sum of its token losses over the number of its valid targets, over all ranks.
Engines (DDP, ZeRO, FSDP) average gradients over ranks, so each rank returns ``world_size * local_sum /
global_count``: the mean over ranks of that is the loss, and the mean of its gradients is exact. This file is
where that factor lives.

Letters: B batch, S local sequence, V vocabulary, E hidden size.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from importlib.util import find_spec
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn

from easy_context.comm.mesh import SequenceParallelMesh, default_mesh
from easy_context.registry import IGNORE_INDEX

# Logits at a time: enough bytes in float32 for full speed, small beside activations, and never the whole
# shard.
_CHUNK_BYTES = 256 * 2**20
_MIN_CHUNKS = 8


def sequence_parallel_cross_entropy(
    logits: Tensor,
    local_target_ids: Tensor,
    *,
    num_target_tokens: Tensor | int | None = None,
    mesh: SequenceParallelMesh | None = None,
) -> Tensor:
    """Return this rank's share of the token-weighted cross entropy of the global batch.

    Args:
        logits: (B, S, V), the model's output on this rank's shard.
        local_target_ids: (B, S) int64, shifted before sharding; -100 is ignored.
        num_target_tokens: number of valid targets in the batches of ALL ranks and all micro-batches of the
            update; None counts this batch over all ranks (one small all-reduce).
        mesh: None is the default mesh.

    Returns: a float32 scalar whose mean over the ranks is the loss, and whose gradients averaged over the
        ranks are exact. Without any valid target it is 0 with zero gradients.
    """
    total = F.cross_entropy(
        logits.flatten(0, -2).to(torch.promote_types(logits.dtype, torch.float32)),
        local_target_ids.flatten(),
        ignore_index=IGNORE_INDEX,
        reduction="sum",
    )
    return total * _weight(local_target_ids, num_target_tokens, mesh)


def sequence_parallel_linear_cross_entropy(
    hidden: Tensor,
    lm_head: nn.Module,
    local_target_ids: Tensor,
    *,
    num_target_tokens: Tensor | int | None = None,
    mesh: SequenceParallelMesh | None = None,
) -> Tensor:
    """Like :func:`sequence_parallel_cross_entropy` of ``lm_head(hidden)``, without ever holding all logits.

    Logits exist for a few tokens at a time, and their gradients are taken at once, in the forward pass. The
    work happens inside a call of ``lm_head``, so that an engine that shards its weight gathers it as for any
    forward.

    Args:
        hidden: (B, S, E), last hidden states of this rank's shard.
        lm_head: a linear map to the vocabulary with ``weight`` (V, E) and optionally ``bias`` (V,).
        local_target_ids, num_target_tokens, mesh: as there.

    Raises: ``ValueError`` if ``lm_head`` is not a linear map, or hidden states and targets differ in shape.
    Source: chunking after https://arxiv.org/abs/2407.15892; gradients in the forward pass after Liger-Kernel,
        https://arxiv.org/abs/2410.10989, section 3.2.
    """
    if getattr(lm_head, "weight", None) is None:
        raise ValueError(
            "sequence_parallel_linear_cross_entropy needs a linear lm_head with a weight, got "
            f"{type(lm_head).__name__}; use sequence_parallel_cross_entropy on the model's logits"
        )
    if hidden.shape[:-1] != local_target_ids.shape:
        raise ValueError(
            f"sequence_parallel_linear_cross_entropy needs targets of shape {tuple(hidden.shape[:-1])}, got "
            f"{tuple(local_target_ids.shape)}; pass the local_target_ids of the same shard"
        )
    with _forward_replaced(lm_head, _summed_linear_cross_entropy):
        total = lm_head(hidden.flatten(0, -2), local_target_ids.flatten())
    return total * _weight(local_target_ids, num_target_tokens, mesh)


def count_targets(local_target_ids: Tensor, mesh: SequenceParallelMesh | None = None) -> Tensor:
    """Return how many valid targets the batches of all ranks hold: a float32-exact int64 scalar tensor.

    Targets of one sequence group are disjoint shards and those of different groups different sequences, so
    that the sum over the world counts each target once.
    """
    count = (local_target_ids != IGNORE_INDEX).sum()
    mesh = default_mesh() if mesh is None else mesh
    if mesh.world_size > 1:
        dist.all_reduce(count, group=mesh.world_group)
    return count


def _weight(
    local_target_ids: Tensor, num_target_tokens: Tensor | int | None, mesh: SequenceParallelMesh | None
) -> Tensor:
    mesh = default_mesh() if mesh is None else mesh
    if num_target_tokens is None:
        num_target_tokens = count_targets(local_target_ids, mesh)
    count = torch.as_tensor(num_target_tokens, device=local_target_ids.device)
    return mesh.world_size / count.clamp_min(1).to(torch.float32)


@contextmanager
def _forward_replaced(module: nn.Module, forward: Any) -> Iterator[None]:
    previous = module.__dict__.get("forward")
    module.forward = forward.__get__(module)
    try:
        yield
    finally:
        if previous is None:
            del module.forward
        else:
            module.forward = previous


def _summed_linear_cross_entropy(lm_head: nn.Linear, hidden: Tensor, target_ids: Tensor) -> Tensor:
    """Sum of token losses of ``hidden`` (N, E) and ``target_ids`` (N,); runs as ``lm_head``'s forward."""
    liger = _liger_loss() if hidden.is_cuda else None
    if liger is not None:
        return liger(lm_head.weight, hidden, target_ids, lm_head.bias)
    return _LinearCrossEntropy.apply(hidden, lm_head.weight, lm_head.bias, target_ids)


@functools.lru_cache(maxsize=1)
def _liger_loss() -> Callable[..., Tensor] | None:
    """Liger's fused kernel, which does the same on CUDA, if it is installed."""
    if find_spec("liger_kernel") is None:
        return None
    from liger_kernel.transformers import LigerFusedLinearCrossEntropyLoss

    return LigerFusedLinearCrossEntropyLoss(
        ignore_index=IGNORE_INDEX, reduction="sum", accum_dtype=torch.float32
    )


class _LinearCrossEntropy(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, hidden: Tensor, weight: Tensor, bias: Tensor | None, target_ids: Tensor) -> Tensor:
        needs_hidden, needs_weight, needs_bias = ctx.needs_input_grad[:3]
        grad_hidden = torch.zeros_like(hidden) if needs_hidden else None
        accumulator = torch.promote_types(hidden.dtype, torch.float32)
        grad_weight = torch.zeros_like(weight, dtype=accumulator) if needs_weight else None
        grad_bias = torch.zeros_like(bias, dtype=accumulator) if bias is not None and needs_bias else None
        total = torch.zeros((), dtype=accumulator, device=hidden.device)
        rows = max(1, min(_CHUNK_BYTES // (4 * weight.shape[0]), -(-hidden.shape[0] // _MIN_CHUNKS)))
        for start in range(0, hidden.shape[0], rows):
            chunk = slice(start, start + rows)
            log_probs = F.linear(hidden[chunk], weight, bias).to(accumulator).log_softmax(dim=-1)
            valid = target_ids[chunk] != IGNORE_INDEX
            target = torch.where(valid, target_ids[chunk], 0)[:, None]
            total -= torch.where(valid, log_probs.gather(1, target)[:, 0], 0.0).sum()
            if not any((needs_hidden, needs_weight, needs_bias)):
                continue
            # d loss / d logits = softmax - one_hot(target), and 0 where the target is ignored
            grad_logits = log_probs.exp_()
            grad_logits.scatter_add_(1, target, torch.full_like(target, -1.0, dtype=grad_logits.dtype))
            grad_logits *= valid[:, None]
            if grad_bias is not None:
                grad_bias += grad_logits.sum(0)
            grad_logits = grad_logits.to(weight.dtype)
            if grad_hidden is not None:
                grad_hidden[chunk] = grad_logits @ weight
            if grad_weight is not None:
                grad_weight += grad_logits.T @ hidden[chunk]
        ctx.save_for_backward(grad_hidden, grad_weight, grad_bias)
        ctx.parameter_dtypes = weight.dtype, None if bias is None else bias.dtype
        return total

    @staticmethod
    def backward(ctx: Any, *grad_outputs: Tensor) -> tuple[Tensor | None, ...]:
        scale = grad_outputs[0]
        grad_hidden, grad_weight, grad_bias = ctx.saved_tensors
        weight_dtype, bias_dtype = ctx.parameter_dtypes
        return (
            None if grad_hidden is None else grad_hidden * scale.to(grad_hidden.dtype),
            None if grad_weight is None else (grad_weight * scale).to(weight_dtype),
            None if grad_bias is None else (grad_bias * scale).to(bias_dtype),
            None,
        )
