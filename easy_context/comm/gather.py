"""Gathering small facts and index tensors from all ranks of a group. Not differentiable, by intent."""

from __future__ import annotations

import torch
import torch.distributed as dist
from torch import Tensor


def all_gather_tensors(tensor: Tensor, group: dist.ProcessGroup | None) -> list[Tensor]:
    """Return the tensors of all ranks of ``group``, in rank order; they must have one shape and dtype.

    Without a group, the tensor of this process alone.
    """
    if group is None or dist.get_world_size(group) == 1:
        return [tensor]
    gathered = [
        torch.empty_like(tensor, memory_format=torch.contiguous_format)
        for _ in range(dist.get_world_size(group))
    ]
    dist.all_gather(gathered, tensor.contiguous(), group=group)
    return gathered
