"""A training program written for EasyContext runs unchanged, and trains as one process would."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from accelerate import Accelerator
from ranks import run_ranks
from tiny_models import VOCAB, tiny_model
from torch.nn import CrossEntropyLoss
from torch.utils.data import DataLoader, Dataset
from transformers import AutoModelForCausalLM, LlamaForCausalLM

from easy_context import apply_seq_parallel_monkey_patch, prepare_dataloader, prepare_seq_parallel_inputs

SEQ_LENGTH, BATCH_SIZE, STEPS = 32, 2, 3


class Rows(Dataset):
    """Rows of L + 1 tokens."""

    def __len__(self) -> int:
        return BATCH_SIZE * STEPS

    def __getitem__(self, index: int) -> dict[str, torch.Tensor]:
        generator = torch.Generator().manual_seed(index)
        return {"input_ids": torch.randint(0, VOCAB, (SEQ_LENGTH + 1,), generator=generator)}


def program(strategy: str, model_name: str, attn_implementation: str) -> list[float]:
    """The usage example of EasyContext's README, made whole; losses averaged over the processes."""
    patch = apply_seq_parallel_monkey_patch(strategy, "llama")
    model = LlamaForCausalLM.from_pretrained(model_name, attn_implementation=attn_implementation)
    accelerator = Accelerator(cpu=True)
    model.gradient_checkpointing_enable()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    model, optimizer = accelerator.prepare(model, optimizer)
    train_dataloader = DataLoader(Rows(), batch_size=BATCH_SIZE, shuffle=True)
    prepare_dataloader(strategy, train_dataloader, accelerator)
    model.train()
    loss_function, losses = CrossEntropyLoss(), []
    for batch in train_dataloader:
        input_ids = batch["input_ids"][..., :SEQ_LENGTH]
        target_ids = batch["input_ids"][..., 1 : SEQ_LENGTH + 1]
        position_ids = torch.arange(SEQ_LENGTH).unsqueeze(0).expand(input_ids.shape[0], -1)
        prepared = prepare_seq_parallel_inputs(
            strategy,
            input_ids,
            position_ids,
            target_ids,
            accelerator.process_index,
            accelerator.num_processes,
            accelerator.device,
        )
        logits = model(prepared["local_input_ids"], position_ids=prepared["local_position_ids"]).logits
        loss = loss_function(logits.reshape(-1, logits.shape[-1]), prepared["local_target_ids"].reshape(-1))
        accelerator.backward(loss)
        losses.append(float(accelerator.reduce(loss.detach(), "mean")))
        optimizer.step()
        optimizer.zero_grad()
    patch.undo()
    return losses


@pytest.mark.parametrize("attn_implementation", ["eager", "sdpa", "flex_attention"])
def test_the_usage_example_of_easycontext_runs_on_two_ranks(tmp_path: Path, attn_implementation):
    tiny_model().save_pretrained(tmp_path)
    first, second = run_ranks(program, 2, "zigzag_ring_attn", str(tmp_path), attn_implementation)
    assert first == second and len(first) == STEPS
    (alone,) = run_ranks(program, 1, "zigzag_ring_attn", str(tmp_path), attn_implementation)
    assert first == pytest.approx(alone, rel=1e-5)


def test_the_saved_model_is_a_stock_model_again(tmp_path: Path):
    tiny_model().save_pretrained(tmp_path)
    with apply_seq_parallel_monkey_patch("zigzag_ring_attn", "llama"):
        model = AutoModelForCausalLM.from_pretrained(tmp_path)
        model.save_pretrained(tmp_path / "again")
    assert "easy_context" not in (tmp_path / "again" / "config.json").read_text()
