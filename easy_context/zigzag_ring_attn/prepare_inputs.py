"""EasyContext's own name for cutting a batch for the zigzag ring backend."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from easy_context.inputs import prepare_seq_parallel_inputs


def prepare_zigzag_ring_attn_inputs(
    input_ids: Tensor,
    position_ids: Tensor,
    target_ids: Tensor | None,
    rank: int,
    world_size: int,
    device: torch.device | str,
) -> dict[str, Any]:
    """Return one rank's shard; the same as ``prepare_seq_parallel_inputs("zigzag_ring_attn", ...)``."""
    return prepare_seq_parallel_inputs(
        "zigzag_ring_attn", input_ids, position_ids, target_ids, rank, world_size, device
    )
