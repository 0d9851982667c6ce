"""The Ulysses backend: heads are traded for sequence by all-to-all, and attention itself is local."""

from __future__ import annotations

from torch import Tensor

from easy_context.comm.mesh import SequenceParallelMesh
from easy_context.kernels.base import Kernel
from easy_context.kernels.local_attention import local_attention
from easy_context.layouts import contiguous_positions
from easy_context.masks import SequenceMask
from easy_context.registry import HeadShape, Strategy
from easy_context.ulysses_attn.attention import ulysses_attention


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
    def attend(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        return local_attention(q, k, v, softmax_scale=softmax_scale, mask=mask.whole(), kernel=kernel)

    return ulysses_attention(q, k, v, group=mesh.sp_group, attend=attend)


def _validate(heads: HeadShape, mesh: SequenceParallelMesh) -> None:
    if heads.num_heads % mesh.sp_size:
        raise ValueError(
            f"ulysses_attn needs query heads divisible by the {mesh.sp_size} ranks of a sequence group, got "
            f"{heads.num_heads}; use usp_attn with a ring, or zigzag_ring_attn, which serve any number of "
            "heads"
        )


STRATEGY = Strategy(
    name="ulysses_attn",
    layout=contiguous_positions,
    attention=_attention,
    validate=_validate,
    length_multiple=lambda num_ranks, ring_size: num_ranks,
    mesh_axes=("ring", "ulysses"),
    summary="one all-to-all before and after a local attention; ranks must divide the query heads",
)
