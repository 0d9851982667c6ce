"""Merging attention over two sets of keys."""

from __future__ import annotations

import math

import pytest
import torch
from plain_attention import plain_attention
from torch import Tensor

from easy_context.kernels.merge import merge_partials


def partial(lse: float, seed: int) -> tuple[Tensor, Tensor]:
    """Attention of (B=1, S=3, H=2, D=4) over keys of that total mass."""
    out = torch.randn(1, 3, 2, 4, generator=torch.Generator().manual_seed(seed))
    return (torch.zeros_like(out) if lse == -math.inf else out), torch.full((1, 2, 3), lse)


@pytest.mark.parametrize("seed", range(5))
def test_merging_any_split_of_the_keys_equals_whole_attention(seed):
    generator = torch.Generator().manual_seed(seed)
    q, k, v = (torch.randn(2, length, 2, 8, generator=generator) * 3 for length in (5, 40, 40))
    cuts = torch.randperm(39, generator=generator)[:6].add(1).sort().values.tolist()
    out, lse = torch.zeros(2, 5, 2, 8), torch.full((2, 2, 5), -math.inf)
    for start, stop in zip([0, *cuts], [*cuts, 40], strict=True):
        block_out, block_lse = plain_attention(q, k[:, start:stop], v[:, start:stop], softmax_scale=1.0)
        out, lse = merge_partials(out, lse, block_out, block_lse)
    whole_out, whole_lse = plain_attention(q.double(), k.double(), v.double(), softmax_scale=1.0)
    torch.testing.assert_close(out, whole_out.float(), rtol=1e-5, atol=1e-5)
    torch.testing.assert_close(lse, whole_lse.float(), rtol=1e-6, atol=1e-6)


@pytest.mark.parametrize(("heavy", "light"), [(1e4, -1e4), (3e38, 0.0), (200.0, 50.0)])
def test_a_block_of_vanishing_mass_changes_nothing_on_either_side(heavy, light):
    first, second = partial(heavy, 0), partial(light, 1)
    for merged in (merge_partials(*first, *second), merge_partials(*second, *first)):
        assert torch.equal(merged.out, first[0])
        assert torch.equal(merged.lse, first[1])


@pytest.mark.parametrize("lse", [-90.0, 0.0, 1e4])
def test_a_side_that_has_seen_no_key_leaves_the_other_exact(lse):
    unseen, seen = partial(-math.inf, 0), partial(lse, 1)
    for merged in (merge_partials(*unseen, *seen), merge_partials(*seen, *unseen)):
        assert torch.equal(merged.out, seen[0])
        assert torch.equal(merged.lse, seen[1])


def test_two_sides_without_keys_stay_without_keys():
    merged = merge_partials(*partial(-math.inf, 0), *partial(-math.inf, 1))
    assert merged.out.eq(0).all()
    assert merged.lse.eq(-math.inf).all()


def test_each_query_is_merged_by_its_own_mass():
    """One query of a block sees keys, its neighbour sees none: no weight leaks from one to the other."""
    out, lse = partial(0.0, 0)
    block_out, block_lse = partial(0.0, 1)
    block_out[:, 1], block_lse[:, :, 1] = 0.0, -math.inf
    merged = merge_partials(out, lse, block_out, block_lse)
    assert torch.equal(merged.out[:, 1], out[:, 1])
    torch.testing.assert_close(merged.out[:, 0], (out[:, 0] + block_out[:, 0]) / 2)
    torch.testing.assert_close(merged.lse[:, :, 0], torch.full((1, 2), math.log(2.0)))


@pytest.mark.parametrize("block_dtype", [torch.float16, torch.bfloat16])
def test_half_blocks_are_accumulated_in_float32(block_dtype):
    out, lse = partial(0.0, 0)
    block_out, block_lse = partial(0.0, 1)
    merged = merge_partials(out, lse, block_out.to(block_dtype), block_lse)
    assert merged.out.dtype == merged.lse.dtype == torch.float32
    torch.testing.assert_close(merged.out, (out + block_out.to(block_dtype).float()) / 2)


def test_float64_stays_exact():
    q, k, v = (torch.randn(1, 6, 2, 8, dtype=torch.float64) for _ in range(3))
    parts = [
        plain_attention(q, k[:, keys], v[:, keys], softmax_scale=1.0) for keys in (slice(2), slice(2, 6))
    ]
    merged = merge_partials(*parts[0], *parts[1])
    out, lse = plain_attention(q, k, v, softmax_scale=1.0)
    torch.testing.assert_close(merged.out, out, rtol=1e-13, atol=1e-13)
    torch.testing.assert_close(merged.lse, lse, rtol=1e-13, atol=1e-13)


def test_what_is_merged_into_is_left_as_it_was():
    """Callers pass slices of their accumulators."""
    arguments = (*partial(0.0, 0), *partial(1.0, 1))
    before = [argument.clone() for argument in arguments]
    merge_partials(*arguments)
    assert all(torch.equal(argument, old) for argument, old in zip(arguments, before, strict=True))
