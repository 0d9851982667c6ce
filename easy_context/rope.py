"""RoPE settings on a configuration, before the model is built. Knows configurations; knows no ranks."""

from __future__ import annotations

from typing import Any


def set_rope_theta(config: Any, theta: float) -> None:
    """Set the base of RoPE's frequencies on a model's configuration, in place; saved with it.

    A model reads its configuration when it is built, so call this before. Where a configuration keeps one
    base for each kind of layer (Gemma 3), the one of full attention is set: that of sliding layers does not
    limit the context.

    Args:
        config: of a model with rotary position embeddings.
        theta: the base, above 1; larger is longer wavelengths, and a longer context after training.

    Raises: ``ValueError`` for a base of 1 or less, or a configuration without RoPE.
    Source: https://arxiv.org/abs/2309.16039, section 2.
    """
    if not theta > 1:
        raise ValueError(f"--rope-theta needs a base above 1, got {theta}; models use 10000 and more")
    parameters = getattr(config, "rope_parameters", None)
    if not isinstance(parameters, dict):
        raise ValueError(
            f"--rope-theta needs a model with rotary position embeddings, got {type(config).__name__} "
            "without rope_parameters; leave the flag out"
        )
    by_layer = parameters.get("full_attention")
    changed = {**(by_layer if isinstance(by_layer, dict) else parameters), "rope_theta": float(theta)}
    # A new dict, because configurations may share one.
    config.rope_parameters = {**parameters, "full_attention": changed} if by_layer is not None else changed
