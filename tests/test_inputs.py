"""Batches are cut without losing, doubling or misplacing a token, and put together again."""

from __future__ import annotations

import pytest
import torch
from accelerate import Accelerator
from ranks import run_ranks
from tiny_models import tiny_batch
from torch.utils.data import DataLoader, TensorDataset

from easy_context import (
    available_strategies,
    get_strategy,
    init_sequence_parallel_mesh,
    pad_to_multiple,
    prepare_dataloader,
    prepare_seq_parallel_inputs,
    prepare_zigzag_ring_attn_inputs,
    unshard_sequence,
)
from easy_context.inputs import check_same_batch, sequence_length_multiple

STRATEGIES = available_strategies()


def shards(strategy, batch, num_ranks):
    return [
        prepare_seq_parallel_inputs(strategy, *batch, rank, num_ranks, "cpu") for rank in range(num_ranks)
    ]


def arange_batch(seq_len=8):
    input_ids = torch.arange(seq_len)[None]
    target_ids = torch.cat([input_ids[:, 1:], torch.tensor([[-100]])], dim=1)
    return input_ids, input_ids.clone(), target_ids


def test_zigzag_targets_are_the_next_tokens_of_the_whole_sequence():
    first, second = shards("zigzag_ring_attn", arange_batch(), 2)
    assert first["local_input_ids"].tolist() == [[0, 1, 6, 7]]
    assert first["local_target_ids"].tolist() == [[1, 2, 7, -100]]
    assert second["local_input_ids"].tolist() == [[2, 3, 4, 5]]
    assert second["local_target_ids"].tolist() == [[3, 4, 5, 6]]


@pytest.mark.parametrize("num_ranks", [1, 2, 3, 4])
@pytest.mark.parametrize("strategy", STRATEGIES)
def test_no_target_is_lost_at_a_shard_boundary(strategy, num_ranks):
    batch = arange_batch(24)
    local = shards(strategy, batch, num_ranks)
    counted = sum(int((shard["local_target_ids"] != -100).sum()) for shard in local)
    assert counted == 23 * (1 if get_strategy(strategy).mesh_axes else num_ranks)


@pytest.mark.parametrize("num_ranks", range(1, 9))
@pytest.mark.parametrize("strategy", STRATEGIES)
def test_unsharding_is_the_inverse_of_sharding(strategy, num_ranks):
    batch = tiny_batch(2 * num_ranks * 3)
    local = [shard["local_input_ids"] for shard in shards(strategy, batch, num_ranks)]
    assert torch.equal(unshard_sequence(strategy, torch.cat(local, dim=1), num_ranks), batch[0])
    hidden = torch.cat([ids.T.double()[:, :, None] for ids in local], dim=0).requires_grad_()
    whole = unshard_sequence(strategy, hidden, num_ranks, dim=0)
    assert torch.equal(whole[:, :, 0], batch[0].T.double())
    whole.sum().backward()
    assert float(hidden.grad.sum()) == batch[0].numel()


def test_sharding_accepts_views_that_are_not_contiguous():
    wide = torch.arange(32).view(1, 32)
    strided = wide[:, ::2]
    local = prepare_seq_parallel_inputs("zigzag_ring_attn", strided, strided, strided, 1, 2, "cpu")
    same = prepare_seq_parallel_inputs("zigzag_ring_attn", *(3 * [strided.contiguous()]), 1, 2, "cpu")
    assert torch.equal(local["local_input_ids"], same["local_input_ids"])


def test_targets_may_be_left_out():
    input_ids, position_ids, _ = tiny_batch(8)
    local = prepare_seq_parallel_inputs("zigzag_ring_attn", input_ids, position_ids, None, 0, 2, "cpu")
    assert local["local_target_ids"] is None and local["local_input_ids"].shape == (3, 4)


def test_one_row_of_positions_serves_all_rows():
    input_ids, position_ids, target_ids = tiny_batch(8)
    local = prepare_seq_parallel_inputs(
        "zigzag_ring_attn", input_ids, position_ids[:1], target_ids, 0, 2, "cpu"
    )
    assert local["local_position_ids"].tolist() == [[0, 1, 6, 7]]


def test_the_shorthand_is_the_same_function():
    batch = tiny_batch(8)
    expected = prepare_seq_parallel_inputs("zigzag_ring_attn", *batch, 1, 2, "cpu")
    local = prepare_zigzag_ring_attn_inputs(*batch, 1, 2, "cpu")
    assert all(torch.equal(local[name], expected[name]) for name in expected)


class TestRefusals:
    def test_a_length_that_does_not_divide_names_the_padded_length(self):
        with pytest.raises(
            ValueError, match="divisible by 2 \\* num_ranks = 4, got 15; pad the batch to 16 tokens"
        ):
            prepare_seq_parallel_inputs("zigzag_ring_attn", *tiny_batch(15), 0, 2, "cpu")

    def test_an_unknown_strategy_lists_what_exists(self):
        with pytest.raises(ValueError, match="got 'ring'; choose one of: .*zigzag_ring_attn.*data_parallel"):
            prepare_seq_parallel_inputs("ring", *tiny_batch(8), 0, 2, "cpu")

    def test_missing_positions_are_never_made_up(self):
        input_ids, _, target_ids = tiny_batch(8)
        with pytest.raises(ValueError, match="needs position_ids of the whole sequence, got None"):
            prepare_seq_parallel_inputs("zigzag_ring_attn", input_ids, None, target_ids, 0, 2, "cpu")

    def test_a_rank_outside_the_group_is_named(self):
        with pytest.raises(ValueError, match="rank in 0..1, got 2"):
            prepare_seq_parallel_inputs("zigzag_ring_attn", *tiny_batch(8), 2, 2, "cpu")

    def test_unshifted_row_length_is_named(self):
        input_ids, position_ids, target_ids = tiny_batch(8)
        with pytest.raises(ValueError, match="target_ids shaped like input_ids \\(3, 8\\), got \\(3, 7\\)"):
            prepare_seq_parallel_inputs(
                "zigzag_ring_attn", input_ids, position_ids, target_ids[:, 1:], 0, 2, "cpu"
            )

    def test_sizes_that_are_not_the_mesh_are_named(self):
        mesh = init_sequence_parallel_mesh()
        with pytest.raises(ValueError, match="size of the sequence group, 1, got 2; pass mesh.sp_rank"):
            prepare_seq_parallel_inputs("zigzag_ring_attn", *tiny_batch(8), 0, 2, "cpu", mesh=mesh)

    def test_two_ring_degrees_are_refused(self):
        mesh = init_sequence_parallel_mesh()
        with pytest.raises(ValueError, match="one ring degree for sharding and patch, got 2"):
            prepare_seq_parallel_inputs(
                "zigzag_ring_attn", *tiny_batch(8), 0, 1, "cpu", ring_degree=2, mesh=mesh
            )


def test_padding_goes_on_counting_and_is_not_scored():
    padded = pad_to_multiple(*arange_batch(5), multiple=4, pad_token_id=9)
    assert padded.input_ids.tolist() == [[0, 1, 2, 3, 4, 9, 9, 9]]
    assert padded.position_ids.tolist() == [[0, 1, 2, 3, 4, 5, 6, 7]]
    assert padded.target_ids.tolist() == [[1, 2, 3, 4, -100, -100, -100, -100]]


def test_the_multiple_makes_every_padded_length_acceptable():
    for strategy in STRATEGIES:
        multiple = sequence_length_multiple(strategy, 3)
        padded = pad_to_multiple(*arange_batch(7), multiple=multiple)
        assert len(shards(strategy, padded, 3)) == 3


def draw_batches(strategy: str, shuffle: bool) -> list[list[int]]:
    accelerator = Accelerator(cpu=True)
    torch.manual_seed(100 + accelerator.process_index)  # ranks that were seeded differently
    loader = DataLoader(TensorDataset(torch.arange(8)), batch_size=2, shuffle=shuffle)
    returned = prepare_dataloader(strategy, loader, accelerator)
    used = loader if get_strategy(strategy).mesh_axes else returned
    return [batch[0].tolist() for _ in range(2) for batch in used]


@pytest.mark.parametrize("shuffle", [False, True])
def test_a_sequence_group_draws_one_batch_in_place(shuffle):
    first, second = run_ranks(draw_batches, 2, "zigzag_ring_attn", shuffle)
    assert first == second
    assert sorted(sum(first[:4], [])) == list(range(8))
    assert not shuffle or first[:4] != first[4:]


def test_data_parallel_ranks_draw_different_samples_and_each_once():
    first, second = run_ranks(draw_batches, 2, "data_parallel", True)
    assert sorted(sum(first[:2] + second[:2], [])) == list(range(8))


def refuse_prepared_loader() -> str:
    accelerator = Accelerator(cpu=True)
    loader = accelerator.prepare(DataLoader(TensorDataset(torch.arange(8)), batch_size=2))
    with pytest.raises(ValueError) as error:
        prepare_dataloader("zigzag_ring_attn", loader, accelerator)
    return str(error.value)


def test_a_loader_that_was_already_split_is_refused():
    for text in run_ranks(refuse_prepared_loader, 2):
        assert "do not give the loader to accelerator.prepare" in text


def check_batches(same: bool) -> str:
    rank = torch.distributed.get_rank()
    try:
        check_same_batch(torch.arange(6)[None] + (0 if same else rank // 2))
    except RuntimeError as error:
        return str(error)
    return ""


def test_a_group_with_one_batch_passes_the_check():
    assert run_ranks(check_batches, 3, True) == ["", "", ""]


def test_a_group_with_different_batches_is_stopped_on_every_rank():
    for text in run_ranks(check_batches, 3, False):
        assert "got different ones on sequence ranks [[0, 1], [2]]" in text
