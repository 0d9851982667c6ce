"""flash-attn 4, the CuTe kernels for Hopper and newer (package ``flash-attn-4``)."""

from __future__ import annotations

import importlib.metadata

import torch
from torch import Tensor

from easy_context.kernels.half_precision import BackwardInputs, HalfPrecisionKernel
from easy_context.kernels.packages import (
    KernelNotInstalled,
    PackageFunction,
    import_package,
)

_INSTALL = "install it with: pip install --pre flash-attn-4"


class FlashAttn4Kernel(HalfPrecisionKernel):
    """flash-attn 4, for Hopper and newer."""

    name = "flash_attn_4"
    capabilities = range(9, 13)

    @classmethod
    def refusal(cls, device: torch.device, dtype: torch.dtype, head_dim: int) -> str | None:
        """Return why it cannot serve such tensors, or None if it can. Imports nothing."""
        refusal = super().refusal(device, dtype, head_dim)
        if refusal is None and head_dim > 128 and torch.cuda.get_device_capability(device)[0] != 9:
            return f"needs head_dim up to 128 on this GPU, got {head_dim}"
        return refusal

    def __init__(self):
        # flash-attn 2.8 ships an early flash_attn.cute of its own, so that the module alone proves nothing.
        try:
            version = importlib.metadata.version("flash-attn-4")
        except importlib.metadata.PackageNotFoundError as error:
            raise KernelNotInstalled(
                f"{self.name} needs flash-attn-4, which is not installed ({error}); {_INSTALL}"
            ) from error
        interface = import_package("flash_attn.cute.interface", kernel=self.name, install=_INSTALL)
        who = f"{self.name} needs flash-attn-4 (4.0.0b36 is tested), got version {version}"
        common = ("q", "k", "v", "softmax_scale", "causal")
        self._forward = PackageFunction(
            interface,
            "_flash_attn_fwd",
            offered=(*common, "return_lse"),
            needed=(*common, "return_lse"),
            who=who,
        )
        given = ("out", "dout", "lse")
        self._backward = PackageFunction(
            interface,
            "_flash_attn_bwd",
            offered=(*common, *given, "deterministic"),
            needed=(*common, *given),
            who=who,
        )

    def _attend(
        self, q: Tensor, k: Tensor, v: Tensor, *, softmax_scale: float, causal: bool
    ) -> tuple[Tensor, Tensor]:
        # out and lse come first in all releases; later ones add state of variants that are not used here.
        out, lse, *_other = self._forward(
            q=q, k=k, v=v, softmax_scale=softmax_scale, causal=causal, return_lse=True
        )
        return out, lse

    def _attend_backward(
        self, given: BackwardInputs, *, softmax_scale: float, causal: bool
    ) -> tuple[Tensor, Tensor, Tensor]:
        dq, dk, dv = self._backward(
            **given._asdict(),
            softmax_scale=softmax_scale,
            causal=causal,
            deterministic=torch.are_deterministic_algorithms_enabled(),
        )
        return dq, dk, dv
