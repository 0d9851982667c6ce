"""Stand-ins for the flash-attn packages: their published signatures, attention in plain torch on the CPU.

A stand-in is built from ``data/flash_attn_signatures.json``, so it takes exactly the parameters of that
release, gives its results in that release's order, and refuses what the real kernels refuse: full precision,
a head_dim that is not a multiple of 8, a last dim that is not contiguous. What a call passes for windows,
dropout and other features must switch them off.
"""

from __future__ import annotations

import ast
import inspect
import json
import sys
from collections.abc import Callable
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import torch
from plain_attention import causal, plain_attention, plain_scores
from torch import Tensor

SIGNATURES = json.loads((Path(__file__).parent / "data" / "flash_attn_signatures.json").read_text())

_MODULES = (
    *("flash_attn", "flash_attn.flash_attn_interface", "flash_attn.cute", "flash_attn.cute.interface"),
    "flash_attn_interface",
)
# What may be passed for features that this library does not use.
_SWITCHED_OFF = (None, 0, 0.0, -1, (-1, -1), False)
_USED = {"q", "k", "v", "out", "dout", "lse", "softmax_lse", "dq", "dk", "dv"}
_USED |= {"softmax_scale", "causal", "is_causal", "deterministic", "return_lse"}


def uninstall_flash_attn(monkeypatch: pytest.MonkeyPatch) -> None:
    """Hide every generation of flash-attn, also one that is really installed."""
    for name in _MODULES:
        monkeypatch.setitem(sys.modules, name, None)


def install_broken_flash_attn(monkeypatch: pytest.MonkeyPatch, folder: Path, source: str) -> None:
    """Make ``flash_attn`` a real module in ``folder`` whose import runs ``source``."""
    for name in _MODULES:
        if name.startswith("flash_attn.") or name == "flash_attn":
            monkeypatch.delitem(sys.modules, name, raising=False)
    (folder / "flash_attn.py").write_text(source)
    monkeypatch.syspath_prepend(folder)


def install_flash_attn_2(monkeypatch: pytest.MonkeyPatch, version: str) -> ModuleType:
    """Make ``flash_attn`` of that version importable; return the module that has the functions."""
    package = _module(monkeypatch, "flash_attn", is_package=True)
    package.__version__ = version
    return _interface(monkeypatch, "flash_attn.flash_attn_interface", f"flash-attn {version}")


def install_flash_attn_3(monkeypatch: pytest.MonkeyPatch, label: str) -> ModuleType:
    """Make ``flash_attn_interface`` importable, as the release with that label has it."""
    return _interface(monkeypatch, "flash_attn_interface", label)


def install_flash_attn_4(monkeypatch: pytest.MonkeyPatch, folder: Path, label: str) -> ModuleType:
    """Make ``flash_attn.cute`` importable, and the distribution ``flash-attn-4`` known, in ``folder``."""
    metadata = folder / "flash_attn_4-4.0.0b36.dist-info" / "METADATA"
    metadata.parent.mkdir()
    metadata.write_text("Metadata-Version: 2.4\nName: flash-attn-4\nVersion: 4.0.0b36\n")
    monkeypatch.syspath_prepend(folder)
    if sys.modules.get("flash_attn") is None:
        _module(monkeypatch, "flash_attn", is_package=True)
    _module(monkeypatch, "flash_attn.cute", is_package=True)
    return _interface(monkeypatch, "flash_attn.cute.interface", label)


def published_signature(label: str, function: str) -> inspect.Signature:
    """Return the signature that the release with that label gives the function."""
    return inspect.Signature(
        [
            inspect.Parameter(
                name,
                inspect.Parameter.POSITIONAL_OR_KEYWORD,
                default=inspect.Parameter.empty if default is None else ast.literal_eval(default),
            )
            for name, default in SIGNATURES[label][function]["parameters"]
        ]
    )


def stand_in(label: str, function: str) -> Callable[..., Any]:
    """Return a function with the signature and the results of the release with that label."""
    signature, results = published_signature(label, function), SIGNATURES[label][function]["returns"]
    compute = _backward if function.endswith(("backward", "bwd")) else _forward

    def call(*positional: Any, **named: Any) -> Any:
        bound = signature.bind(*positional, **named)
        for name, value in bound.arguments.items():
            _check(name, value)
        bound.apply_defaults()
        computed = {**bound.arguments, **compute(bound.arguments)}
        values = [computed.get(name) for name in results if not name.startswith("*")]
        return values[0] if len(results) == 1 else tuple(values)

    call.__signature__ = signature
    return call


def _interface(monkeypatch: pytest.MonkeyPatch, name: str, label: str) -> ModuleType:
    module = _module(monkeypatch, name)
    for function in SIGNATURES[label]:
        setattr(module, function, stand_in(label, function))
    return module


def _module(monkeypatch: pytest.MonkeyPatch, name: str, *, is_package: bool = False) -> ModuleType:
    module = ModuleType(name)
    if is_package:
        module.__path__ = []
    monkeypatch.setitem(sys.modules, name, module)
    parent, _, child = name.rpartition(".")
    if parent:
        setattr(sys.modules[parent], child, module)
    return module


def _check(name: str, value: Any) -> None:
    if name in ("q", "k", "v", "dout"):
        if value.dtype not in (torch.float16, torch.bfloat16):
            raise RuntimeError("FlashAttention only support fp16 and bf16 data type")
        if value.shape[-1] % 8 or value.stride(-1) != 1:
            raise RuntimeError(
                f"{name}: shape {tuple(value.shape)} or strides {value.stride()} not supported"
            )
    elif name in ("lse", "softmax_lse"):
        if value.dtype != torch.float32 or not value.is_contiguous():
            raise RuntimeError(f"{name} must be contiguous float32")
    elif name not in _USED and value not in _SWITCHED_OFF:
        raise NotImplementedError(f"a stand-in has no {name}, got {value!r}")


def _mask(arguments: dict[str, Any]) -> Tensor | None:
    is_causal = arguments["is_causal"] if "is_causal" in arguments else arguments["causal"]
    assert not is_causal or arguments["q"].shape[1] == arguments["k"].shape[1]
    return causal(arguments["q"].shape[1]) if is_causal else None


def _forward(arguments: dict[str, Any]) -> dict[str, Tensor | None]:
    q, k, v = (arguments[name].float() for name in "qkv")
    out, lse = plain_attention(q, k, v, softmax_scale=arguments["softmax_scale"], visible=_mask(arguments))
    out = out.to(arguments["q"].dtype)
    given = arguments.get("return_lse", True)
    return {"out": out, "out_padded": out, "softmax_lse": lse, "lse": lse if given else None}


def _backward(arguments: dict[str, Any]) -> dict[str, Tensor]:
    q, k, v, out, dout = (arguments[name].float() for name in ("q", "k", "v", "out", "dout"))
    lse, scale = arguments.get("softmax_lse", arguments.get("lse")), arguments["softmax_scale"]
    num_kv_heads, group_size = k.shape[2], q.shape[2] // k.shape[2]
    p = (plain_scores(q, k, scale, _mask(arguments)) - lse[..., None]).exp()
    dp = torch.einsum("bqhd,bkhd->bhqk", dout, v.repeat_interleave(group_size, dim=2))
    ds = p * (dp - (dout * out).sum(-1).transpose(1, 2)[..., None]) * scale
    gradients = {
        "dq": torch.einsum("bhqk,bkhd->bqhd", ds, k.repeat_interleave(group_size, dim=2)),
        "dk": torch.einsum("bhqk,bqhd->bkhd", ds, q).unflatten(2, (num_kv_heads, group_size)).sum(3),
        "dv": torch.einsum("bhqk,bqhd->bkhd", p, dout).unflatten(2, (num_kv_heads, group_size)).sum(3),
    }
    for name, gradient in gradients.items():
        buffer = arguments.get(name)
        gradients[name] = gradient.to(arguments["q"].dtype) if buffer is None else buffer.copy_(gradient)
    return gradients
