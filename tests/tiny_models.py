"""Small random models from configurations, and the ordinary step that sharded ones are compared with."""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from transformers import LlamaConfig, LlamaForCausalLM, MistralConfig, MistralForCausalLM, PreTrainedModel

VOCAB = 97
SEQ_LEN = 48  # a multiple of 2 * ranks for 1 to 4 ranks
BATCH = 3

_CLASSES = {"llama": (LlamaConfig, LlamaForCausalLM), "mistral": (MistralConfig, MistralForCausalLM)}


def tiny_model(
    family: str = "llama",
    *,
    dtype: torch.dtype = torch.float32,
    attn: str = "eager",
    seed: int = 0,
    **changes: Any,
) -> PreTrainedModel:
    """A 2-layer model of that family with 8 query heads of 8; ``changes`` go to its configuration."""
    config_class, model_class = _CLASSES[family]
    settings: dict[str, Any] = {
        "vocab_size": VOCAB,
        "hidden_size": 8 * changes.get("num_attention_heads", 8),
        "intermediate_size": 96,
        "num_hidden_layers": 2,
        "num_attention_heads": 8,
        "num_key_value_heads": 2,
        "head_dim": 8,
        "max_position_embeddings": 512,
        "initializer_range": 0.1,  # large enough for attention to be far from uniform
        "attn_implementation": attn,
    }
    torch.manual_seed(seed)
    return model_class(config_class(**{**settings, **changes})).to(dtype)


def tiny_batch(
    seq_len: int = SEQ_LEN, batch_size: int = BATCH, *, vocab: int = VOCAB, seed: int = 1
) -> tuple[Tensor, Tensor, Tensor]:
    """Random tokens, positions 0..S-1, and targets of which a fifth is ignored: (B, S) each."""
    generator = torch.Generator().manual_seed(seed)
    input_ids = torch.randint(0, vocab, (batch_size, seq_len), generator=generator)
    position_ids = torch.arange(seq_len).expand(batch_size, -1).clone()
    target_ids = torch.full_like(input_ids, -100)
    target_ids[:, :-1] = input_ids[:, 1:]
    target_ids[torch.rand(target_ids.shape, generator=generator) < 0.2] = -100
    return input_ids, position_ids, target_ids


def explicit_mask(position_ids: Tensor, *, window: int | None, dtype: torch.dtype) -> Tensor:
    """The additive (B, 1, S, S) mask of causality, window and documents, element by element."""
    batch_size, seq_len = position_ids.shape
    index = torch.arange(seq_len)
    visible = (index[None, :] <= index[:, None]).expand(batch_size, -1, -1)
    if window is not None:
        visible = visible & (index[None, :] > index[:, None] - window)
    restarts = F.pad((position_ids[:, 1:] <= position_ids[:, :-1]).long(), (1, 0))
    document = restarts.cumsum(1)
    visible = visible & (document[:, :, None] == document[:, None, :])
    mask = torch.zeros(batch_size, 1, seq_len, seq_len, dtype=dtype)
    return mask.masked_fill(~visible[:, None], torch.finfo(dtype).min)


def ordinary_loss(
    model: PreTrainedModel, input_ids: Tensor, position_ids: Tensor, target_ids: Tensor
) -> Tensor:
    """Token-weighted loss of an unpatched model over whole sequences."""
    mask = explicit_mask(
        position_ids,
        window=getattr(model.config, "sliding_window", None),
        dtype=next(model.parameters()).dtype,
    )
    logits = model(input_ids, position_ids=position_ids, attention_mask=mask, use_cache=False).logits
    return F.cross_entropy(logits.flatten(0, 1).float(), target_ids.flatten(), ignore_index=-100)


def gradients(model: PreTrainedModel) -> dict[str, Tensor]:
    """Clones of all gradients by parameter name, and none left behind."""
    grads = {name: p.grad.clone() for name, p in model.named_parameters() if p.grad is not None}
    model.zero_grad(set_to_none=True)
    return grads


def relative_error(value: Tensor, reference: Tensor, *, floor: float = 1e-12) -> float:
    """Norm of the difference over that of the reference (``floor`` at least); NaN counts as infinite."""
    error = (value.double() - reference.double()).norm() / reference.double().norm().clamp_min(floor)
    return float("inf") if bool(error.isnan()) else float(error)


def gradient_errors(grads: dict[str, Tensor], reference: dict[str, Tensor]) -> dict[str, float]:
    """Relative error of each gradient; one that is 0 in truth is held against a hundredth of all of them."""
    assert sorted(grads) == sorted(reference)
    floor = 1e-2 * float(torch.stack([grad.double().norm() for grad in reference.values()]).norm())
    return {name: relative_error(grads[name], reference[name], floor=floor) for name in grads}
