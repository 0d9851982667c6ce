"""Which kernel computes a block of attention here, and why not a better one.

Knows the kernels by name and the order in which they are preferred. Knows no rank, no strategy and no model,
and imports no package before a kernel is asked for.
"""

from __future__ import annotations

import logging
from functools import cache
from typing import Protocol

import torch
from torch import Tensor

from easy_context.kernels.base import AttentionGradients, AttentionPart, Kernel
from easy_context.kernels.flash_attn_2 import FlashAttn2Kernel
from easy_context.kernels.flash_attn_3 import FlashAttn3Kernel
from easy_context.kernels.flash_attn_4 import FlashAttn4Kernel
from easy_context.kernels.merge import merge_partials
from easy_context.kernels.packages import KernelNotInstalled
from easy_context.kernels.reference import ReferenceKernel
from easy_context.kernels.torch_native import CpuFlashKernel, CudnnKernel, TorchFlashKernel
from easy_context.masks import BlockMask

__all__ = [
    "AttentionGradients",
    "AttentionPart",
    "Kernel",
    "available_kernels",
    "merge_partials",
    "require_kernel",
    "select_kernel",
]

_LOGGER = logging.getLogger("easy_context")


class _SelectableKernel(Kernel, Protocol):
    """A kernel whose class can tell, before one is made, whether it can serve certain tensors."""

    def __init__(self): ...

    @classmethod
    def refusal(cls, device: torch.device, dtype: torch.dtype, head_dim: int) -> str | None:
        """Return why not, or None."""


_HOPPER: tuple[type[_SelectableKernel], ...] = (  # compute capability 9.0 and newer, fastest first
    FlashAttn4Kernel,
    FlashAttn3Kernel,
    CudnnKernel,
    FlashAttn2Kernel,
    TorchFlashKernel,
    ReferenceKernel,
)
_OTHER_CUDA: tuple[type[_SelectableKernel], ...] = (FlashAttn2Kernel, TorchFlashKernel, ReferenceKernel)
_CPU: tuple[type[_SelectableKernel], ...] = (CpuFlashKernel, ReferenceKernel)
_BY_NAME: dict[str, type[_SelectableKernel]] = {kernel.name: kernel for kernel in (*_HOPPER, *_CPU)}


def available_kernels() -> tuple[str, ...]:
    """Return the names that :func:`select_kernel` knows beside ``"auto"``, installed or not."""
    return tuple(_BY_NAME)


def select_kernel(name: str = "auto", *, device: torch.device, dtype: torch.dtype, head_dim: int) -> Kernel:
    """Return the kernel that computes attention for such tensors, whatever the mask.

    ``"auto"`` takes the fastest that is installed and can serve them; what was chosen, and why each better
    one was not, is logged once. Windows and packed documents are computed by the reference kernel where the
    chosen one has no such mask; that too is logged once.

    Args:
        name: ``"auto"`` or one of :func:`available_kernels`.
        device, dtype, head_dim: of the queries.
    Raises: ``ValueError`` for an unknown name, or a kernel that cannot serve such tensors; ``ImportError``
        for a named kernel that is not installed, and, under ``"auto"`` too, for a better one that is
        installed but broken.
    """
    _require_known(name)
    return _choose(name, device, dtype, head_dim, torch.are_deterministic_algorithms_enabled())


def require_kernel(name: str) -> None:
    """Check a kernel's name, and that its package works, before there are tensors to choose for.

    Raises: ``ValueError`` for an unknown name, ``ImportError`` for a kernel that is not installed or broken.
    """
    _require_known(name)
    if name != "auto":
        _BY_NAME[name]()


def _require_known(name: str) -> None:
    if name != "auto" and name not in _BY_NAME:
        raise ValueError(
            f"kernel needs the name of a kernel, got {name!r}; "
            f"choose one of: auto, {', '.join(available_kernels())}"
        )


@cache
def _choose(
    name: str, device: torch.device, dtype: torch.dtype, head_dim: int, deterministic: bool
) -> Kernel:
    """Choose and log; cached, so that it is done once for each distinct question."""
    if name == "auto":
        kernel, skipped = _fastest(device, dtype, head_dim)
    else:
        kernel, skipped = _named(name, device, dtype, head_dim), []
    reasons = f" (not {'; not '.join(skipped)})" if skipped else ""
    _LOGGER.info(
        "attention kernel: %s for %s, %s, head_dim %d%s", kernel.name, device, dtype, head_dim, reasons
    )
    return kernel if "interval" in kernel.mask_kinds else _EveryMask(kernel)


def _fastest(device: torch.device, dtype: torch.dtype, head_dim: int) -> tuple[Kernel, list[str]]:
    """Return the first kernel of the order that can serve, and why each one before it was skipped."""
    skipped = []
    for kernel_class in _order(device):
        refusal = kernel_class.refusal(device, dtype, head_dim)
        if refusal is not None:
            skipped.append(f"{kernel_class.name}: {refusal}")
            continue
        try:
            return kernel_class(), skipped
        except KernelNotInstalled:
            skipped.append(f"{kernel_class.name}: not installed")
    raise ValueError(f"kernel needs tensors that some kernel can serve; {'; '.join(skipped)}")


def _named(name: str, device: torch.device, dtype: torch.dtype, head_dim: int) -> Kernel:
    kernel_class = _BY_NAME[name]
    kernel = kernel_class()
    refusal = kernel_class.refusal(device, dtype, head_dim)
    if refusal is not None:
        raise ValueError(f'{name} {refusal}; choose another kernel, or "auto" for the fastest that can')
    return kernel


def _order(device: torch.device) -> tuple[type[_SelectableKernel], ...]:
    """Return the kernels to try on a device, the fastest first."""
    if device.type == "cpu":
        return _CPU
    if device.type != "cuda":
        return (ReferenceKernel,)
    # ROCm calls its devices "cuda" too, and numbers their capabilities in its own way.
    is_hopper = torch.version.hip is None and torch.cuda.get_device_capability(device)[0] >= 9
    return _HOPPER if is_hopper else _OTHER_CUDA


class _EveryMask:
    """A kernel with the reference kernel beside it for the masks that it does not compute."""

    mask_kinds = frozenset({"full", "causal", "interval"})

    def __init__(self, kernel: Kernel):
        self.name = kernel.name
        self._kernel = kernel
        self._reference = ReferenceKernel()
        self._has_told = False

    def forward(
        self, q: Tensor, k: Tensor, v: Tensor, *, softmax_scale: float, mask: BlockMask
    ) -> AttentionPart:
        """Return the attention of ``q`` over this block of keys."""
        return self._for(mask).forward(q, k, v, softmax_scale=softmax_scale, mask=mask)

    def backward(
        self,
        dout: Tensor,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        out: Tensor,
        lse: Tensor,
        *,
        softmax_scale: float,
        mask: BlockMask,
    ) -> AttentionGradients:
        """Return this block's share of the gradients, from ``out`` and ``lse`` over all keys."""
        return self._for(mask).backward(dout, q, k, v, out, lse, softmax_scale=softmax_scale, mask=mask)

    def _for(self, mask: BlockMask) -> Kernel:
        if mask.kind in self._kernel.mask_kinds:
            return self._kernel
        if not self._has_told:
            _LOGGER.info(
                "attention kernel: reference for masks that %s does not compute (%s)", self.name, mask.kind
            )
            self._has_told = True
        return self._reference
