"""Data parallelism as a strategy: every rank holds whole sequences of its own and computes them alone."""

from __future__ import annotations

from torch import Tensor

from easy_context.comm.mesh import SequenceParallelMesh
from easy_context.kernels.base import Kernel
from easy_context.kernels.local_attention import local_attention
from easy_context.layouts import whole_positions
from easy_context.masks import SequenceMask
from easy_context.registry import HeadShape, Strategy


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
    return local_attention(q, k, v, softmax_scale=softmax_scale, mask=mask.whole(), kernel=kernel)


def _validate(heads: HeadShape, mesh: SequenceParallelMesh) -> None:
    """Any number of heads will do."""


STRATEGY = Strategy(
    name="data_parallel",
    layout=whole_positions,
    attention=_attention,
    validate=_validate,
    length_multiple=lambda num_ranks, ring_size: 1,
    mesh_axes=(),
    summary="whole sequences on every rank; nothing is exchanged in attention",
)
