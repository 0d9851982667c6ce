"""Who shares a sequence with whom."""

from __future__ import annotations

import pytest
import torch
import torch.distributed as dist
from ranks import run_ranks
from torch.distributed.device_mesh import DeviceMesh

from easy_context import SequenceParallelMesh, init_sequence_parallel_mesh
from easy_context.comm.mesh import chosen_default_mesh, default_mesh, reset_default_mesh


def test_without_a_process_group_the_world_is_this_process():
    mesh = default_mesh()
    assert (mesh.world_size, mesh.sp_size, mesh.sp_rank, mesh.dp_size) == (1, 1, 0, 1)
    assert mesh.sp_group is None and chosen_default_mesh() is None


def test_the_mesh_made_last_is_the_default():
    mesh = init_sequence_parallel_mesh()
    assert default_mesh() is mesh and chosen_default_mesh() is mesh
    reset_default_mesh()
    assert default_mesh() is not mesh


def test_launched_processes_without_a_process_group_are_an_error(monkeypatch):
    monkeypatch.setenv("WORLD_SIZE", "2")
    with pytest.raises(RuntimeError, match="process group of the 2 launched processes, got none"):
        default_mesh()


def place(sp_size: int | None, ring_degree: int | None) -> tuple[int, ...]:
    mesh = init_sequence_parallel_mesh(sp_size, ring_degree=ring_degree)
    return (mesh.dp_rank, mesh.sp_rank, mesh.ring_rank, mesh.ulysses_rank, *members(mesh))


def members(mesh: SequenceParallelMesh) -> tuple[tuple[int, ...], ...]:
    groups = (mesh.sp_group, mesh.ring_group, mesh.ulysses_group)
    return tuple(tuple(dist.get_process_group_ranks(group)) for group in groups)


def test_consecutive_ranks_share_a_sequence():
    places = run_ranks(place, 4, 2, None)
    assert [entry[:4] for entry in places] == [(0, 0, 0, 0), (0, 1, 1, 0), (1, 0, 0, 0), (1, 1, 1, 0)]
    assert [entry[4] for entry in places] == [(0, 1), (0, 1), (2, 3), (2, 3)]


def test_ulysses_ranks_are_neighbours_and_rings_stride_over_them():
    places = run_ranks(place, 4, None, 2)
    assert [entry[:4] for entry in places] == [(0, 0, 0, 0), (0, 1, 0, 1), (0, 2, 1, 0), (0, 3, 1, 1)]
    assert [entry[5] for entry in places] == [(0, 2), (1, 3), (0, 2), (1, 3)]
    assert [entry[6] for entry in places] == [(0, 1), (0, 1), (2, 3), (2, 3)]


def texts_of_refusals() -> list[str]:
    wrong_axes = DeviceMesh("cpu", torch.arange(4).view(2, 2), mesh_dim_names=("data", "sp"))
    right_axes = DeviceMesh("cpu", torch.arange(4).view(2, 2), mesh_dim_names=("dp", "sp"))
    texts = []
    for arguments in (
        {"sp_size": 3},
        {"sp_size": 0},
        {"ring_degree": 3},
        {"device_mesh": wrong_axes},
        {"device_mesh": right_axes, "sp_size": 4},
    ):
        with pytest.raises(ValueError) as error:
            init_sequence_parallel_mesh(**arguments)
        texts.append(str(error.value))
    return texts


def test_sizes_that_do_not_fit_are_named_with_those_that_do():
    for texts in run_ranks(texts_of_refusals, 4):
        assert "divides the world size 4, got 3; choose one of [1, 2, 4]" in texts[0]
        assert "divides the world size 4, got 0" in texts[1]
        assert "ring_degree that divides sp_size = 4, got 3; choose one of [1, 2, 4]" in texts[2]
        assert "got 4 ranks with ('data', 'sp')" in texts[3]
        assert "sp axis of 2, got 4; leave sp_size out" in texts[4]


def outlive_the_process_group(chosen: bool) -> str:
    if chosen:
        init_sequence_parallel_mesh()
    default_mesh()
    store = dist.distributed_c10d._get_default_store()
    rank, size = dist.get_rank(), dist.get_world_size()
    dist.barrier()
    dist.destroy_process_group()
    dist.init_process_group("gloo", store=dist.PrefixStore("again", store), rank=rank, world_size=size)
    try:
        return f"sp_size {default_mesh().sp_size}"
    except RuntimeError as error:
        return str(error)


def test_a_mesh_of_a_destroyed_process_group_is_noticed():
    assert run_ranks(outlive_the_process_group, 2, False) == ["sp_size 2", "sp_size 2"]
    for text in run_ranks(outlive_the_process_group, 2, True):
        assert "has been destroyed or replaced; call init_sequence_parallel_mesh again" in text
