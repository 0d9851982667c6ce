"""Which ranks share a sequence, and the process groups in which they talk.

Three mesh axes: ``dp`` (different sequences), ``ring`` and ``ulysses`` (the same sequence, cut two ways);
``sp`` is ring and ulysses together. This file holds the package's only module-level state, the default mesh.
"""

from __future__ import annotations

import os
from dataclasses import dataclass, replace

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh


@dataclass(frozen=True)
class SequenceParallelMesh:
    """The place of this process among data-parallel and sequence-parallel ranks.

    A sequence group holds one batch, spread over ``sp_size`` ranks; there are ``dp_size`` such groups. Within
    a group, ``sp_rank = ring_rank * ulysses_size + ulysses_rank``. Groups are None in a world without
    ``torch.distributed``.
    """

    dp_rank: int
    dp_size: int
    ring_rank: int
    ring_size: int
    ulysses_rank: int
    ulysses_size: int
    sp_group: dist.ProcessGroup | None = None
    ring_group: dist.ProcessGroup | None = None
    ulysses_group: dist.ProcessGroup | None = None
    world_group: dist.ProcessGroup | None = None
    is_implicit: bool = False  # the whole world, because nobody said otherwise

    @property
    def sp_rank(self) -> int:
        """Rank within the sequence group."""
        return self.ring_rank * self.ulysses_size + self.ulysses_rank

    @property
    def sp_size(self) -> int:
        """Number of ranks that share one sequence."""
        return self.ring_size * self.ulysses_size

    @property
    def world_size(self) -> int:
        """Number of all ranks, ``dp_size * sp_size``."""
        return self.dp_size * self.sp_size


class _DefaultMesh:
    """What ``mesh=None`` means in this process."""

    def __init__(self) -> None:
        self.mesh: SequenceParallelMesh | None = None


_default = _DefaultMesh()


def init_sequence_parallel_mesh(
    sp_size: int | None = None, *, ring_degree: int | None = None, device_mesh: DeviceMesh | None = None
) -> SequenceParallelMesh:
    """Arrange the ranks of the world into sequence groups, and make the result the default mesh.

    Call it on every rank, after the process group exists (without one the world is this process alone).

    Args:
        sp_size: ranks that share one sequence; None is the whole world. Consecutive ranks form a group.
        ring_degree: how many of them form the ring axis of ``usp_attn``; the rest, ``sp_size / ring_degree``,
            is the Ulysses axis. None puts all of them on the ring axis.
        device_mesh: a torch ``DeviceMesh`` of the whole world with axes ``"dp"`` and ``"sp"``, for groups of
            ranks that are not consecutive. Then ``sp_size`` follows from it.

    Raises: ``ValueError`` if the sizes do not divide each other or the mesh lacks an axis.
    """
    mesh = _build_mesh(sp_size, ring_degree, device_mesh)
    _default.mesh = mesh
    return mesh


def default_mesh() -> SequenceParallelMesh:
    """Return the mesh that ``mesh=None`` means: the one made last, else the whole world as one sequence
    group.

    Raises: ``RuntimeError`` if the mesh belongs to a process group that has been destroyed.
    """
    world = dist.group.WORLD if dist.is_initialized() else None
    if _default.mesh is None or (_default.mesh.world_group is not world and _default.mesh.is_implicit):
        _default.mesh = replace(_build_mesh(None, None, None), is_implicit=True)
    if _default.mesh.world_group is not world:
        raise RuntimeError(
            "the default mesh needs the process group that it was made with, which has been destroyed or "
            "replaced; call init_sequence_parallel_mesh again"
        )
    return _default.mesh


def chosen_default_mesh() -> SequenceParallelMesh | None:
    """Return the mesh that ``init_sequence_parallel_mesh`` made last, or None if it was never called."""
    return None if _default.mesh is None or _default.mesh.is_implicit else _default.mesh


def reset_default_mesh() -> None:
    """Forget the default mesh, as if ``init_sequence_parallel_mesh`` had never been called."""
    _default.mesh = None


def _build_mesh(
    sp_size: int | None, ring_degree: int | None, device_mesh: DeviceMesh | None
) -> SequenceParallelMesh:
    world_size = dist.get_world_size() if dist.is_initialized() else 1
    launched = int(os.environ.get("WORLD_SIZE", "1"))
    if not dist.is_initialized() and launched > 1:
        raise RuntimeError(
            f"a sequence-parallel mesh needs the process group of the {launched} launched processes, got "
            "none; call torch.distributed.init_process_group or make the Accelerator first"
        )
    grid = _rank_grid(world_size, sp_size, device_mesh)
    num_sharing = grid.shape[1]
    ring_size = num_sharing if ring_degree is None else ring_degree
    if ring_size < 1 or num_sharing % ring_size:
        raise ValueError(
            f"init_sequence_parallel_mesh needs a ring_degree that divides sp_size = {num_sharing}, "
            f"got {ring_degree}; choose one of {_divisors(num_sharing)}"
        )
    if not dist.is_initialized():
        return SequenceParallelMesh(0, 1, 0, 1, 0, 1)
    return _with_groups(grid, ring_size)


def _rank_grid(world_size: int, sp_size: int | None, device_mesh: DeviceMesh | None) -> torch.Tensor:
    """Global ranks as a (dp, sp) table; rows ascend, because process groups number their ranks that way."""
    if device_mesh is None:
        size = world_size if sp_size is None else sp_size
        if size < 1 or world_size % size:
            raise ValueError(
                f"init_sequence_parallel_mesh needs an sp_size that divides the world size {world_size}, "
                f"got {size}; choose one of {_divisors(world_size)}"
            )
        return torch.arange(world_size).view(-1, size)
    if device_mesh.mesh_dim_names != ("dp", "sp") or device_mesh.size() != world_size:
        raise ValueError(
            f"init_sequence_parallel_mesh needs a device_mesh of all {world_size} ranks with the axes "
            f'("dp", "sp"), '
            f"got {device_mesh.size()} ranks with {device_mesh.mesh_dim_names}; build it with mesh_dim_names"
        )
    if sp_size not in (None, device_mesh.mesh.shape[1]):
        raise ValueError(
            "init_sequence_parallel_mesh needs sp_size equal to the mesh's sp axis of "
            f"{device_mesh.mesh.shape[1]}, got {sp_size}; leave sp_size out"
        )
    return device_mesh.mesh.cpu().sort(dim=1).values


def _divisors(number: int) -> list[int]:
    return [divisor for divisor in range(1, number + 1) if number % divisor == 0]


def _with_groups(grid: torch.Tensor, ring_size: int) -> SequenceParallelMesh:
    dp_size, sp_size = grid.shape
    device_type = "cuda" if "nccl" in dist.get_backend() else "cpu"
    axes = DeviceMesh(
        device_type, grid.view(dp_size, ring_size, -1), mesh_dim_names=("dp", "ring", "ulysses")
    )
    flat = DeviceMesh(device_type, grid, mesh_dim_names=("dp", "sp"))
    return SequenceParallelMesh(
        dp_rank=axes.get_local_rank("dp"),
        dp_size=dp_size,
        ring_rank=axes.get_local_rank("ring"),
        ring_size=ring_size,
        ulysses_rank=axes.get_local_rank("ulysses"),
        ulysses_size=sp_size // ring_size,
        sp_group=flat.get_group("sp"),
        ring_group=axes.get_group("ring"),
        ulysses_group=axes.get_group("ulysses"),
        world_group=dist.group.WORLD,
    )
