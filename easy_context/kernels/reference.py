"""The specification: attention over one block and its gradients, written as the formulas are.

Every other kernel is tested against this one, and it serves what no other does (windows, packed documents,
fp64, odd devices). Its memory is linear in the sequence length: queries are taken a fixed number at a time.
It does not try to be fast.

Letters: B batch, Sq queries, Sk keys, H query heads, H_kv key/value heads, G = H / H_kv query heads that
share one, T queries of a tile, D head_dim.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import replace

import torch
from torch import Tensor

from easy_context.kernels.base import AttentionGradients, AttentionPart
from easy_context.masks import BlockMask

_QUERIES_PER_TILE = 64


class ReferenceKernel:
    """Plain attention in float32 (float64 for float64 inputs), for every device, dtype and mask."""

    name = "reference"
    mask_kinds = frozenset({"full", "causal", "interval"})

    @classmethod
    def refusal(cls, device: torch.device, dtype: torch.dtype, head_dim: int) -> str | None:
        """Return why it cannot serve such tensors, or None if it can."""
        return None if dtype.is_floating_point else f"needs a floating dtype, got {dtype}"

    def forward(
        self, q: Tensor, k: Tensor, v: Tensor, *, softmax_scale: float, mask: BlockMask
    ) -> AttentionPart:
        """Return ``out = softmax(softmax_scale * q @ k^T) @ v`` over the visible keys, and its lse."""
        # Under autocast the products would run in half precision.
        with torch.autocast(q.device.type, enabled=False):
            keys, values = _by_kv_head(k), _by_kv_head(v)
            out = torch.empty_like(q, memory_format=torch.contiguous_format)
            batch_size, num_queries, num_heads, _ = q.shape
            lse = keys.new_empty(batch_size, num_heads, num_queries)
            for start, stop, visible in _tiles(mask, q, k):
                scores = _scores(_grouped(q[:, start:stop], keys), keys, softmax_scale, visible)
                tile_lse = scores.logsumexp(dim=-1)  # (B, H_kv, G * T)
                tile_out = _probabilities(scores, tile_lse) @ values
                out[:, start:stop] = _ungrouped(tile_out, stop - start)
                lse[:, :, start:stop] = tile_lse.view(*lse.shape[:2], stop - start)
            return AttentionPart(out, lse)

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
        """Return this block's share of the gradients, from ``out`` and ``lse`` over all keys.

        ``p = exp(softmax_scale * q @ k^T - lse)``,
        ``ds = softmax_scale * p * (dout @ v^T - sum(dout * out))``,
        ``dq = ds @ k``, ``dk = ds^T @ q``, ``dv = p^T @ dout``.

        Source: https://arxiv.org/abs/2205.14135, appendix B.2.
        """
        with torch.autocast(q.device.type, enabled=False):
            keys, values = _by_kv_head(k), _by_kv_head(v)
            dkeys, dvalues = torch.zeros_like(keys), torch.zeros_like(values)
            dq = torch.empty_like(q, memory_format=torch.contiguous_format)
            for start, stop, visible in _tiles(mask, q, k):
                queries, douts, outs = (_grouped(t[:, start:stop], keys) for t in (q, dout, out))
                tile_lse = lse[:, :, start:stop].reshape(queries.shape[:3])
                p = _probabilities(_scores(queries, keys, softmax_scale, visible), tile_lse)
                delta = (douts * outs).sum(dim=-1, keepdim=True)
                ds = (douts @ values.mT).sub_(delta).mul_(p).mul_(softmax_scale)
                dq[:, start:stop] = _ungrouped(ds @ keys, stop - start)
                dkeys += ds.mT @ queries  # the G query heads of a group add up here
                dvalues += p.mT @ douts
            return AttentionGradients(
                dq,
                dkeys.transpose(1, 2).to(k.dtype).contiguous(),
                dvalues.transpose(1, 2).to(v.dtype).contiguous(),
            )


def _compute_dtype(dtype: torch.dtype) -> torch.dtype:
    return torch.float64 if dtype == torch.float64 else torch.float32


def _tiles(mask: BlockMask, q: Tensor, k: Tensor) -> Iterator[tuple[int, int, Tensor | None]]:
    """Give queries a few at a time: start, stop, and the keys seen, (1 or B, T, Sk) bool or None for all."""
    if mask.kind == "interval":
        assert mask.q_index is not None and mask.k_index is not None and mask.first_visible is not None
        mask = replace(  # once here instead of once a tile
            mask,
            q_index=mask.q_index.to(q.device),
            k_index=mask.k_index.to(q.device),
            first_visible=mask.first_visible.to(q.device),
        )
    num_queries = q.shape[1]
    for start in range(0, num_queries, _QUERIES_PER_TILE):
        stop = min(start + _QUERIES_PER_TILE, num_queries)
        if mask.kind == "full":
            yield start, stop, None
        else:
            yield start, stop, mask.visible(start, stop, num_keys=k.shape[1], device=q.device)


def _by_kv_head(tensor: Tensor) -> Tensor:
    """Keys or values in the compute dtype: (B, Sk, H_kv, D) -> (B, H_kv, Sk, D)."""
    return tensor.to(_compute_dtype(tensor.dtype)).transpose(1, 2).contiguous()


def _grouped(tensor: Tensor, keys: Tensor) -> Tensor:
    """A tile in the compute dtype, G heads one after another: (B, T, H, D) -> (B, H_kv, G * T, D).

    So a key/value head meets all its queries in one product, and is not repeated G times.
    """
    num_kv_heads = keys.shape[1]
    return tensor.to(keys.dtype).unflatten(2, (num_kv_heads, -1)).permute(0, 2, 3, 1, 4).flatten(2, 3)


def _ungrouped(tile: Tensor, num_queries: int) -> Tensor:
    """Inverse of :func:`_grouped`: (B, H_kv, G * T, D) -> (B, T, H, D)."""
    return tile.unflatten(2, (-1, num_queries)).permute(0, 3, 1, 2, 4).flatten(2, 3)


def _scores(queries: Tensor, keys: Tensor, softmax_scale: float, visible: Tensor | None) -> Tensor:
    """Return ``softmax_scale * q @ k^T``, (B, H_kv, G * T, Sk), ``-inf`` where a key is not seen."""
    scores = (queries @ keys.mT).mul_(softmax_scale)
    if visible is not None:
        by_head = scores.unflatten(2, (-1, visible.shape[1]))  # a view: (B, H_kv, G, T, Sk)
        by_head.masked_fill_(~visible[:, None, None], -math.inf)
    return scores


def _probabilities(scores: Tensor, lse: Tensor) -> Tensor:
    """Return ``exp(scores - lse)``; 0 for a query that sees no key at all (``lse = -inf``)."""
    lse = lse.masked_fill(lse == -math.inf, math.inf)
    return (scores - lse.unsqueeze(-1)).exp_()
