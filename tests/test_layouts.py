"""Every token is held once, in the places that the algorithms expect."""

from __future__ import annotations

import pytest
import torch

from easy_context.layouts import inverse_order, whole_positions, zigzag_positions


@pytest.mark.parametrize("num_ranks", [1, 2, 3, 8])
def test_zigzag_positions_cover_the_sequence_once(num_ranks):
    held = torch.cat([zigzag_positions(48, num_ranks=num_ranks, rank=rank) for rank in range(num_ranks)])
    assert held.sort().values.tolist() == list(range(48))


@pytest.mark.parametrize("num_ranks", [1, 2, 3, 8])
def test_zigzag_positions_ascend_on_every_rank(num_ranks):
    for rank in range(num_ranks):
        assert bool((zigzag_positions(48, num_ranks=num_ranks, rank=rank).diff() > 0).all())


def test_zigzag_positions_are_the_folded_chunks():
    held = [zigzag_positions(16, num_ranks=4, rank=rank).tolist() for rank in range(4)]
    assert held == [[0, 1, 14, 15], [2, 3, 12, 13], [4, 5, 10, 11], [6, 7, 8, 9]]


def test_zigzag_gives_every_rank_the_same_work():
    work = {int((zigzag_positions(48, num_ranks=4, rank=rank) + 1).sum()) for rank in range(4)}
    assert len(work) == 1


def test_zigzag_positions_name_the_padded_length():
    with pytest.raises(
        ValueError, match="divisible by 2 \\* num_ranks = 4, got 50; pad the batch to 52 tokens"
    ):
        zigzag_positions(50, num_ranks=2, rank=0)


def test_zigzag_positions_refuse_a_sequence_shorter_than_its_chunks():
    with pytest.raises(ValueError, match="got 2; pad the batch to 4 tokens"):
        zigzag_positions(2, num_ranks=2, rank=0)


def test_zigzag_serves_one_token_a_chunk():
    assert zigzag_positions(4, num_ranks=2, rank=0).tolist() == [0, 3]


def test_whole_positions_are_all_positions_on_any_rank():
    assert whole_positions(5, num_ranks=3, rank=2).tolist() == [0, 1, 2, 3, 4]


def test_inverse_order_restores_the_sequence():
    held = torch.cat([zigzag_positions(24, num_ranks=3, rank=rank) for rank in range(3)])
    assert held[inverse_order(held)].tolist() == list(range(24))
