"""flash-attn 3, the Hopper kernels (module ``flash_attn_interface``)."""

from __future__ import annotations

import importlib.metadata

import torch
from torch import Tensor

from easy_context.kernels.half_precision import BackwardInputs, HalfPrecisionKernel
from easy_context.kernels.packages import PackageFunction, import_package

_INSTALL = (
    "build it from the folder hopper of https://github.com/Dao-AILab/flash-attention: pip install ./hopper"
)
_WINDOW = ("window_size", "window_size_left")  # a pair at first, two integers since it is a torch operator
# Neutral values for parameters that some of its releases require; the rest have neutral defaults.
_UNUSED_FORWARD = dict.fromkeys(
    (
        *(
            "k_new",
            "v_new",
            "qv",
            "out",
            "cu_seqlens_q",
            "cu_seqlens_k",
            "cu_seqlens_k_new",
            "seqused_q",
            "seqused_k",
        ),
        *(
            "max_seqlen_q",
            "max_seqlen_k",
            "page_table",
            "kv_batch_idx",
            "leftpad_k",
            "rotary_cos",
            "rotary_sin",
        ),
        *("seqlens_rotary", "q_descale", "k_descale", "v_descale"),
    )
)
_UNUSED_BACKWARD = dict.fromkeys(
    ("cu_seqlens_q", "cu_seqlens_k", "sequed_q", "sequed_k", "max_seqlen_q", "max_seqlen_k")
)


class FlashAttn3Kernel(HalfPrecisionKernel):
    """flash-attn 3, for Hopper."""

    name = "flash_attn_3"
    capabilities = range(9, 10)

    def __init__(self):
        interface = import_package("flash_attn_interface", kernel=self.name, install=_INSTALL)
        try:
            version = importlib.metadata.version("flash-attn-3")
        except (
            importlib.metadata.PackageNotFoundError
        ):  # the module may lie on the path without a distribution
            version = "unknown"
        who = f"{self.name} needs flash-attn 3 (3.0.0b1 or newer), got version {version}"
        common = ("q", "k", "v", "softmax_scale")
        self._forward = PackageFunction(
            interface,
            "_flash_attn_forward",
            offered=(*common, "causal", *_UNUSED_FORWARD),
            needed=(
                *common,
                "causal",
                "num_splits",
                _WINDOW,
            ),  # the first preview, without num_splits, returned more
            who=who,
        )
        buffers = ("dout", "out", "softmax_lse", "dq", "dk", "dv")
        self._backward = PackageFunction(
            interface,
            "_flash_attn_backward",
            offered=(*common, *buffers, "causal", "is_causal", "deterministic", *_UNUSED_BACKWARD),
            needed=(*common, *buffers, ("causal", "is_causal"), _WINDOW),
            who=who,
        )

    def _attend(
        self, q: Tensor, k: Tensor, v: Tensor, *, softmax_scale: float, causal: bool
    ) -> tuple[Tensor, Tensor]:
        out, lse, *_split_partials = self._forward(
            q=q, k=k, v=v, softmax_scale=softmax_scale, causal=causal, **_UNUSED_FORWARD
        )
        return out, lse

    def _attend_backward(
        self, given: BackwardInputs, *, softmax_scale: float, causal: bool
    ) -> tuple[Tensor, Tensor, Tensor]:
        buffers = given.gradient_buffers()
        self._backward(  # writes into the buffers; what it returns differs between versions
            **given._asdict(),
            **buffers._asdict(),
            **_UNUSED_BACKWARD,
            softmax_lse=given.lse,
            softmax_scale=softmax_scale,
            causal=causal,
            is_causal=causal,
            deterministic=torch.are_deterministic_algorithms_enabled(),
        )
        return buffers
