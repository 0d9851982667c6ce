"""What a query may see, in terms of the global sequence index.

Causality, sliding windows and packed documents are one thing here: query ``i`` sees the keys of one interval,
``first_visible[i] <= k <= i``. This file knows sequence indices; it never looks at ``position_ids`` except to
find where documents start, never holds a tensor of S x S elements, and knows nothing of ranks or kernels.

Letters: B batch, Sq queries, Sk keys, S whole sequence.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor

MaskKind = Literal["empty", "full", "causal", "interval"]


@dataclass(frozen=True)
class BlockMask:
    """What a block of queries sees of a block of keys.

    Attributes:
        kind: ``"full"`` every key, ``"empty"`` none, ``"causal"`` a square block of one and the same run of
            tokens (query ``i`` of the block sees keys ``0..i`` of the block), ``"interval"`` see below.
        q_index: (Sq,) int64, global sequence index of each query; only for ``"interval"``.
        k_index: (Sk,) int64, global sequence index of each key; only for ``"interval"``.
        first_visible: (1 or B, Sq) int64, the first global index that a query sees; the last is its own. Only
            for ``"interval"``.
    """

    kind: MaskKind
    q_index: Tensor | None = None
    k_index: Tensor | None = None
    first_visible: Tensor | None = None

    def visible(self, start: int, stop: int, *, num_keys: int, device: torch.device) -> Tensor:
        """Return which keys the queries ``start`` to ``stop`` of the block see: (1 or B, stop - start, Sk)
        bool.

        Call it for a few queries at a time: its size is queries times keys.
        """
        if self.kind in ("full", "empty"):
            return torch.full((1, stop - start, num_keys), self.kind == "full", device=device)
        if self.kind == "causal":
            query = torch.arange(start, stop, device=device)
            return (torch.arange(num_keys, device=device) <= query[:, None])[None]
        assert self.q_index is not None and self.k_index is not None and self.first_visible is not None
        query = self.q_index[start:stop].to(device)[None, :, None]
        first = self.first_visible[:, start:stop].to(device)[:, :, None]
        key = self.k_index.to(device)[None, None, :]
        return (first <= key) & (key <= query)


FULL = BlockMask("full")
CAUSAL = BlockMask("causal")
EMPTY = BlockMask("empty")


def document_starts(position_ids: Tensor) -> Tensor | None:
    """Return the sequence index at which each token's document starts, or None if every row is one document.

    A new document starts where ``position_ids`` do not increase. A forward skip (PoSE) stays in the document.

    Args:
        position_ids: (B, S) integer, in global order.
    Returns: (B, S) int64 on the same device, or None.
    """
    starts = position_ids[:, 1:] <= position_ids[:, :-1]
    if not bool(starts.any()):
        return None
    index = torch.arange(1, position_ids.shape[1], device=position_ids.device)
    starts_at = torch.where(starts, index, 0)
    first = torch.zeros_like(position_ids[:, :1], dtype=torch.int64)
    return torch.cat([first, starts_at], dim=1).cummax(dim=1).values


def first_visible_index(q_index: Tensor, *, window: int | None, documents: Tensor | None) -> Tensor | None:
    """Return the first global index that each query sees, or None if that is 0 for all of them.

    Args:
        q_index: (Sq,) int64, global index of each query.
        window: number of keys that a query sees at most, itself included (Hugging Face's ``sliding_window``).
        documents: (B, Sq) int64 from :func:`document_starts`, already taken at ``q_index``, or None.
    Returns: (1 or B, Sq) int64 or None.
    """
    first = torch.zeros_like(q_index)[None]
    if window is not None:
        first = (q_index - window + 1).clamp_min(0)[None]
    if documents is not None:
        first = torch.maximum(first, documents)
    return first if bool((first > 0).any()) else None


def block_mask(q_index: Tensor, k_index: Tensor, first_visible: Tensor | None) -> BlockMask:
    """Classify a pair of blocks, so that a kernel is given the cheapest mask that is exact.

    Args:
        q_index, k_index: (Sq,) and (Sk,) int64 global indices, ascending, on the CPU.
        first_visible: (1 or B, Sq) int64 on the CPU, or None for plain causality.
    """
    first = torch.zeros_like(q_index)[None] if first_visible is None else first_visible
    if bool(k_index[0] > q_index[-1]) or bool(first.min() > k_index[-1]):
        return EMPTY
    sees_first_key = bool(first.max() <= k_index[0])
    if sees_first_key and bool(k_index[-1] <= q_index[0]):
        return FULL
    if sees_first_key and torch.equal(q_index, k_index):
        return CAUSAL
    return BlockMask("interval", q_index=q_index, k_index=k_index, first_visible=first)


@dataclass(frozen=True)
class SequenceMask:
    """What the queries of a whole sequence may see: causal, and no further back than a window or their
    document.

    Attributes:
        seq_len: global sequence length.
        window: see :func:`first_visible_index`.
        documents: (B, S) int64 on the CPU from :func:`document_starts`, in global order, or None.
    """

    seq_len: int
    window: int | None = None
    documents: Tensor | None = None

    @property
    def is_plain_causal(self) -> bool:
        """Whether every query sees all tokens before it."""
        return self.documents is None and (self.window is None or self.window >= self.seq_len)

    def whole(self) -> BlockMask:
        """Return the mask of the whole sequence over itself."""
        if self.is_plain_causal:
            return CAUSAL
        index = torch.arange(self.seq_len)
        return self.block(index, index)

    def block(self, q_index: Tensor, k_index: Tensor) -> BlockMask:
        """Return the mask between queries and keys at these global indices (int64, ascending, CPU)."""
        documents = None if self.documents is None else self.documents[:, q_index]
        return block_mask(
            q_index, k_index, first_visible_index(q_index, window=self.window, documents=documents)
        )
