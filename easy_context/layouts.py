"""Which global token positions each rank holds. Pure index arithmetic: no torch.distributed here."""

from __future__ import annotations

import torch
from torch import Tensor


def whole_positions(seq_len: int, *, num_ranks: int, rank: int, ring_size: int | None = None) -> Tensor:
    """Global positions of a rank that holds the whole sequence: all of them.

    Returns: ``(seq_len,)`` int64, ascending.
    """
    return torch.arange(seq_len)


def zigzag_positions(seq_len: int, *, num_ranks: int, rank: int, ring_size: int | None = None) -> Tensor:
    """Global positions held by ``rank`` when the sequence is folded like a zigzag.

    The sequence is cut into ``2 * num_ranks`` equal chunks and rank ``r`` takes chunks ``r`` and
    ``2 * num_ranks - 1 - r``. An early chunk attends to few keys and its mirror image to many, so that under
    a causal mask every rank does the same amount of work.

    Returns: ``(seq_len / num_ranks,)`` int64, ascending.
    Raises: ``ValueError`` if ``seq_len`` is not a positive multiple of ``2 * num_ranks``.
    Source: https://github.com/zhuzilin/ring-flash-attention/issues/2
    """
    num_chunks = 2 * num_ranks
    require_multiple(seq_len, num_chunks, "zigzag layout", "2 * num_ranks")
    chunks = torch.arange(seq_len).view(num_chunks, -1)
    return torch.cat([chunks[rank], chunks[num_chunks - 1 - rank]])


def inverse_order(positions: Tensor) -> Tensor:
    """Index that puts tokens listed by ``positions`` back into global order: ``positions[inverse]`` ascends.

    Args:
        positions: ``(S_global,)`` int64, a permutation, for example the positions of all ranks one after
            another.
    Returns: ``(S_global,)`` int64.
    """
    return torch.argsort(positions)


def require_multiple(seq_len: int, multiple: int, who: str, divisor: str) -> None:
    """Raise ``ValueError`` naming the padded length unless ``seq_len`` is a positive multiple."""
    if seq_len < multiple or seq_len % multiple:
        padded = max(1, -(-seq_len // multiple)) * multiple
        raise ValueError(
            f"{who} needs seq_len divisible by {divisor} = {multiple}, got {seq_len}; "
            f"pad the batch to {padded} tokens (see pad_to_multiple)"
        )
