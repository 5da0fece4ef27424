"""Selects the torch attention kernel for the pieces of a slice.

    kernel   devices        dtypes      head size             windows  documents    log-sum-exp, natural logarithm, fp32
    cudnn    9.0 10.0 10.3  bf16 fp16   8n <= 128, 9.0: 256   no       no           [B, H, T, 1], or [B, H, T] (probed)
    flash    8.0 and later  bf16 fp16   8n <= 256             yes      yes          [B, H, T]; of documents [H, T]
    cpu      CPU            fp32 bf16   any                   no       one by one   [B, H, T], read by its strides
    tiles    any            any         any                   yes      yes          [B, H, T]

All support grouped-query attention directly (flash's backward makes key gradients for all query heads and sums them
itself), none pads its log-sum-exp, and only tiles support softcap. torch's memory-efficient kernel is not used: it
needs keys expanded to all query heads and a log-sum-exp padded to 32 queries, for dtypes that tiles support, too.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from enum import StrEnum

import torch

from mobius.models.attention import DocumentAttention, choose_attention

_LEAST_CUDNN = 91501
"""cuDNN 9.15.1; older versions are wrong where a length is not a multiple of 128 (pytorch issue 169849)."""
_CUDNN_CARDS = ((9, 0), (10, 0), (10, 3))
"""Compute capabilities where torch itself prefers cuDNN to FlashAttention."""


class AttentionKernel(StrEnum):
    """Kernels for a piece of a slice, in order of preference."""

    CUDNN = "cudnn"
    FLASH = "flash"
    CPU = "cpu"
    TILES = "tiles"


@dataclass(frozen=True)
class KernelCapabilities:
    """Features of a kernel besides plain causal attention."""

    takes_windows: bool
    takes_documents: bool
    """Several documents in one call; one document per call works with every kernel."""
    takes_softcap: bool = False


KERNEL_CAPABILITIES: Mapping[AttentionKernel, KernelCapabilities] = {
    AttentionKernel.CUDNN: KernelCapabilities(takes_windows=False, takes_documents=False),
    AttentionKernel.FLASH: KernelCapabilities(takes_windows=True, takes_documents=True),
    AttentionKernel.CPU: KernelCapabilities(takes_windows=False, takes_documents=False),
    AttentionKernel.TILES: KernelCapabilities(takes_windows=True, takes_documents=True, takes_softcap=True),
}


def choose_kernel(
    device: torch.device, dtype: torch.dtype, *, head_size: int, window: int | None, softcap: float | None
) -> AttentionKernel:
    """Return the first kernel that fits; with deterministic algorithms enabled, a deterministic one."""
    for kernel in AttentionKernel:
        if unsupported_reason(kernel, window=window, softcap=softcap) is None and is_kernel_available(
            kernel, device, dtype, head_size
        ):
            return kernel
    raise AssertionError("tiles take everything")


def is_kernel_available(kernel: AttentionKernel, device: torch.device, dtype: torch.dtype, head_size: int) -> bool:
    """Whether `kernel` runs on `device` with these heads; cuDNN only where torch prefers it."""
    if kernel is AttentionKernel.CUDNN:
        return _cudnn_fits(device, dtype, head_size)
    if kernel is AttentionKernel.FLASH:
        return _flash_fits(device, dtype, head_size)
    return kernel is AttentionKernel.TILES or (device.type == "cpu" and dtype in (torch.float32, torch.bfloat16))


def unsupported_reason(kernel: AttentionKernel, *, window: int | None, softcap: float | None) -> str | None:
    """Message on the first unsupported setting, with kernels that support it; None if `kernel` supports all."""
    limits = KERNEL_CAPABILITIES[kernel]
    if softcap is not None and not limits.takes_softcap:
        return (
            f"the kernel {kernel} does not support capped scores (attn_logit_softcapping {softcap}); "
            f"{AttentionKernel.TILES} does"
        )
    if window is not None and not limits.takes_windows:
        able = " and ".join(each for each, other in KERNEL_CAPABILITIES.items() if other.takes_windows)
        return f"the kernel {kernel} does not support windows (sliding_window {window}); {able} do"
    return None


def _cudnn_fits(device: torch.device, dtype: torch.dtype, head_size: int) -> bool:
    if not _flash_fits(device, dtype, head_size):
        return False
    capability = torch.cuda.get_device_capability(device)
    is_new = (torch.backends.cudnn.version() or 0) >= _LEAST_CUDNN
    # cuDNN attention is not deterministic.
    is_free = torch.backends.cuda.cudnn_sdp_enabled() and not torch.are_deterministic_algorithms_enabled()
    return is_free and is_new and capability in _CUDNN_CARDS and head_size <= (256 if capability == (9, 0) else 128)


def _flash_fits(device: torch.device, dtype: torch.dtype, head_size: int) -> bool:
    if device.type != "cuda":
        return False
    return choose_attention(device, dtype, head_size=head_size, softcap=None) is DocumentAttention.VARLEN
