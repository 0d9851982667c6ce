"""THE list of built-in strategies. Adding a backend is one folder and one line here."""

from __future__ import annotations

from easy_context import data_parallel, ulysses_attn, usp_attn, zigzag_ring_attn
from easy_context.registry import available_strategies, get_strategy, register_strategy

__all__ = ["available_strategies", "get_strategy", "register_strategy"]

for _backend in (zigzag_ring_attn, ulysses_attn, usp_attn, data_parallel):
    register_strategy(_backend.STRATEGY)
