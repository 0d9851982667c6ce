"""The zigzag ring backend: keys and values travel around a ring, work is balanced by folding the sequence."""

from __future__ import annotations

from torch import Tensor

from easy_context.comm.mesh import SequenceParallelMesh
from easy_context.comm.ring import ProcessGroupRing
from easy_context.kernels.base import Kernel
from easy_context.layouts import zigzag_positions
from easy_context.masks import SequenceMask
from easy_context.registry import HeadShape, Strategy
from easy_context.zigzag_ring_attn.attention import zigzag_ring_attention


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
    ring = ProcessGroupRing(mesh.sp_group)
    return zigzag_ring_attention(q, k, v, softmax_scale=softmax_scale, mask=mask, ring=ring, kernel=kernel)


def _validate(heads: HeadShape, mesh: SequenceParallelMesh) -> None:
    """Any number of heads will do: heads are never divided."""


STRATEGY = Strategy(
    name="zigzag_ring_attn",
    layout=zigzag_positions,
    attention=_attention,
    validate=_validate,
    length_multiple=lambda num_ranks, ring_size: 2 * num_ranks,
    mesh_axes=("ring", "ulysses"),
    summary="keys and values rotate around a ring, hidden behind the computation; any number of heads",
)
