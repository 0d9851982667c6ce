"""Which global token positions each rank holds. Pure index arithmetic: no torch.distributed here."""

from __future__ import annotations

import math

import torch
from torch import Tensor


def whole_positions(seq_len: int, *, num_ranks: int, rank: int, ring_size: int | None = None) -> Tensor:
    """Global positions of a rank that holds the whole sequence: all of them.

    Returns: ``(seq_len,)`` int64, ascending.
    """
    return torch.arange(seq_len)


def contiguous_positions(seq_len: int, *, num_ranks: int, rank: int, ring_size: int | None = None) -> Tensor:
    """Global positions held by ``rank`` when the sequence is cut into ``num_ranks`` equal runs.

    Returns: ``(seq_len / num_ranks,)`` int64, ascending.
    Raises: ``ValueError`` if ``seq_len`` is not a positive multiple of ``num_ranks``.
    """
    require_multiple(seq_len, num_ranks, "contiguous layout", "num_ranks")
    return torch.arange(seq_len).view(num_ranks, -1)[rank]


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


def usp_positions(seq_len: int, *, num_ranks: int, rank: int, ring_size: int | None = None) -> Tensor:
    """Global positions held by ``rank`` when a zigzag ring runs across Ulysses groups of neighbouring ranks.

    The ``ring_size`` ring ranks fold the sequence like a zigzag; the ``num_ranks / ring_size`` Ulysses ranks
    of each cut its part into equal runs. ``rank = ring_rank * ulysses_size + ulysses_rank``.

    Returns: ``(seq_len / num_ranks,)`` int64, ascending.
    Raises: ``ValueError`` without a ring size, or if ``seq_len`` is not a positive multiple of
        ``usp_length_multiple``.
    Source: https://arxiv.org/abs/2405.07719
    """
    if ring_size is None:
        raise ValueError(
            "usp_attn needs a ring degree, got None; pass ring_degree or call "
            "init_sequence_parallel_mesh(ring_degree=...)"
        )
    ulysses_size = num_ranks // ring_size
    require_multiple(
        seq_len,
        usp_length_multiple(num_ranks, ring_size),
        f"usp layout of ring {ring_size} x ulysses {ulysses_size}",
        "the least common multiple of 2 * ring_size and num_ranks",
    )
    ring_rank, ulysses_rank = divmod(rank, ulysses_size)
    held = zigzag_positions(seq_len, num_ranks=ring_size, rank=ring_rank)
    return held.view(ulysses_size, -1)[ulysses_rank]


def usp_length_multiple(num_ranks: int, ring_size: int | None) -> int:
    """Return what ``usp_positions`` needs a sequence length to be a multiple of, in tokens."""
    return math.lcm(2 * (num_ranks if ring_size is None else ring_size), num_ranks)


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
