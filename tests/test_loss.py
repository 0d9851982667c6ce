"""The loss is one number for a batch, however it is spread, and its gradients are exact."""

from __future__ import annotations

import math

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from ranks import run_ranks
from spies import LargestTensor
from torch import nn

from easy_context import sequence_parallel_cross_entropy, sequence_parallel_linear_cross_entropy


def head_and_batch(*, bias=False, vocab=97, dtype=torch.float32):
    generator = torch.Generator().manual_seed(3)
    head = nn.Linear(16, vocab, bias=bias, dtype=dtype)
    with torch.no_grad():
        for parameter in head.parameters():
            parameter.copy_(torch.randn(parameter.shape, generator=generator))
    hidden = torch.randn(2, 24, 16, generator=generator).to(dtype).requires_grad_()
    targets = torch.randint(0, vocab, (2, 24), generator=generator)
    targets[0, :9] = -100
    return head, hidden, targets


def plain_loss(head, hidden, targets):
    return F.cross_entropy(head(hidden).flatten(0, 1), targets.flatten(), ignore_index=-100)


@pytest.mark.parametrize("bias", [False, True])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_linear_cross_entropy_equals_plain_torch_in_loss_and_gradients(bias, dtype):
    head, hidden, targets = head_and_batch(bias=bias, dtype=dtype)
    tensors = [hidden, *head.parameters()]
    expected = plain_loss(head, hidden, targets)
    expected_grads = torch.autograd.grad(expected, tensors)
    loss = sequence_parallel_linear_cross_entropy(hidden, head, targets)
    torch.testing.assert_close(loss.to(dtype), expected)
    for grad, reference in zip(torch.autograd.grad(loss, tensors), expected_grads, strict=True):
        torch.testing.assert_close(grad, reference)


def test_both_losses_agree():
    head, hidden, targets = head_and_batch()
    fused = sequence_parallel_linear_cross_entropy(hidden, head, targets)
    torch.testing.assert_close(fused, sequence_parallel_cross_entropy(head(hidden), targets))


@pytest.mark.parametrize("frozen", ["hidden", "weight"])
def test_a_frozen_side_gets_no_gradient_and_the_other_the_right_one(frozen):
    head, hidden, targets = head_and_batch()
    kept = head.weight if frozen == "hidden" else hidden
    (expected,) = torch.autograd.grad(plain_loss(head, hidden, targets), [kept])
    (hidden if frozen == "hidden" else head.weight).requires_grad_(False)
    sequence_parallel_linear_cross_entropy(hidden, head, targets).backward()
    torch.testing.assert_close(kept.grad, expected)
    assert (hidden if frozen == "hidden" else head.weight).grad is None


def test_evaluation_without_gradients_gives_the_same_loss():
    head, hidden, targets = head_and_batch()
    with torch.no_grad():
        loss = sequence_parallel_linear_cross_entropy(hidden, head, targets)
    torch.testing.assert_close(loss, plain_loss(head, hidden, targets).detach())


@pytest.mark.parametrize("loss_function", ["logits", "linear"])
def test_no_valid_target_gives_zero_and_zero_gradients(loss_function):
    head, hidden, targets = head_and_batch()
    targets.fill_(-100)
    if loss_function == "logits":
        loss = sequence_parallel_cross_entropy(head(hidden), targets)
    else:
        loss = sequence_parallel_linear_cross_entropy(hidden, head, targets)
    loss.backward()
    assert float(loss.detach()) == 0
    assert float(hidden.grad.abs().sum()) == 0 and float(head.weight.grad.abs().sum()) == 0


def test_logits_are_never_whole():
    head, hidden, targets = head_and_batch(vocab=4000)
    with LargestTensor() as largest:
        sequence_parallel_linear_cross_entropy(hidden, head, targets).backward()
    assert largest.numel <= max(4000 * 16, 48 * 4000 // 8), largest.operation


def test_the_head_runs_as_a_module_so_that_hooks_fire():
    head, hidden, targets = head_and_batch()
    seen = []
    head.register_forward_pre_hook(lambda module, args: seen.append(args[0].shape))
    sequence_parallel_linear_cross_entropy(hidden, head, targets)
    assert seen == [(48, 16)]
    assert head(hidden).shape == (2, 24, 97)  # and its own forward is back


def test_a_head_that_is_no_linear_map_is_refused():
    _, hidden, targets = head_and_batch()
    with pytest.raises(ValueError, match="linear lm_head with a weight, got Sequential"):
        sequence_parallel_linear_cross_entropy(hidden, nn.Sequential(), targets)


def test_targets_of_another_shard_are_refused():
    head, hidden, targets = head_and_batch()
    with pytest.raises(ValueError, match="targets of shape \\(2, 24\\), got \\(2, 12\\)"):
        sequence_parallel_linear_cross_entropy(hidden, head, targets[:, ::2])


def loss_of_shard(masked_rank: int | None, num_target_tokens: int | None) -> tuple[float, float]:
    """Mean loss over the ranks, and error of the averaged gradient, when tokens are dealt out in turns."""
    head, hidden, targets = head_and_batch()
    rank, size = dist.get_rank(), dist.get_world_size()
    if masked_rank is not None:
        targets[:, masked_rank::size] = -100
    (expected,) = torch.autograd.grad(plain_loss(head, hidden, targets), [head.weight])
    loss = sequence_parallel_linear_cross_entropy(
        hidden[:, rank::size], head, targets[:, rank::size], num_target_tokens=num_target_tokens
    )
    loss.backward()
    mean, grad = loss.detach().clone(), head.weight.grad.clone()
    dist.all_reduce(mean)
    dist.all_reduce(grad)
    scale = 1 if num_target_tokens is None else num_target_tokens / int((targets != -100).sum())
    return float(mean) / size * scale, float((grad / size * scale - expected).norm() / expected.norm())


@pytest.mark.parametrize("num_ranks", [1, 2, 3, 4])
@pytest.mark.parametrize("masked_rank", [None, 0])
def test_the_loss_does_not_depend_on_the_number_of_ranks(num_ranks, masked_rank):
    if num_ranks == 1 and masked_rank is not None:
        masked_rank = None
    head, hidden, targets = head_and_batch()
    if masked_rank is not None:
        targets[:, masked_rank::num_ranks] = -100
    expected = plain_loss(head, hidden, targets).item()
    for loss, gradient_error in run_ranks(loss_of_shard, num_ranks, masked_rank, None):
        assert loss == pytest.approx(expected, rel=1e-6)
        assert gradient_error < 1e-6


def test_a_given_count_of_targets_sets_the_weight_of_a_micro_batch():
    for loss, gradient_error in run_ranks(loss_of_shard, 2, None, 1000):
        head, hidden, targets = head_and_batch()
        assert loss == pytest.approx(plain_loss(head, hidden, targets).item(), rel=1e-6)
        assert gradient_error < 1e-6


def zero_head_loss() -> float:
    head, hidden, targets = head_and_batch()
    nn.init.zeros_(head.weight)
    rank, size = dist.get_rank(), dist.get_world_size()
    loss = sequence_parallel_linear_cross_entropy(
        hidden[:, rank::size], head, targets[:, rank::size]
    ).detach()
    dist.all_reduce(loss)
    return float(loss) / size


@pytest.mark.parametrize("num_ranks", [1, 2, 4])
def test_a_zero_head_has_the_loss_of_a_uniform_guess(num_ranks):
    for loss in run_ranks(zero_head_loss, num_ranks):
        assert loss == pytest.approx(math.log(97), rel=1e-6)
