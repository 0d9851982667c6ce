"""The words for a sequence-parallel strategy and the table they are kept in.

This file knows what a strategy is; it does not know which ones exist (that is ``strategies.py``), nor how
ranks communicate.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any, Protocol

from torch import Tensor

IGNORE_INDEX = -100  # a target that is not scored, as in torch and Hugging Face


class Layout(Protocol):
    """Which global sequence indices a rank holds: pure index arithmetic."""

    def __call__(self, seq_len: int, *, num_ranks: int, rank: int, ring_size: int | None = None) -> Tensor:
        """Return the ``(S_local,)`` int64 indices that ``rank`` of ``num_ranks`` holds, ascending."""
        ...


@dataclass(frozen=True)
class HeadShape:
    """What a strategy has to know of a model's attention before it agrees to serve it."""

    num_heads: int
    num_kv_heads: int
    head_dim: int


@dataclass(frozen=True)
class Strategy:
    """One way of computing exact attention when the sequence is spread over ranks.

    Attributes:
        name: the word that selects it, for example ``"zigzag_ring_attn"``.
        layout: which global positions each rank of the sequence group holds.
        attention: ``attention(q, k, v, *, softmax_scale, mask, mesh, kernel) -> out`` on local tensors, ``q``
            (B, S, H, D), ``k`` and ``v`` (B, S, H_kv, D), differentiable; ``mask`` is a ``SequenceMask``.
        validate: ``validate(heads, mesh)`` raises ``ValueError`` for a model that it cannot serve on that
            mesh.
        length_multiple: ``length_multiple(num_ranks, ring_size)``, what a global sequence length must divide
            by.
        mesh_axes: the mesh axes over which the sequence is spread; empty when every rank holds it whole.
        summary: one line for tables and help texts.
    """

    name: str
    layout: Layout
    attention: Callable[..., Tensor]
    validate: Callable[[HeadShape, Any], None]
    length_multiple: Callable[[int, int | None], int]
    mesh_axes: tuple[str, ...]
    summary: str = field(default="", compare=False)


_REGISTERED: dict[str, Strategy] = {}


def register_strategy(strategy: Strategy) -> Strategy:
    """Make a strategy selectable by its name and return it.

    Registering the same object again changes nothing.

    Raises: ``ValueError`` if another strategy already has that name.
    """
    existing = _REGISTERED.setdefault(strategy.name, strategy)
    if existing is not strategy:
        raise ValueError(
            f"register_strategy needs a name that is not taken, got {strategy.name!r}; "
            f"names in use: {', '.join(sorted(_REGISTERED))}"
        )
    return strategy


def get_strategy(name: str) -> Strategy:
    """Return the strategy of that name.

    Raises: ``ValueError`` that lists the names that exist.
    """
    if name not in _REGISTERED:
        raise ValueError(
            f"seq_algo needs the name of a strategy, got {name!r}; choose one of: "
            f"{', '.join(available_strategies())}"
        )
    return _REGISTERED[name]


def available_strategies() -> tuple[str, ...]:
    """Return the names of all registered strategies in the order of registration."""
    return tuple(_REGISTERED)
