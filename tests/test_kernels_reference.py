"""The reference kernel against autograd through plain softmax attention in float64."""

from __future__ import annotations

import pytest
import torch
from plain_attention import causal, plain_attention
from spies import LargestTensor
from torch import Tensor
from torch.profiler import ProfilerActivity, profile

from easy_context.kernels.reference import ReferenceKernel
from easy_context.kernels.torch_native import CpuFlashKernel
from easy_context.masks import CAUSAL, FULL, BlockMask, block_mask, first_visible_index

SCALE = 0.3
KERNEL = ReferenceKernel()


def inputs(
    num_queries: int, num_keys: int, *, heads: tuple[int, int] = (4, 2), head_dim: int = 8, batch: int = 3
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Random ``dout``, ``q``, ``k``, ``v`` in float64."""
    num_heads, num_kv_heads = heads
    queries, keys = (batch, num_queries, num_heads, head_dim), (batch, num_keys, num_kv_heads, head_dim)
    dout, q, k, v = (torch.randn(shape, dtype=torch.float64) for shape in (queries, queries, keys, keys))
    return dout, q, k, v


def interval(q_index: Tensor, k_index: Tensor, *, window: int | None = None, documents: Tensor | None = None):
    """The mask of a block under a window and documents, and the same as an explicit (1 or B, Sq, Sk) bool."""
    first = first_visible_index(q_index, window=window, documents=documents)
    mask = block_mask(q_index, k_index, first)
    seen = k_index <= q_index[None, :, None]
    return mask, seen if first is None else seen & (first[..., None] <= k_index)


def assert_equals_autograd(mask: BlockMask, visible: Tensor | None, dout: Tensor, *qkv: Tensor) -> None:
    q, k, v = (t.detach().clone().requires_grad_() for t in qkv)
    out, lse = plain_attention(q, k, v, softmax_scale=SCALE, visible=visible)
    expected = torch.autograd.grad(out, (q, k, v), dout)
    part = KERNEL.forward(*qkv, softmax_scale=SCALE, mask=mask)
    grads = KERNEL.backward(dout, *qkv, part.out, part.lse, softmax_scale=SCALE, mask=mask)
    torch.testing.assert_close(part.out, out.detach(), rtol=1e-12, atol=1e-12)
    torch.testing.assert_close(part.lse, lse.detach(), rtol=1e-12, atol=1e-12)
    assert part.lse.is_contiguous()
    for grad, wanted, tensor in zip(grads, expected, qkv, strict=True):
        assert grad.shape == tensor.shape
        assert (grad - wanted).abs().max() < 1e-12 * wanted.abs().max().clamp_min(1)


@pytest.mark.parametrize("head_dim", [8, 80, 96])
@pytest.mark.parametrize("heads", [(4, 4), (4, 2), (6, 1)])
@pytest.mark.parametrize("kind", ["full", "causal"])
def test_output_and_gradients_equal_those_of_plain_attention(kind, heads, head_dim):
    num_tokens = 70  # more than one tile of queries
    visible = causal(num_tokens) if kind == "causal" else None
    assert_equals_autograd(
        CAUSAL if kind == "causal" else FULL,
        visible,
        *inputs(num_tokens, num_tokens, heads=heads, head_dim=head_dim),
    )


@pytest.mark.parametrize(("num_queries", "num_keys"), [(4, 8), (8, 4), (1, 5), (130, 1)])
def test_queries_and_keys_may_differ_in_number(num_queries, num_keys):
    assert_equals_autograd(FULL, None, *inputs(num_queries, num_keys))


@pytest.mark.parametrize("window", [1, 2, 3, 5, 64, 65])
def test_a_window_is_seen_as_an_explicit_mask_sees_it(window):
    index = torch.arange(70)
    mask, visible = interval(index, index, window=window)
    assert mask.kind == "interval"
    assert_equals_autograd(mask, visible, *inputs(70, 70))


def test_documents_that_differ_from_row_to_row_do_not_see_each_other():
    index = torch.arange(70)
    documents = torch.stack([torch.zeros_like(index), (index >= 30) * 30, index // 7 * 7])
    mask, visible = interval(index, index, window=11, documents=documents)
    assert mask.kind == "interval" and visible.shape == (3, 70, 70)
    assert_equals_autograd(mask, visible, *inputs(70, 70))


def test_blocks_that_are_not_adjacent_are_aligned_by_sequence_index():
    """Later queries of a zigzag rank against the keys of another: alignment by corners would be wrong."""
    mask, visible = interval(torch.tensor([0, 1, 6, 7]), torch.tensor([2, 3, 4, 5, 6]))
    assert mask.kind == "interval" and visible[0].sum(-1).tolist() == [0, 0, 5, 5]
    assert_equals_autograd(mask, visible, *inputs(4, 5))


def test_a_query_that_sees_no_key_gets_zero_and_minus_infinity_and_no_gradient():
    mask, _ = interval(torch.tensor([0, 1, 6, 7]), torch.tensor([2, 3, 4, 5]), window=3)
    dout, q, k, v = inputs(4, 4)
    part = KERNEL.forward(q, k, v, softmax_scale=SCALE, mask=mask)
    blind = part.lse[0, 0] == -torch.inf
    assert blind.tolist() == [True, True, False, False]
    assert part.out[:, blind].eq(0).all() and part.out[:, ~blind].ne(0).all()
    grads = KERNEL.backward(dout, q, k, v, part.out, part.lse, softmax_scale=SCALE, mask=mask)
    assert grads.dq[:, blind].eq(0).all()
    assert all(grad.isfinite().all() for grad in grads)


def test_blocks_share_the_gradients_of_the_whole():
    """Given out and lse over all keys, dq of the blocks adds up, and dk and dv are those of their keys."""
    dout, q, k, v = inputs(20, 30)
    out, lse = KERNEL.forward(q, k, v, softmax_scale=SCALE, mask=FULL)
    whole = KERNEL.backward(dout, q, k, v, out, lse, softmax_scale=SCALE, mask=FULL)
    parts = [
        KERNEL.backward(dout, q, k[:, keys], v[:, keys], out, lse, softmax_scale=SCALE, mask=FULL)
        for keys in (slice(0, 11), slice(11, 30))
    ]
    torch.testing.assert_close(parts[0].dq + parts[1].dq, whole.dq)
    torch.testing.assert_close(torch.cat([part.dk for part in parts], dim=1), whole.dk)
    torch.testing.assert_close(torch.cat([part.dv for part in parts], dim=1), whole.dv)


def test_inputs_need_not_be_contiguous():
    dout, q, k, v = inputs(9, 9)
    assert_equals_autograd(CAUSAL, causal(9), dout, *(t.mT.contiguous().mT for t in (q, k, v)))
    assert_equals_autograd(FULL, None, dout, *(t.repeat(1, 2, 1, 1)[:, ::2] for t in (q, k, v)))


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32, torch.float64])
def test_results_have_the_dtype_of_their_tensors(dtype):
    dout, q, k, v = (t.to(dtype) for t in inputs(9, 9))
    part = KERNEL.forward(q, k, v, softmax_scale=SCALE, mask=CAUSAL)
    grads = KERNEL.backward(dout, q, k, v, part.out, part.lse, softmax_scale=SCALE, mask=CAUSAL)
    assert (part.out.dtype, part.lse.dtype) == (dtype, torch.promote_types(dtype, torch.float32))
    assert {grad.dtype for grad in grads} == {dtype}


def test_half_inputs_are_computed_in_float32():
    _, q, k, v = (t.bfloat16() for t in inputs(40, 40))
    half = KERNEL.forward(q, k, v, softmax_scale=SCALE, mask=FULL)
    exact = KERNEL.forward(q.double(), k.double(), v.double(), softmax_scale=SCALE, mask=FULL)
    torch.testing.assert_close(half.lse.double(), exact.lse, rtol=1e-6, atol=1e-6)
    torch.testing.assert_close(half.out, exact.out.bfloat16(), rtol=1e-2, atol=1e-4)


def test_autocast_does_not_lower_the_precision():
    dout, q, k, v = (t.float() for t in inputs(40, 40))
    plain = KERNEL.forward(q, k, v, softmax_scale=SCALE, mask=CAUSAL)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        part = KERNEL.forward(q, k, v, softmax_scale=SCALE, mask=CAUSAL)
        grads = KERNEL.backward(dout, q, k, v, *part, softmax_scale=SCALE, mask=CAUSAL)
    assert torch.equal(part.out, plain.out)
    expected = KERNEL.backward(dout, q, k, v, *plain, softmax_scale=SCALE, mask=CAUSAL)
    assert all(torch.equal(grad, wanted) for grad, wanted in zip(grads, expected, strict=True))


@pytest.mark.parametrize(
    ("kernel", "mask"),
    [(ReferenceKernel(), CAUSAL), (CpuFlashKernel(), CAUSAL), (CpuFlashKernel(), FULL)],
    ids=["reference-causal", "cpu_flash-causal", "cpu_flash-full"],
)
def test_nothing_of_queries_times_keys_is_ever_allocated(kernel, mask):
    """Neither as a result of an operation, nor inside one (the profiler sees the allocator)."""
    num_tokens = 8192
    dout, q, k, v = (t.float() for t in inputs(num_tokens, num_tokens, heads=(1, 1), batch=1))
    with (
        LargestTensor() as largest,
        profile(activities=[ProfilerActivity.CPU], profile_memory=True, acc_events=True) as profiled,
    ):
        part = kernel.forward(q, k, v, softmax_scale=SCALE, mask=mask)
        kernel.backward(dout, q, k, v, *part, softmax_scale=SCALE, mask=mask)
    allocations = [event.cpu_memory_usage for event in profiled.events() if event.name == "[memory]"]
    assert allocations, "the profiler saw no allocation"
    assert 0 < largest.numel < num_tokens**2 / 8, largest.operation
    assert max(allocations) < num_tokens**2 / 2  # bytes
