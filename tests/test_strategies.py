"""Every strategy, at every number of ranks, computes the loss and the gradients of the unpatched model."""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from ranks import run_ranks
from spies import LargestTensor, spy_on_traffic
from tiny_models import (
    BATCH,
    SEQ_LEN,
    VOCAB,
    gradient_errors,
    gradients,
    ordinary_loss,
    relative_error,
    tiny_batch,
    tiny_model,
)
from torch import Tensor
from transformers import PreTrainedModel

from easy_context import (
    apply_seq_parallel_monkey_patch,
    available_strategies,
    get_strategy,
    init_sequence_parallel_mesh,
    prepare_seq_parallel_inputs,
    sequence_parallel_cross_entropy,
    sequence_parallel_linear_cross_entropy,
    unshard_sequence,
)

STRATEGIES = available_strategies()
RANKS = [1, 2, 3, 4]


@dataclass
class Case:
    """One comparison; the fields that are not about the model say how the sharded side is run."""

    strategy: str
    family: str = "llama"
    config: dict[str, Any] = field(default_factory=dict)
    dtype: torch.dtype = torch.float32
    checkpointing: str = "none"  # none, reentrant, non_reentrant
    trainable: str | None = None  # only parameters with this in their name
    documents: tuple[int, ...] = ()  # where position_ids restart
    fused_loss: bool = True
    patch_family: bool = False
    poison: bool = False  # fill fresh buffers with NaN
    sabotage: str | None = None
    ring_degree: int | None = None


@dataclass
class Report:
    """What a comparison found on one rank."""

    world_size: int
    bytes_sent: int
    loss_error: float
    largest_gradient_error: float
    worst_parameter: str
    num_gradients: int


def compare_with_full_attention(case: Case) -> Report:
    """Run the same step by the unpatched model on whole sequences and by the strategy on shards."""
    if case.ring_degree is not None:
        init_sequence_parallel_mesh(ring_degree=case.ring_degree)
    batch = _batch(case)
    model = tiny_model(case.family, dtype=case.dtype, **case.config)
    if case.trainable is not None:
        for name, parameter in model.named_parameters():
            parameter.requires_grad_(case.trainable in name)
    reference_model = model.float() if case.dtype is not torch.float32 else model
    reference_loss = ordinary_loss(reference_model, *batch)
    reference_loss.backward()
    reference = gradients(reference_model)
    model = model.to(case.dtype)
    if case.poison:
        torch.use_deterministic_algorithms(True)
        torch.utils.deterministic.fill_uninitialized_memory = True
    target = case.family if case.patch_family else model
    try:
        with apply_seq_parallel_monkey_patch(case.strategy, target), spy_on_traffic() as traffic:
            _checkpointing(model, case.checkpointing)
            with _sabotage(case.sabotage):
                loss = sharded_loss(model, case.strategy, batch, fused=case.fused_loss)
                loss.backward()
    finally:
        torch.use_deterministic_algorithms(False)
    errors = gradient_errors(
        {name: _mean(grad) for name, grad in sorted(gradients(model).items())}, reference
    )
    worst = max(errors, key=lambda name: errors[name])
    return Report(
        world_size=int(_mean(torch.ones(())) * dist.get_world_size()),
        bytes_sent=traffic.bytes_sent,
        loss_error=relative_error(_mean(loss.detach()), reference_loss.detach()),
        largest_gradient_error=errors[worst],
        worst_parameter=worst,
        num_gradients=len(errors),
    )


def sharded_loss(
    model: PreTrainedModel, strategy: str, batch: tuple[Tensor, Tensor, Tensor], *, fused: bool = True
) -> Tensor:
    """One rank's share of the loss, as a training script computes it."""
    local = prepare_seq_parallel_inputs(strategy, *batch, dist.get_rank(), dist.get_world_size(), "cpu")
    targets = local["local_target_ids"]
    if not fused:
        logits = model(local["local_input_ids"], position_ids=local["local_position_ids"]).logits
        return sequence_parallel_cross_entropy(logits, targets)
    hidden = model.base_model(
        local["local_input_ids"], position_ids=local["local_position_ids"]
    ).last_hidden_state
    return sequence_parallel_linear_cross_entropy(hidden, model.get_output_embeddings(), targets)


def _batch(case: Case) -> tuple[Tensor, Tensor, Tensor]:
    input_ids, position_ids, target_ids = tiny_batch()
    for start in case.documents:
        position_ids[:, start:] -= position_ids[:, start : start + 1].clone()
    return input_ids, position_ids, target_ids


def _checkpointing(model: PreTrainedModel, kind: str) -> None:
    if kind != "none":
        model.train()
        model.gradient_checkpointing_enable({"use_reentrant": kind == "reentrant"})
        model.enable_input_require_grads()


def _mean(tensor: Tensor) -> Tensor:
    tensor = tensor.clone()
    dist.all_reduce(tensor)
    return tensor / dist.get_world_size()


class _sabotage:
    """Break one exchange of the ring on purpose."""

    def __init__(self, kind: str | None) -> None:
        self.kind = kind

    def __enter__(self) -> None:
        from easy_context.comm import ring

        self.original = ring._PostedRotation.wait
        kind, original = self.kind, self.original

        def wait(rotation: Any) -> list[Tensor]:
            sent = rotation._sent
            received = original(rotation)
            if kind == "drop":
                return [tensor.clone() for tensor in sent]
            return received[::-1] if kind == "swap" else received

        ring._PostedRotation.wait = wait

    def __exit__(self, *error: object) -> None:
        from easy_context.comm import ring

        ring._PostedRotation.wait = self.original


def servable(case: Case, num_ranks: int) -> Case:
    """The case with the degrees and the number of heads that its strategy needs at this number of ranks."""
    if case.strategy == "usp_attn":
        return replace(case, ring_degree=case.ring_degree or {1: 1, 2: 1, 3: 3, 4: 2}[num_ranks])
    if case.strategy == "ulysses_attn" and case.config.get("num_attention_heads", 8) % num_ranks:
        kv_heads = min(6, case.config.get("num_key_value_heads", 2))
        return replace(
            case, config={**case.config, "num_attention_heads": 6, "num_key_value_heads": kv_heads}
        )
    return case


def check(case: Case, num_ranks: int, tolerance: float = 1e-5) -> list[Report]:
    case = servable(case, num_ranks)
    reports = run_ranks(compare_with_full_attention, num_ranks, case)
    for report in reports:
        assert report.world_size == num_ranks
        if num_ranks > 1 and get_strategy(case.strategy).mesh_axes:
            assert report.bytes_sent > 0
        assert report.loss_error < tolerance, report
        assert report.largest_gradient_error < tolerance, report
    return reports


@pytest.mark.parametrize("num_ranks", RANKS)
@pytest.mark.parametrize("kv_heads", [8, 2, 1])
@pytest.mark.parametrize("strategy", STRATEGIES)
def test_strategy_matches_full_attention(strategy, kv_heads, num_ranks):
    check(Case(strategy, config={"num_key_value_heads": kv_heads}), num_ranks)


@pytest.mark.parametrize("num_ranks", RANKS)
@pytest.mark.parametrize("strategy", STRATEGIES)
def test_strategy_serves_mistral(strategy, num_ranks):
    check(Case(strategy, family="mistral", patch_family=True, fused_loss=False), num_ranks)


@pytest.mark.parametrize("checkpointing", ["reentrant", "non_reentrant"])
@pytest.mark.parametrize("num_ranks", [1, 2, 3, 4])
@pytest.mark.parametrize("strategy", STRATEGIES)
def test_gradient_checkpointing_changes_no_gradient(strategy, num_ranks, checkpointing):
    check(Case(strategy, checkpointing=checkpointing), num_ranks)


@pytest.mark.parametrize("trainable", ["v_proj", "q_proj"])
@pytest.mark.parametrize("num_ranks", RANKS)
@pytest.mark.parametrize("strategy", STRATEGIES)
def test_frozen_parts_do_not_disturb_the_rest(strategy, num_ranks, trainable):
    reports = check(Case(strategy, trainable=trainable), num_ranks)
    assert reports[0].num_gradients == 2  # one a layer


@pytest.mark.parametrize("num_ranks", RANKS)
@pytest.mark.parametrize("strategy", STRATEGIES)
def test_head_dim_80_is_exact(strategy, num_ranks):
    check(
        Case(strategy, config={"head_dim": 80, "num_attention_heads": 4, "num_key_value_heads": 2}), num_ranks
    )


@pytest.mark.parametrize("num_ranks", RANKS)
@pytest.mark.parametrize("strategy", STRATEGIES)
def test_no_fresh_buffer_is_read_before_it_is_written(strategy, num_ranks):
    check(Case(strategy, poison=True), num_ranks)


@pytest.mark.parametrize("window", [1, 3, 4, 9, SEQ_LEN])
@pytest.mark.parametrize("num_ranks", RANKS)
@pytest.mark.parametrize("strategy", STRATEGIES)
def test_sliding_windows_are_exact(strategy, num_ranks, window):
    check(Case(strategy, family="mistral", config={"sliding_window": window}), num_ranks)


@pytest.mark.parametrize("starts", [(10,), (12, 24, 36), (5, 6, 7, 30)])
@pytest.mark.parametrize("num_ranks", RANKS)
@pytest.mark.parametrize("strategy", STRATEGIES)
def test_packed_documents_do_not_see_each_other(strategy, num_ranks, starts):
    check(Case(strategy, documents=starts), num_ranks)


@pytest.mark.parametrize("kind", ["drop", "swap"])
@pytest.mark.parametrize("num_ranks", [2, 3])
def test_the_comparison_notices_a_broken_exchange(num_ranks, kind):
    reports = run_ranks(compare_with_full_attention, num_ranks, Case("zigzag_ring_attn", sabotage=kind))
    assert max(report.largest_gradient_error for report in reports) > 1e-3


@pytest.mark.parametrize("strategy", STRATEGIES)
def test_bf16_error_stays_within_twice_that_of_plain_torch_at_any_number_of_ranks(strategy):
    plain = _error_of_plain_bf16()
    for num_ranks in RANKS:
        case = servable(Case(strategy, dtype=torch.bfloat16), num_ranks)
        report = run_ranks(compare_with_full_attention, num_ranks, case)[0]
        assert report.largest_gradient_error <= 2 * plain, (num_ranks, report)


def _error_of_plain_bf16() -> float:
    batch = tiny_batch()
    model = tiny_model(dtype=torch.bfloat16)
    reference_model = tiny_model(dtype=torch.bfloat16).float()
    ordinary_loss(reference_model, *batch).backward()
    ordinary_loss(model, *batch).backward()
    reference = gradients(reference_model)
    return max(gradient_errors(gradients(model), reference).values())


@pytest.mark.parametrize("strategy", STRATEGIES)
def test_memory_grows_with_the_length_only(strategy):
    seq_len, vocab = 8192, 4096
    model = tiny_model(vocab_size=vocab, num_attention_heads=2, num_key_value_heads=1)
    batch = tiny_batch(seq_len, 1, vocab=vocab)
    init_sequence_parallel_mesh(ring_degree=1)
    with apply_seq_parallel_monkey_patch(strategy, model), LargestTensor() as largest:
        local = prepare_seq_parallel_inputs(strategy, *batch, 0, 1, "cpu")
        hidden = model.base_model(
            local["local_input_ids"], position_ids=local["local_position_ids"]
        ).last_hidden_state
        sequence_parallel_linear_cross_entropy(hidden, model.lm_head, local["local_target_ids"]).backward()
    assert largest.numel < seq_len * vocab / 4, largest.operation


def gathered_logits(case: Case, compiled: bool) -> tuple[float, float]:
    """Errors of the gathered logits, and of this rank's own loss against the same tokens in the whole."""
    input_ids, position_ids, target_ids = tiny_batch()
    model, strategy = tiny_model(**case.config).eval(), case.strategy
    if case.ring_degree is not None:
        init_sequence_parallel_mesh(ring_degree=case.ring_degree)
    with torch.no_grad():
        expected = model(input_ids, position_ids=position_ids, use_cache=False).logits
        token_losses = F.cross_entropy(expected.flatten(0, 1), target_ids.flatten(), reduction="none").view(
            BATCH, -1
        )
        rank, size = dist.get_rank(), dist.get_world_size()
        local = prepare_seq_parallel_inputs(strategy, input_ids, position_ids, target_ids, rank, size, "cpu")
        held = prepare_seq_parallel_inputs(strategy, position_ids, position_ids, None, rank, size, "cpu")
        with apply_seq_parallel_monkey_patch(strategy, model):
            called = torch.compile(model, backend="eager") if compiled else model
            logits = called(local["local_input_ids"], position_ids=local["local_position_ids"]).logits
        shards = [torch.empty_like(logits) for _ in range(size)]
        dist.all_gather(shards, logits)
        whole = unshard_sequence(strategy, torch.cat(shards, dim=1), size, ring_degree=case.ring_degree)
        own = F.cross_entropy(logits.flatten(0, 1), local["local_target_ids"].flatten(), reduction="sum")
        restricted = token_losses.gather(1, held["local_input_ids"]).sum()
    return relative_error(whole, expected), relative_error(own, restricted)


@pytest.mark.parametrize("compiled", [False, True], ids=["as_is", "compiled"])
@pytest.mark.parametrize("num_ranks", RANKS)
@pytest.mark.parametrize("strategy", STRATEGIES)
def test_gathered_logits_and_every_shard_of_the_loss_are_those_of_the_whole(strategy, num_ranks, compiled):
    case = servable(Case(strategy), num_ranks)
    for logits_error, loss_error in run_ranks(gathered_logits, num_ranks, case, compiled):
        assert logits_error < 1e-5 and loss_error < 1e-5


def two_strategies_and_two_models_at_once() -> list[float]:
    mesh = init_sequence_parallel_mesh()
    batch = tiny_batch()
    models = [tiny_model(seed=seed) for seed in (0, 7)]
    errors = []
    patches = [
        apply_seq_parallel_monkey_patch(name, model, mesh=mesh)
        for name, model in zip(("zigzag_ring_attn", "data_parallel"), models, strict=True)
    ]
    for name, model in zip(("zigzag_ring_attn", "data_parallel"), models, strict=True):
        loss = _mean(sharded_loss(model, name, batch).detach())
        errors.append(
            relative_error(loss, ordinary_loss(tiny_model(seed=0 if model is models[0] else 7), *batch))
        )
    for patch in patches:
        patch.undo()
    return errors


def test_two_models_with_two_strategies_do_not_disturb_each_other():
    for errors in run_ranks(two_strategies_and_two_models_at_once, 2):
        assert max(errors) < 1e-5


def test_the_suite_covers_what_it_says():
    assert BATCH == 3 and VOCAB > BATCH and all(SEQ_LEN % (2 * ranks) == 0 for ranks in RANKS)
