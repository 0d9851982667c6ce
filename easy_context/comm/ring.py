"""Point-to-point rotation along a ring of ranks.

Every rank sends to the next and receives from the previous one, in one batch that is posted before the
computation that hides it. Nothing here knows what the tensors mean.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

import torch
import torch.distributed as dist
from torch import Tensor


class PendingRotation(Protocol):
    """Tensors on their way around the ring."""

    def wait(self) -> list[Tensor]:
        """Return the tensors of the previous rank, once they have arrived."""
        ...


class Ring(Protocol):
    """A closed chain of ranks."""

    rank: int
    size: int

    def start(self, tensors: Sequence[Tensor]) -> PendingRotation:
        """Begin sending ``tensors`` to the next rank and receiving as many, alike, from the previous one."""
        ...


class ProcessGroupRing:
    """The ring formed by the ranks of a process group, in group order; without a group, this process alone.

    All ranks must post the same rotations in the same order, with tensors of the same shapes and dtypes.
    """

    def __init__(self, group: dist.ProcessGroup | None) -> None:
        self.group = group
        self.rank = dist.get_rank(group) if group is not None else 0
        self.size = dist.get_world_size(group) if group is not None else 1
        if self.size > 1:
            assert group is not None
            self._next_rank = dist.get_global_rank(group, (self.rank + 1) % self.size)
            self._previous_rank = dist.get_global_rank(group, (self.rank - 1) % self.size)

    def start(self, tensors: Sequence[Tensor]) -> PendingRotation:
        """Begin one rotation; the sent tensors must not change until its ``wait`` returns."""
        sent = [tensor.contiguous() for tensor in tensors]  # gloo and NCCL send flat memory
        received = [torch.empty_like(tensor) for tensor in sent]
        operations = []
        for outgoing, incoming in zip(sent, received, strict=True):
            operations.append(dist.P2POp(dist.isend, outgoing, self._next_rank, group=self.group))
            operations.append(dist.P2POp(dist.irecv, incoming, self._previous_rank, group=self.group))
        return _PostedRotation(dist.batch_isend_irecv(operations), sent, received)


class _PostedRotation:
    def __init__(self, works: list[dist.Work], sent: list[Tensor], received: list[Tensor]) -> None:
        self._works = works
        self._sent = sent  # kept alive until the transfer is over
        self._received = received

    def wait(self) -> list[Tensor]:
        for work in self._works:
            work.wait()
        self._sent = []
        return self._received
