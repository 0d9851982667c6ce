"""Load models and tokenizers by name, including small random ones that need no network."""

from __future__ import annotations

from typing import Any

import torch
from tokenizers import Tokenizer, decoders, models, pre_tokenizers
from transformers import (
    AutoConfig,
    AutoModelForCausalLM,
    AutoTokenizer,
    LlamaConfig,
    LlamaForCausalLM,
    PreTrainedModel,
    PreTrainedTokenizerFast,
)

from easy_context.rope import set_rope_theta

_END_OF_TEXT = "<|endoftext|>"
# Random Llamas by name. "tiny" is small enough to learn on two CPU cores, on the bytes of text; its low RoPE
# base suits the short patterns that it learns. The other has the shape of Llama-3.2-1B, to try a GPU with.
_RANDOM_LLAMAS: dict[str, dict[str, Any]] = {
    "tiny": {
        "hidden_size": 256,
        "intermediate_size": 512,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "head_dim": 16,
        "initializer_range": 0.04,
        "rope_parameters": {"rope_type": "default", "rope_theta": 100.0},
    },
    "random-llama-1b": {
        "hidden_size": 2048,
        "intermediate_size": 8192,
        "num_hidden_layers": 16,
        "num_attention_heads": 32,
        "num_key_value_heads": 8,
        "head_dim": 64,
        "rope_parameters": {"rope_type": "default", "rope_theta": 500000.0},
    },
}
RANDOM_MODELS = tuple(_RANDOM_LLAMAS)


def load_model(
    name: str, *, dtype: torch.dtype, rope_theta: float | None = None, seed: int = 0
) -> PreTrainedModel:
    """Return a causal language model.

    Args:
        name: a name of the hub, a folder, or one of ``RANDOM_MODELS``.
        dtype: of the weights.
        rope_theta: base of RoPE's frequencies, instead of the model's own.
        seed: of a random model's weights; the same on every rank.

    Raises: ``ValueError`` naming what was tried, if there is no such model.
    """
    if name in _RANDOM_LLAMAS:
        config: Any = _random_config(name)
    else:
        config = _from_pretrained(AutoConfig, name)
    if rope_theta is not None:
        set_rope_theta(config, rope_theta)
    if name not in _RANDOM_LLAMAS:
        return _from_pretrained(AutoModelForCausalLM, name, config=config, dtype=dtype)
    with torch.random.fork_rng():
        torch.manual_seed(seed)
        return LlamaForCausalLM(config).to(dtype)


def load_tokenizer(name: str) -> Any:
    """Return the tokenizer of a model; that of the random ones has a token for each byte.

    Raises: ``ValueError`` naming what was tried, if there is no such tokenizer.
    """
    return byte_tokenizer() if name in _RANDOM_LLAMAS else _from_pretrained(AutoTokenizer, name)


def byte_tokenizer() -> PreTrainedTokenizerFast:
    """Return a tokenizer with one token for each of the 256 bytes, and one for the end of a text.

    Any UTF-8 text survives encoding and decoding, and has as many tokens as bytes.
    """
    # The byte-level alphabet stands for the 256 bytes by printable characters; its order is fixed by sorting.
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    vocabulary = {character: index for index, character in enumerate(alphabet)}
    tokenizer = Tokenizer(models.BPE(vocab=vocabulary, merges=[]))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    tokenizer.decoder = decoders.ByteLevel()
    return PreTrainedTokenizerFast(
        tokenizer_object=tokenizer,
        eos_token=_END_OF_TEXT,
        pad_token=_END_OF_TEXT,
        clean_up_tokenization_spaces=False,
    )


def _random_config(name: str) -> LlamaConfig:
    tokenizer = byte_tokenizer()
    return LlamaConfig(
        vocab_size=len(tokenizer),
        max_position_embeddings=131072,
        bos_token_id=None,
        eos_token_id=tokenizer.eos_token_id,
        pad_token_id=tokenizer.pad_token_id,
        tie_word_embeddings=False,
        **_RANDOM_LLAMAS[name],
    )


def _from_pretrained(auto_class: Any, name: str, **settings: Any) -> Any:
    try:
        return auto_class.from_pretrained(name, **settings)
    except OSError as error:  # what transformers raises for a name that is neither a folder nor on the hub
        raise ValueError(
            f"--model needs a folder, a name of the hub or one of {', '.join(RANDOM_MODELS)}, got {name!r}, "
            f"which could not be loaded: {error}"
        ) from error
