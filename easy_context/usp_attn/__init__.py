"""The USP backend: a zigzag ring across Ulysses groups, for more ranks than heads or slow links."""

from __future__ import annotations

from torch import Tensor

from easy_context.comm.mesh import SequenceParallelMesh
from easy_context.comm.ring import ProcessGroupRing
from easy_context.kernels.base import Kernel
from easy_context.layouts import usp_length_multiple, usp_positions
from easy_context.masks import SequenceMask
from easy_context.registry import HeadShape, Strategy
from easy_context.usp_attn.attention import usp_attention


def _attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    *,
    softmax_scale: float,
    mask: SequenceMask,
    mesh: SequenceParallelMesh,
    kernel: Kernel,
) -> Tensor:
    return usp_attention(
        q,
        k,
        v,
        softmax_scale=softmax_scale,
        mask=mask,
        ring=ProcessGroupRing(mesh.ring_group),
        ulysses_group=mesh.ulysses_group,
        kernel=kernel,
    )


def _validate(heads: HeadShape, mesh: SequenceParallelMesh) -> None:
    if mesh.is_implicit:
        raise ValueError(
            "usp_attn needs to be told its degrees, got no mesh; "
            "call init_sequence_parallel_mesh(ring_degree=...) on every rank first"
        )
    if heads.num_heads % mesh.ulysses_size:
        raise ValueError(
            f"usp_attn needs query heads divisible by the Ulysses degree {mesh.ulysses_size}, got "
            f"{heads.num_heads}; choose a ring_degree so that sp_size / ring_degree divides them"
        )


STRATEGY = Strategy(
    name="usp_attn",
    layout=usp_positions,
    attention=_attention,
    validate=_validate,
    length_multiple=usp_length_multiple,
    mesh_axes=("ring", "ulysses"),
    summary="Ulysses among neighbours, a zigzag ring across their groups; both degrees multiply",
)
