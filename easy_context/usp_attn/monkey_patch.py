"""EasyContext's own names for patching a model family with the USP backend."""

from __future__ import annotations

from easy_context.patch import SeqParallelPatch, apply_seq_parallel_monkey_patch


def apply_usp_attn_monkey_patch_llama() -> SeqParallelPatch:
    """Patch all Llama models: ``apply_seq_parallel_monkey_patch("usp_attn", "llama")``."""
    return apply_seq_parallel_monkey_patch("usp_attn", "llama")


def apply_usp_attn_monkey_patch_mistral() -> SeqParallelPatch:
    """Patch all Mistral models: ``apply_seq_parallel_monkey_patch("usp_attn", "mistral")``."""
    return apply_seq_parallel_monkey_patch("usp_attn", "mistral")
