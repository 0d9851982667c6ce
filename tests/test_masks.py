"""What a query may see: classification of block pairs against the rule written out, key by key."""

from __future__ import annotations

import random

import pytest
import torch
from torch import Tensor

from easy_context.masks import (
    CAUSAL,
    EMPTY,
    FULL,
    SequenceMask,
    block_mask,
    document_starts,
    first_visible_index,
)


def seen(mask, num_queries: int, num_keys: int) -> Tensor:
    return mask.visible(0, num_queries, num_keys=num_keys, device=torch.device("cpu"))


class TestDocumentStarts:
    def test_one_document_per_row_is_none(self):
        assert document_starts(torch.arange(8).repeat(2, 1)) is None

    def test_positions_that_do_not_start_at_zero_are_one_document(self):
        assert document_starts(torch.arange(100, 108)[None]) is None

    def test_a_forward_skip_stays_in_the_document(self):
        assert document_starts(torch.tensor([[0, 1, 2, 900, 901, 1000]])) is None

    def test_a_document_starts_where_positions_do_not_increase(self):
        position_ids = torch.tensor([[0, 1, 2, 0, 1, 0], [0, 1, 2, 3, 4, 5], [5, 5, 6, 2, 9, 10]])
        assert document_starts(position_ids).tolist() == [
            [0, 0, 0, 3, 3, 5],
            [0, 0, 0, 0, 0, 0],
            [0, 1, 1, 3, 3, 3],
        ]


class TestFirstVisibleIndex:
    @pytest.mark.parametrize("window", [1, 2, 3, 5])
    def test_a_window_counts_the_query_itself(self, window):
        index = torch.arange(9)
        first = first_visible_index(index, window=window, documents=None)
        assert (index - first[0] + 1).tolist() == [min(i + 1, window) for i in range(9)]

    def test_it_is_none_when_every_query_sees_the_first_token(self):
        assert first_visible_index(torch.arange(9), window=None, documents=None) is None
        assert first_visible_index(torch.arange(9), window=9, documents=None) is None
        assert first_visible_index(torch.arange(9), window=8, documents=None) is not None

    def test_a_window_ends_at_the_document(self):
        documents = torch.tensor([[0, 0, 0, 3, 3, 3], [0, 0, 0, 0, 0, 5]])
        first = first_visible_index(torch.arange(6), window=3, documents=documents)
        assert first.tolist() == [[0, 0, 0, 3, 3, 3], [0, 0, 0, 1, 2, 5]]


class TestBlockMask:
    def test_later_queries_see_all_of_earlier_keys(self):
        assert block_mask(torch.arange(4, 8), torch.arange(4), None) is FULL
        assert block_mask(torch.tensor([3]), torch.arange(4), None) is FULL  # its own key is the last

    def test_earlier_queries_see_none_of_later_keys(self):
        assert block_mask(torch.arange(4), torch.arange(4, 8), None) is EMPTY

    def test_a_block_of_its_own_keys_is_causal_also_when_it_has_a_gap(self):
        index = torch.tensor([0, 1, 6, 7])
        mask = block_mask(index, index, None)
        assert mask is CAUSAL
        assert torch.equal(seen(mask, 4, 4)[0], index[None] <= index[:, None])

    def test_a_block_with_all_keys_before_a_window_is_empty(self):
        index = torch.arange(8, 12)
        first = first_visible_index(index, window=3, documents=None)
        assert block_mask(index, torch.arange(0, 6), first) is EMPTY
        assert block_mask(index, torch.arange(0, 7), first).kind == "interval"

    def test_a_window_wider_than_the_distance_changes_nothing(self):
        index = torch.arange(8, 12)
        assert (
            block_mask(index, torch.arange(8), first_visible_index(index, window=12, documents=None)) is FULL
        )

    def test_one_row_with_two_documents_is_enough_for_an_interval(self):
        index = torch.arange(4)
        mask = block_mask(index, index, torch.tensor([[0, 0, 0, 0], [0, 0, 2, 2]]))
        assert mask.kind == "interval"
        rows = seen(mask, 4, 4)
        assert torch.equal(rows[0], torch.ones(4, 4, dtype=torch.bool).tril())
        assert rows[1].int().tolist() == [[1, 0, 0, 0], [1, 1, 0, 0], [0, 0, 1, 0], [0, 0, 1, 1]]

    @pytest.mark.parametrize("seed", range(40))
    def test_every_mask_says_what_the_rule_says(self, seed):
        """Random blocks of a sequence of 12, random windows and documents, against three nested loops."""
        draw = random.Random(seed)
        q_index, k_index = (sorted(draw.sample(range(12), draw.randint(1, 12))) for _ in range(2))
        if seed % 3 == 0:
            k_index = q_index
        window = draw.choice([None, 1, 2, 5, 12])
        starts = [sorted({0, *draw.sample(range(12), draw.randint(0, 3))}) for _ in range(2)]
        documents = torch.tensor([[max(s for s in row if s <= i) for i in q_index] for row in starts])
        first = first_visible_index(
            torch.tensor(q_index), window=window, documents=documents if seed % 2 else None
        )
        mask = block_mask(torch.tensor(q_index), torch.tensor(k_index), first)
        got = seen(mask, len(q_index), len(k_index)).expand(2, -1, -1)
        for row in range(2):
            for i, query in enumerate(q_index):
                for j, key in enumerate(k_index):
                    wanted = key <= query
                    wanted &= window is None or query - key < window
                    wanted &= not seed % 2 or key >= documents[row, i]
                    assert got[row, i, j] == wanted, (row, query, key)


class TestVisible:
    @pytest.mark.parametrize("num_queries", [1, 3, 7])
    def test_tiles_are_rows_of_the_whole(self, num_queries):
        index = torch.arange(7)
        interval = block_mask(index, index, first_visible_index(index, window=3, documents=None))
        for mask in (FULL, EMPTY, CAUSAL, interval):
            tiles = [
                mask.visible(start, min(start + num_queries, 7), num_keys=7, device=torch.device("cpu"))
                for start in range(0, 7, num_queries)
            ]
            assert torch.equal(torch.cat(tiles, dim=1), seen(mask, 7, 7))

    def test_full_and_empty_mean_what_they_say(self):
        assert seen(FULL, 2, 5).all() and seen(FULL, 2, 5).shape == (1, 2, 5)
        assert not seen(EMPTY, 2, 5).any()


class TestSequenceMask:
    def test_plain_causality_is_recognized(self):
        assert SequenceMask(8).is_plain_causal
        assert SequenceMask(8, window=8).is_plain_causal
        assert not SequenceMask(8, window=7).is_plain_causal
        assert not SequenceMask(8, documents=torch.zeros(1, 8, dtype=torch.int64)).is_plain_causal

    def test_a_block_takes_the_documents_of_its_own_queries(self):
        documents = torch.tensor([[0, 0, 2, 2, 2, 5, 5, 5]])
        mask = SequenceMask(8, window=2, documents=documents).block(torch.tensor([2, 6, 7]), torch.arange(8))
        assert mask.first_visible.tolist() == [[2, 5, 6]]
