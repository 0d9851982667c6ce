"""Watch what a piece of code sends and allocates."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import torch
import torch.distributed as dist
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves


@dataclass
class Traffic:
    """What this rank sent, and its point-to-point sends one by one: peer, shape, dtype."""

    bytes_sent: int = 0
    sends: list[tuple[int, tuple[int, ...], torch.dtype]] = field(default_factory=list)


@contextmanager
def spy_on_traffic() -> Iterator[Traffic]:
    """Count what ``batch_isend_irecv`` and ``all_to_all_single`` send to other ranks."""
    traffic, original = Traffic(), dist.batch_isend_irecv

    def counting(operations: list[dist.P2POp]) -> list[dist.Work]:
        for operation in operations:
            if operation.op is dist.isend:
                tensor = operation.tensor
                traffic.bytes_sent += tensor.numel() * tensor.element_size()
                traffic.sends.append((operation.peer, tuple(tensor.shape), tensor.dtype))
        return original(operations)

    dist.batch_isend_irecv = counting
    original_all_to_all = dist.all_to_all_single

    def counting_all_to_all(output: torch.Tensor, input: torch.Tensor, *args: Any, group: Any = None) -> Any:
        input_counts = args[1] if len(args) > 1 else [1] * dist.get_world_size(group)
        share = 1 - input_counts[dist.get_rank(group)] / sum(input_counts)
        traffic.bytes_sent += round(input.numel() * input.element_size() * share)
        return original_all_to_all(output, input, *args, group=group)

    dist.all_to_all_single = counting_all_to_all
    try:
        yield traffic
    finally:
        dist.batch_isend_irecv, dist.all_to_all_single = original, original_all_to_all


class LargestTensor(TorchDispatchMode):
    """Remember the largest tensor (in elements) that any operation returns."""

    def __init__(self) -> None:
        super().__init__()
        self.numel = 0
        self.operation = ""

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        for leaf in tree_leaves(result):
            if (
                isinstance(leaf, torch.Tensor)
                and leaf.untyped_storage().nbytes() // leaf.element_size() > self.numel
            ):
                self.numel, self.operation = leaf.untyped_storage().nbytes() // leaf.element_size(), str(func)
        return result
