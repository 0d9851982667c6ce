"""Torch's CPU operator against the reference kernel; of the CUDA ones, what can be seen without a GPU."""

from __future__ import annotations

import pytest
import torch
from plain_attention import causal, plain_attention
from torch import Tensor

from easy_context.kernels.reference import ReferenceKernel
from easy_context.kernels.torch_native import CpuFlashKernel, CudnnKernel, TorchFlashKernel
from easy_context.masks import CAUSAL, FULL

SCALE = 0.2
KERNEL, REFERENCE = CpuFlashKernel(), ReferenceKernel()


def inputs(
    num_queries: int, num_keys: int, *, heads: tuple[int, int] = (4, 2), head_dim: int = 16, batch: int = 3
) -> list[Tensor]:
    """Random ``dout``, ``q``, ``k``, ``v`` in float32."""
    queries, keys = (batch, num_queries, heads[0], head_dim), (batch, num_keys, heads[1], head_dim)
    return [torch.randn(shape) * 0.7 for shape in (queries, queries, keys, keys)]


def assert_equals_reference(mask, dout: Tensor, q: Tensor, k: Tensor, v: Tensor, tolerance: float) -> None:
    part = KERNEL.forward(q, k, v, softmax_scale=SCALE, mask=mask)
    expected = REFERENCE.forward(q, k, v, softmax_scale=SCALE, mask=mask)
    torch.testing.assert_close(part.out, expected.out, rtol=tolerance, atol=tolerance)
    torch.testing.assert_close(part.lse, expected.lse, rtol=tolerance, atol=tolerance)
    assert part.lse.is_contiguous()
    grads = KERNEL.backward(dout, q, k, v, *expected, softmax_scale=SCALE, mask=mask)
    wanted = REFERENCE.backward(dout, q, k, v, *expected, softmax_scale=SCALE, mask=mask)
    for grad, want in zip(grads, wanted, strict=True):
        torch.testing.assert_close(grad, want, rtol=tolerance, atol=tolerance)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize("heads", [(4, 4), (8, 2), (6, 1)])
@pytest.mark.parametrize("head_dim", [8, 80, 96])
@pytest.mark.parametrize("mask", [CAUSAL, FULL], ids=["causal", "full"])
def test_cpu_flash_equals_the_reference(mask, head_dim, heads, dtype):
    tensors = [t.to(dtype) for t in inputs(70, 70, heads=heads, head_dim=head_dim)]
    assert_equals_reference(mask, *tensors, tolerance=1e-5 if dtype == torch.float32 else 1e-12)


@pytest.mark.parametrize(("num_queries", "num_keys"), [(4, 8), (8, 4), (1, 70), (70, 1)])
def test_cpu_flash_takes_blocks_that_are_not_square(num_queries, num_keys):
    assert_equals_reference(FULL, *inputs(num_queries, num_keys), tolerance=1e-5)


def test_cpu_flash_takes_inputs_that_are_not_contiguous():
    tensors = inputs(9, 9)
    assert_equals_reference(CAUSAL, *(t.mT.contiguous().mT for t in tensors), tolerance=1e-5)
    assert_equals_reference(CAUSAL, *(t.repeat(1, 2, 1, 1)[:, ::2] for t in tensors), tolerance=1e-5)
    # The gradient of a sum is one number seen everywhere.
    dout, *qkv = tensors
    assert_equals_reference(CAUSAL, torch.ones(1, 1, 1, 1).expand_as(dout), *qkv, tolerance=1e-5)


@pytest.mark.parametrize("heads", [(4, 4), (8, 2)])
def test_cpu_flash_gives_a_blocks_share_from_out_and_lse_over_all_keys(heads):
    """Also when these are slices of accumulators, as in the ring."""
    dout, q, k, v = inputs(40, 60, heads=heads)
    out, lse = plain_attention(q, k, v, softmax_scale=SCALE)
    rows, keys = slice(20, 40), slice(10, 35)
    block = (dout[:, rows], q[:, rows], k[:, keys], v[:, keys], out[:, rows], lse[:, :, rows])
    assert not block[-1].is_contiguous()
    grads = KERNEL.backward(*block, softmax_scale=SCALE, mask=FULL)
    wanted = REFERENCE.backward(*block, softmax_scale=SCALE, mask=FULL)
    for grad, want in zip(grads, wanted, strict=True):
        torch.testing.assert_close(grad, want, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("mask", [CAUSAL, FULL], ids=["causal", "full"])
@pytest.mark.parametrize("heads", [(4, 4), (8, 1)])
def test_cpu_flash_in_half_precision_errs_at_most_twice_as_much_as_plain_torch(heads, mask, dtype):
    dout, q, k, v = (t.to(dtype) for t in inputs(128, 128, heads=heads, head_dim=32))
    visible = causal(128) if mask is CAUSAL else None

    exact_inputs = [t.double().requires_grad_() for t in (q, k, v)]
    exact, _ = plain_attention(*exact_inputs, softmax_scale=SCALE, visible=visible)
    exact_grads = torch.autograd.grad(exact, exact_inputs, dout.double())
    plain_inputs = [t.clone().requires_grad_() for t in (q, k, v)]
    plain, _ = plain_attention(*plain_inputs, softmax_scale=SCALE, visible=visible)
    plain_grads = torch.autograd.grad(plain, plain_inputs, dout)

    part = KERNEL.forward(q, k, v, softmax_scale=SCALE, mask=mask)
    grads = KERNEL.backward(dout, q, k, v, *part, softmax_scale=SCALE, mask=mask)
    compared = zip((part.out, *grads), (plain, *plain_grads), (exact, *exact_grads), strict=True)
    for name, (ours, plains, exacts) in zip(("out", "dq", "dk", "dv"), compared, strict=True):
        assert (ours - exacts).abs().max() <= 2 * (plains - exacts).abs().max(), name


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32, torch.float64])
def test_cpu_flash_gives_each_gradient_the_dtype_of_its_tensor(dtype):
    dout, q, k, v = (t.to(dtype) for t in inputs(9, 9))
    part = KERNEL.forward(q, k, v, softmax_scale=SCALE, mask=CAUSAL)
    grads = KERNEL.backward(dout, q, k, v, *part, softmax_scale=SCALE, mask=CAUSAL)
    assert (part.out.dtype, part.lse.dtype) == (dtype, torch.promote_types(dtype, torch.float32))
    assert {grad.dtype for grad in grads} == {dtype}


@pytest.mark.parametrize(
    ("operator", "arguments"),
    [
        ("_flash_attention_forward", "query key value cum_seq_q cum_seq_k max_q max_k dropout_p is_causal"),
        (
            "_flash_attention_backward",
            "grad_out query key value out logsumexp cum_seq_q cum_seq_k max_q max_k dropout_p is_causal "
            "rng_state unused",
        ),
        (
            "_scaled_dot_product_cudnn_attention",
            "query key value attn_bias compute_log_sumexp dropout_p is_causal",
        ),
        (
            "_scaled_dot_product_cudnn_attention_backward",
            "grad_out query key value out logsumexp philox_seed philox_offset attn_bias cum_seq_q cum_seq_k "
            "max_q max_k dropout_p is_causal",
        ),
    ],
)
def test_torchs_cuda_operators_take_the_arguments_that_are_passed_by_position(operator, arguments):
    schema = getattr(torch.ops.aten, operator).default._schema
    names = [argument.name for argument in schema.arguments]
    assert names[: len(arguments.split())] == arguments.split()
    assert "scale" in names


@pytest.mark.parametrize("kernel_class", [TorchFlashKernel, CudnnKernel])
def test_cuda_operators_are_called_with_arguments_that_their_schema_accepts(kernel_class, monkeypatch):
    """On CPU tensors the call gets as far as the dispatcher, which knows no such kernel for this device."""
    dout, q, k, v = (t.bfloat16() for t in inputs(8, 8))
    monkeypatch.setattr("easy_context.kernels.torch_native._cudnn_lse_dims", lambda device: 4)
    with pytest.raises(
        NotImplementedError, match=r"Could not run 'aten::.*attention.*' .* the 'CPU' backend"
    ):
        kernel_class().forward(q, k, v, softmax_scale=SCALE, mask=CAUSAL)
    part = REFERENCE.forward(q, k, v, softmax_scale=SCALE, mask=CAUSAL)
    with pytest.raises(NotImplementedError, match=r"Could not run 'aten::.*backward' .* the 'CPU' backend"):
        kernel_class().backward(dout, q, k, v, *part, softmax_scale=SCALE, mask=CAUSAL)


@pytest.mark.parametrize(("num_queries", "num_keys"), [(1, 4), (4, 1), (1, 1)])
def test_cudnn_leaves_single_tokens_to_the_reference(num_queries, num_keys):
    dout, q, k, v = (t.bfloat16() for t in inputs(num_queries, num_keys))
    part = CudnnKernel().forward(q, k, v, softmax_scale=SCALE, mask=FULL)
    assert torch.equal(part.out, REFERENCE.forward(q, k, v, softmax_scale=SCALE, mask=FULL).out)
    grads = CudnnKernel().backward(dout, q, k, v, *part, softmax_scale=SCALE, mask=FULL)
    wanted = REFERENCE.backward(dout, q, k, v, *part, softmax_scale=SCALE, mask=FULL)
    assert all(torch.equal(grad, want) for grad, want in zip(grads, wanted, strict=True))
