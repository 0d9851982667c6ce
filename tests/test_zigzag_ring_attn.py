"""The ring loop itself: every pair of tokens once, exact gradients, and the traffic that it promises."""

from __future__ import annotations

import pytest
import torch
import torch.distributed as dist
from hypothesis import given, settings
from hypothesis import strategies as st
from ranks import run_ranks
from spies import spy_on_traffic
from tiny_models import relative_error
from torch import Tensor

from easy_context.comm.ring import ProcessGroupRing
from easy_context.kernels import select_kernel
from easy_context.kernels.local_attention import local_attention
from easy_context.kernels.reference import ReferenceKernel
from easy_context.layouts import zigzag_positions
from easy_context.masks import CAUSAL, SequenceMask, document_starts
from easy_context.zigzag_ring_attn.attention import zigzag_ring_attention, zigzag_step


def visible_pairs(sequence: SequenceMask, ring_size: int) -> Tensor:
    """How often each query of the whole sequence meets each key in all steps of all ranks: (B, S, S)."""
    batch = 1 if sequence.documents is None else sequence.documents.shape[0]
    met = torch.zeros(batch, sequence.seq_len, sequence.seq_len, dtype=torch.int64)
    for rank in range(ring_size):
        for step in range(ring_size):
            plan = zigzag_step(step, ring_rank=rank, ring_size=ring_size, sequence=sequence)
            rows = zigzag_positions(sequence.seq_len, num_ranks=ring_size, rank=rank)[plan.queries]
            columns = zigzag_positions(sequence.seq_len, num_ranks=ring_size, rank=plan.owner)[plan.keys]
            block = plan.mask.visible(0, len(rows), num_keys=len(columns), device=torch.device("cpu"))
            met[:, rows[:, None], columns[None, :]] += block.expand(batch, -1, -1).long()
    return met


@settings(max_examples=60, deadline=None)
@given(
    ring_size=st.integers(1, 6),
    half_chunk=st.integers(1, 4),
    window=st.one_of(st.none(), st.integers(1, 30)),
    starts=st.lists(st.integers(1, 47), max_size=5),
)
def test_every_visible_pair_is_computed_exactly_once(ring_size, half_chunk, window, starts):
    seq_len = 2 * ring_size * half_chunk
    position_ids = torch.arange(seq_len)[None].clone()
    for start in starts:
        if start < seq_len:
            position_ids[:, start:] -= position_ids[:, start : start + 1].clone()
    sequence = SequenceMask(seq_len, window, document_starts(position_ids))
    index = torch.arange(seq_len)
    expected = index[None, :] <= index[:, None]
    if window is not None:
        expected = expected & (index[None, :] > index[:, None] - window)
    document = (position_ids[0].diff(prepend=torch.tensor([-1])) <= 0).cumsum(0)
    expected = expected & (document[:, None] == document[None, :])
    assert torch.equal(visible_pairs(sequence, ring_size)[0], expected.long())


@pytest.mark.parametrize("ring_size", [2, 3, 8])
def test_every_rank_computes_the_same_number_of_pairs(ring_size):
    sequence = SequenceMask(4 * ring_size)
    work = set()
    for rank in range(ring_size):
        pairs = 0
        for step in range(ring_size):
            plan = zigzag_step(step, ring_rank=rank, ring_size=ring_size, sequence=sequence)
            rows, columns = plan.queries.stop - plan.queries.start, plan.keys.stop - plan.keys.start
            pairs += rows * (rows + 1) // 2 if plan.mask.kind == "causal" else rows * columns
        work.add(pairs)
    assert len(work) == 1


def whole_tensors(dtype: torch.dtype, *, seq_len: int = 24, heads: tuple[int, int] = (4, 2)) -> list[Tensor]:
    """q, k, v and the gradient of the output for a whole sequence."""
    generator = torch.Generator().manual_seed(5)
    shapes = [
        (2, seq_len, heads[0], 8),
        (2, seq_len, heads[1], 8),
        (2, seq_len, heads[1], 8),
        (2, seq_len, heads[0], 8),
    ]
    return [torch.randn(shape, generator=generator, dtype=torch.float64).to(dtype) for shape in shapes]


def errors_on_this_rank(dtype: torch.dtype, kernel_name: str) -> tuple[list[float], list[torch.dtype]]:
    """Relative errors of out, dq, dk, dv on this rank's tokens, against float64 attention of the whole."""
    tensors = whole_tensors(dtype)
    leaves = [tensor.double().requires_grad_() for tensor in tensors[:3]]
    out = local_attention(*leaves, softmax_scale=0.3, mask=CAUSAL, kernel=ReferenceKernel())
    expected = [out.detach(), *torch.autograd.grad(out, leaves, tensors[3].double())]
    ring = ProcessGroupRing(dist.group.WORLD)
    held = zigzag_positions(24, num_ranks=ring.size, rank=ring.rank)
    local = [tensor[:, held].requires_grad_() for tensor in tensors[:3]]
    kernel = select_kernel(kernel_name, device=torch.device("cpu"), dtype=dtype, head_dim=8)
    out = zigzag_ring_attention(*local, softmax_scale=0.3, mask=SequenceMask(24), ring=ring, kernel=kernel)
    grads = torch.autograd.grad(out, local, tensors[3][:, held])
    found = [out.detach(), *grads]
    return [relative_error(f, e[:, held]) for f, e in zip(found, expected, strict=True)], [
        t.dtype for t in found
    ]


@pytest.mark.parametrize("num_ranks", [1, 2, 3, 4])
@pytest.mark.parametrize("kernel_name", ["auto", "reference"])
def test_float64_is_exact_on_any_number_of_ranks(num_ranks, kernel_name):
    for errors, _ in run_ranks(errors_on_this_rank, num_ranks, torch.float64, kernel_name):
        assert max(errors) < 1e-12


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32])
def test_results_and_gradients_keep_the_dtype_of_the_inputs(dtype):
    for errors, dtypes in run_ranks(errors_on_this_rank, 3, dtype, "auto"):
        assert dtypes == [dtype] * 4
        assert max(errors) < 8 * torch.finfo(dtype).eps


def test_bf16_error_does_not_grow_with_the_ring():
    alone = max(run_ranks(errors_on_this_rank, 1, torch.bfloat16, "auto")[0][0])
    for num_ranks in (2, 4):
        for errors, _ in run_ranks(errors_on_this_rank, num_ranks, torch.bfloat16, "auto"):
            assert max(errors) <= 2 * alone


@pytest.mark.parametrize("frozen", [(), (0,), (1, 2)])
def test_numerical_gradients_agree_whichever_inputs_need_them(frozen):
    ring = ProcessGroupRing(None)
    tensors = [tensor[:1, :6] for tensor in whole_tensors(torch.float64)[:3]]
    leaves = [tensor.clone().requires_grad_(index not in frozen) for index, tensor in enumerate(tensors)]

    def attention(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        mask = SequenceMask(6, window=4)
        return zigzag_ring_attention(
            q, k, v, softmax_scale=0.3, mask=mask, ring=ring, kernel=ReferenceKernel()
        )

    assert torch.autograd.gradcheck(attention, leaves)


def traffic_of_one_step(dtype: torch.dtype) -> tuple[int, int, list]:
    tensors = whole_tensors(dtype)
    ring = ProcessGroupRing(dist.group.WORLD)
    held = zigzag_positions(24, num_ranks=ring.size, rank=ring.rank)
    local = [tensor[:, held].requires_grad_() for tensor in tensors[:3]]
    kernel = select_kernel(device=torch.device("cpu"), dtype=dtype, head_dim=8)
    with spy_on_traffic() as forward:
        out = zigzag_ring_attention(
            *local, softmax_scale=0.3, mask=SequenceMask(24), ring=ring, kernel=kernel
        )
    with spy_on_traffic() as backward:
        out.backward(tensors[3][:, held])
    return forward.bytes_sent, backward.bytes_sent, forward.sends + backward.sends


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("num_ranks", [2, 3, 4])
def test_bytes_sent_are_those_of_the_docstring_with_kv_heads_only(num_ranks, dtype):
    local_kv_numel = 2 * (2 * (24 // num_ranks) * 2 * 8)  # k and v: B * S * H_kv * D
    kv_bytes = local_kv_numel * dtype.itemsize
    for rank, (forward, backward, sends) in enumerate(run_ranks(traffic_of_one_step, num_ranks, dtype)):
        assert forward == (num_ranks - 1) * kv_bytes
        assert backward == (num_ranks - 1) * kv_bytes + num_ranks * local_kv_numel * 4
        assert {peer for peer, _, _ in sends} == {(rank + 1) % num_ranks}
        assert all(shape[2] == 2 for _, shape, _ in sends)


def large_rotation() -> bool:
    """Blocks of 8 MiB, so that nothing can hide in a socket buffer."""
    ring = ProcessGroupRing(dist.group.WORLD)
    sent = [torch.full((2**21,), float(ring.rank + 10 * index)) for index in range(2)]
    first, second = ring.start(sent).wait()
    previous = (ring.rank - 1) % ring.size
    return bool((first == previous).all()) and bool((second == previous + 10).all())


@pytest.mark.parametrize("num_ranks", [2, 3, 4])
def test_large_blocks_rotate_without_deadlock(num_ranks):
    assert run_ranks(large_rotation, num_ranks) == [True] * num_ranks


def test_a_kernel_is_never_given_an_empty_block():
    seen = []

    class Watching(ReferenceKernel):
        def forward(self, q, k, v, *, softmax_scale, mask):
            seen.append(mask.kind)
            return super().forward(q, k, v, softmax_scale=softmax_scale, mask=mask)

    class Silence:
        """A ring of four whose visitors never change; only which blocks are computed is looked at."""

        rank, size = 2, 4

        def start(self, tensors):
            return self

        def wait(self):
            return self.tensors

    ring = Silence()
    tensors = [tensor[:, :6] for tensor in whole_tensors(torch.float32)[:3]]
    ring.tensors = tensors[1:]
    zigzag_ring_attention(
        *tensors, softmax_scale=0.3, mask=SequenceMask(24, window=2), ring=ring, kernel=Watching()
    )
    assert "empty" not in seen and len(seen) < 4
