"""Train Hugging Face language models on very long sequences by sequence-parallel attention.

Importing this package patches nothing, initialises no device and prints nothing; names are loaded at first
use.
"""

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from easy_context.comm.mesh import SequenceParallelMesh, init_sequence_parallel_mesh
    from easy_context.inputs import (
        pad_to_multiple,
        prepare_dataloader,
        prepare_seq_parallel_inputs,
        unshard_sequence,
    )
    from easy_context.loss import sequence_parallel_cross_entropy, sequence_parallel_linear_cross_entropy
    from easy_context.patch import SeqParallelPatch, apply_seq_parallel_monkey_patch
    from easy_context.registry import Strategy
    from easy_context.strategies import available_strategies, get_strategy, register_strategy
    from easy_context.zigzag_ring_attn.monkey_patch import (
        apply_zigzag_ring_attn_monkey_patch_llama,
        apply_zigzag_ring_attn_monkey_patch_mistral,
    )
    from easy_context.zigzag_ring_attn.prepare_inputs import prepare_zigzag_ring_attn_inputs

_HOME_OF = {
    "SequenceParallelMesh": "comm.mesh",
    "init_sequence_parallel_mesh": "comm.mesh",
    "pad_to_multiple": "inputs",
    "prepare_dataloader": "inputs",
    "prepare_seq_parallel_inputs": "inputs",
    "prepare_zigzag_ring_attn_inputs": "zigzag_ring_attn.prepare_inputs",
    "unshard_sequence": "inputs",
    "sequence_parallel_cross_entropy": "loss",
    "sequence_parallel_linear_cross_entropy": "loss",
    "SeqParallelPatch": "patch",
    "apply_seq_parallel_monkey_patch": "patch",
    "Strategy": "registry",
    "available_strategies": "strategies",
    "get_strategy": "strategies",
    "register_strategy": "strategies",
    "apply_zigzag_ring_attn_monkey_patch_llama": "zigzag_ring_attn.monkey_patch",
    "apply_zigzag_ring_attn_monkey_patch_mistral": "zigzag_ring_attn.monkey_patch",
}

__all__ = [*sorted(_HOME_OF)]  # pyright: ignore[reportUnsupportedDunderAll]


def __getattr__(name: str) -> Any:
    if name not in _HOME_OF:
        raise AttributeError(f"module 'easy_context' has no attribute {name!r}")
    return getattr(import_module(f"easy_context.{_HOME_OF[name]}"), name)


def __dir__() -> list[str]:
    return sorted({*globals(), *_HOME_OF})
