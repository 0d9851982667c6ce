"""Every kernel of this GPU: against float32 it errs at most twice as much as plain torch in the same dtype.

Run with ``pytest -m gpu tests/test_kernels_gpu.py``. Kernels that are not installed, or not for this GPU, are
skipped with their reason.
"""

from __future__ import annotations

import math
from typing import NamedTuple

import pytest
import torch
from plain_attention import causal, plain_attention
from torch import Tensor

from easy_context.kernels import available_kernels, merge_partials, select_kernel
from easy_context.kernels.base import AttentionGradients, AttentionPart, Kernel
from easy_context.kernels.packages import KernelNotInstalled
from easy_context.kernels.reference import ReferenceKernel
from easy_context.masks import CAUSAL, FULL, block_mask, first_visible_index

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA GPU here"),
]

GPU = torch.device("cuda", 0)
SHAPES = [(head_dim, heads, torch.bfloat16) for head_dim in (64, 80, 128) for heads in ((32, 8), (8, 1))] + [
    (128, (32, 8), torch.float16)
]


class Results(NamedTuple):
    out: Tensor
    dq: Tensor
    dk: Tensor
    dv: Tensor


@pytest.fixture(params=[name for name in available_kernels() if name != "cpu_flash"])
def kernel(request) -> Kernel:
    try:
        return select_kernel(request.param, device=GPU, dtype=torch.bfloat16, head_dim=128)
    except (KernelNotInstalled, ValueError) as reason:
        pytest.skip(str(reason))


def inputs(
    num_queries: int,
    num_keys: int,
    *,
    heads: tuple[int, int] = (32, 8),
    head_dim: int = 128,
    dtype: torch.dtype = torch.bfloat16,
    batch: int = 2,
) -> list[Tensor]:
    """Random ``dout``, ``q``, ``k``, ``v``."""
    queries, keys = (batch, num_queries, heads[0], head_dim), (batch, num_keys, heads[1], head_dim)
    return [torch.randn(shape, device=GPU).to(dtype) for shape in (queries, queries, keys, keys)]


def scale_of(q: Tensor) -> float:
    return 1 / math.sqrt(q.shape[-1])


def plain_results(dout: Tensor, *qkv: Tensor, visible: Tensor | None) -> Results:
    q, k, v = (t.detach().clone().requires_grad_() for t in qkv)
    out, _ = plain_attention(q, k, v, softmax_scale=scale_of(q), visible=visible)
    return Results(out.detach(), *torch.autograd.grad(out, (q, k, v), dout))


def assert_errs_at_most_twice_as_much_as_plain_torch(
    got: Results, dout: Tensor, *qkv: Tensor, visible: Tensor | None
) -> None:
    exact = plain_results(dout.float(), *(t.float() for t in qkv), visible=visible)
    plain = plain_results(dout, *qkv, visible=visible)
    for name, ours, theirs, right in zip(Results._fields, got, plain, exact, strict=True):
        error, allowed = (ours - right).abs().max().item(), 2 * (theirs - right).abs().max().item() + 1e-5
        assert error <= allowed, f"{name} errs by {error:.3g}, allowed {allowed:.3g}"  # also fails for NaN


@pytest.mark.parametrize(("head_dim", "heads", "dtype"), SHAPES)
def test_causal_attention_and_its_gradients(kernel, head_dim, heads, dtype):
    dout, q, k, v = inputs(500, 500, heads=heads, head_dim=head_dim, dtype=dtype)
    out, lse = kernel.forward(q, k, v, softmax_scale=scale_of(q), mask=CAUSAL)
    grads = kernel.backward(dout, q, k, v, out, lse, softmax_scale=scale_of(q), mask=CAUSAL)
    assert out.dtype == dtype and {grad.dtype for grad in grads} == {dtype}
    assert lse.dtype == torch.float32 and lse.is_contiguous() and lse.shape == (2, heads[0], 500)
    exact_lse = ReferenceKernel().forward(q, k, v, softmax_scale=scale_of(q), mask=CAUSAL).lse
    torch.testing.assert_close(lse, exact_lse, rtol=1e-3, atol=1e-3)
    assert_errs_at_most_twice_as_much_as_plain_torch(
        Results(out, *grads), dout, q, k, v, visible=causal(500, GPU)
    )


@pytest.mark.parametrize(("head_dim", "heads", "dtype"), SHAPES)
def test_blocks_of_other_lengths_merge_into_the_whole_and_share_its_gradients(kernel, head_dim, heads, dtype):
    """As in a ring: every block gets out and lse over all keys, as slices of accumulators."""
    dout, q, k, v = inputs(300, 712, heads=heads, head_dim=head_dim, dtype=dtype)
    blocks = [slice(0, 212), slice(212, 712)]
    parts = [kernel.forward(q, k[:, b], v[:, b], softmax_scale=scale_of(q), mask=FULL) for b in blocks]
    out, lse = merge_partials(parts[0].out.float(), parts[0].lse, *parts[1])
    padded_lse = torch.cat([lse, lse], dim=2)[:, :, :300]
    assert not padded_lse.is_contiguous()
    shares = [
        kernel.backward(
            dout, q, k[:, b], v[:, b], out.to(dtype), padded_lse, softmax_scale=scale_of(q), mask=FULL
        )
        for b in blocks
    ]
    got = Results(
        out,
        shares[0].dq.float() + shares[1].dq.float(),
        torch.cat([share.dk for share in shares], dim=1),
        torch.cat([share.dv for share in shares], dim=1),
    )
    assert_errs_at_most_twice_as_much_as_plain_torch(got, dout, q, k, v, visible=None)


def run(kernel: Kernel, mask, dout: Tensor, *qkv: Tensor) -> tuple[AttentionPart, AttentionGradients]:
    part = kernel.forward(*qkv, softmax_scale=scale_of(qkv[0]), mask=mask)
    return part, kernel.backward(dout, *qkv, *part, softmax_scale=scale_of(qkv[0]), mask=mask)


def assert_same(got, wanted) -> None:
    for ours, theirs in zip((*got[0], *got[1]), (*wanted[0], *wanted[1]), strict=True):
        torch.testing.assert_close(ours, theirs, rtol=2e-2, atol=2e-2)


def test_the_layout_of_a_tensor_does_not_change_the_result(kernel):
    """Heads before tokens, as Hugging Face has them, a gradient that is one number, and all of it twice."""
    dout, *qkv = inputs(256, 256)
    expected = run(kernel, CAUSAL, dout, *qkv)
    heads_first = [t.transpose(1, 2).contiguous().transpose(1, 2) for t in (dout, *qkv)]
    for _ in range(2):
        assert_same(run(kernel, CAUSAL, heads_first[0], *qkv), expected)
        assert_same(run(kernel, CAUSAL, *heads_first), expected)
        assert_same(run(kernel, CAUSAL, dout, *qkv), expected)
    ones = torch.ones((), device=GPU, dtype=torch.bfloat16).expand_as(dout)
    assert_same(run(kernel, CAUSAL, ones, *qkv), run(kernel, CAUSAL, ones.contiguous(), *qkv))


@pytest.mark.parametrize(("num_queries", "num_keys"), [(1, 1), (1, 2), (2, 1), (3, 5), (1, 300), (300, 1)])
def test_blocks_of_very_few_tokens(kernel, num_queries, num_keys):
    """The shortest sequence that a ring takes gives each chunk one token."""
    tensors = inputs(num_queries, num_keys)
    assert_same(run(kernel, FULL, *tensors), run(ReferenceKernel(), FULL, *tensors))
    if num_queries == num_keys:
        assert_same(run(kernel, CAUSAL, *tensors), run(ReferenceKernel(), CAUSAL, *tensors))


def test_windows_and_documents_equal_those_on_the_cpu(kernel):
    index = torch.arange(200)
    mask = block_mask(index, index, first_visible_index(index, window=70, documents=(index // 90 * 90)[None]))
    tensors = inputs(200, 200, heads=(4, 2), head_dim=64)
    on_cpu = run(ReferenceKernel(), mask, *(t.cpu() for t in tensors))
    got = run(kernel, mask, *tensors)
    assert_same([tuple(t.cpu() for t in results) for results in got], on_cpu)


def test_memory_is_linear_in_the_sequence_length(kernel):
    num_tokens = 16384
    tensors = inputs(num_tokens, num_tokens, heads=(2, 1), head_dim=64, batch=1)
    run(kernel, CAUSAL, *tensors)
    torch.cuda.synchronize()
    torch.cuda.reset_peak_memory_stats()
    before = torch.cuda.memory_allocated()
    run(kernel, CAUSAL, *tensors)
    assert torch.cuda.max_memory_allocated() - before < num_tokens**2 / 2  # bytes, a quarter of S x S in bf16


def test_full_precision_is_computed_by_the_reference():
    dout, *qkv = (t.float() for t in inputs(100, 100, heads=(4, 2), head_dim=64))
    kernel = select_kernel(device=GPU, dtype=torch.float32, head_dim=64)
    assert kernel.name == "reference"
    (out, _), grads = run(kernel, CAUSAL, dout, *qkv)
    wanted = plain_results(dout, *qkv, visible=causal(100, GPU))
    for ours, theirs in zip((out, *grads), wanted, strict=True):
        torch.testing.assert_close(ours, theirs, rtol=1e-5, atol=1e-5)
