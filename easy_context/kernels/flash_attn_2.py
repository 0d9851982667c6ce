"""flash-attn 2.5 to 2.8, through the private functions for one pass: the public ones take no lse back."""

from __future__ import annotations

import importlib

import torch
from torch import Tensor

from easy_context.kernels.half_precision import BackwardInputs, HalfPrecisionKernel
from easy_context.kernels.packages import PackageFunction, import_package

_INSTALL = 'install it with: pip install "flash-attn>=2.5,<3" --no-build-isolation'
_WINDOW = ("window_size", "window_size_left")  # a pair until 2.6, two integers since 2.7
# Neutral values for what this library does not use; softcap came with 2.6.
_UNUSED = {
    "dropout_p": 0.0,
    "window_size": (-1, -1),
    "window_size_left": -1,
    "window_size_right": -1,
    "softcap": 0.0,
    "alibi_slopes": None,
}


class FlashAttn2Kernel(HalfPrecisionKernel):
    """flash-attn 2, for Ampere and newer."""

    name = "flash_attn_2"
    capabilities = range(8, 13)

    def __init__(self):
        interface = import_package("flash_attn.flash_attn_interface", kernel=self.name, install=_INSTALL)
        version = getattr(importlib.import_module("flash_attn"), "__version__", "unknown")
        who = f"{self.name} needs flash-attn 2.5 to 2.8, got version {version}"
        common = ("q", "k", "v", "softmax_scale", "causal")
        self._forward = PackageFunction(
            interface,
            "_flash_attn_forward",
            offered=(*common, *_UNUSED, "return_softmax"),
            needed=(*common, "dropout_p", "return_softmax", _WINDOW),
            who=who,
        )
        buffers = ("dout", "out", "softmax_lse", "dq", "dk", "dv")
        self._backward = PackageFunction(
            interface,
            "_flash_attn_backward",
            offered=(*common, *_UNUSED, *buffers, "deterministic", "rng_state"),
            needed=(*common, *buffers, "dropout_p", _WINDOW),
            who=who,
        )

    def _attend(
        self, q: Tensor, k: Tensor, v: Tensor, *, softmax_scale: float, causal: bool
    ) -> tuple[Tensor, Tensor]:
        result = self._forward(
            q=q, k=k, v=v, softmax_scale=softmax_scale, causal=causal, return_softmax=False, **_UNUSED
        )
        if self._forward.has("window_size"):  # 2.5 and 2.6
            out, _q, _k, _v, _out_padded, lse, _dropout_mask, _rng_state = result
        else:
            out, lse, _dropout_mask, _rng_state = result
        return out, lse

    def _attend_backward(
        self, given: BackwardInputs, *, softmax_scale: float, causal: bool
    ) -> tuple[Tensor, Tensor, Tensor]:
        buffers = given.gradient_buffers()
        self._backward(  # writes into the buffers; what it returns differs between versions
            **given._asdict(),
            **buffers._asdict(),
            **_UNUSED,
            softmax_lse=given.lse,
            softmax_scale=softmax_scale,
            causal=causal,
            deterministic=torch.are_deterministic_algorithms_enabled(),
            rng_state=None,
        )
        return buffers
