"""Model FLOPs utilisation: what a step computes, beside what its devices could."""

import torch

PEAK_TFLOPS = {
    "H200": 989.0,
    "H100": 989.0,
    "A100": 312.0,
    "V100": 125.0,
    "MI300X": 1307.0,
    "MI250X": 191.5,
}
"""Dense bfloat16 (V100: float16) as their makers state it, by a part of the device's name."""

TRAIN_PASSES = 3
"""A step forward and back costs three times the forward pass; recomputation does not count."""


def peak_flops_per_s(device: torch.device, *, dtype: str, stated_tflops: float = 0.0) -> float:
    """Look up what a device computes at most; 0 where nobody knows.

    Args:
        device: This rank's.
        dtype: Of the computation; the table knows bfloat16 only.
        stated_tflops: Instead of the table's, if not 0.
    """
    if stated_tflops:
        return stated_tflops * 1e12
    if device.type != "cuda" or dtype != "bfloat16":
        return 0.0
    name = torch.cuda.get_device_name(device)
    return next((peak * 1e12 for part, peak in PEAK_TFLOPS.items() if part in name), 0.0)


def mfu(samples_per_s: float, *, flops_per_row: int, peak: float, world_size: int) -> float | None:
    """Compute the share of the peak that all devices reach together; None where it is unknown."""
    if not peak or not flops_per_row:
        return None
    return samples_per_s * TRAIN_PASSES * flops_per_row / (peak * world_size)


def rates(
    samples_per_s: float, *, flops_per_row: int, peak: float, world_size: int, row_tokens: int
) -> dict[str, float | None]:
    """Compute the MFU, and of text the tokens a second.

    Args:
        samples_per_s: Of all replicas.
        flops_per_row: Of one sample's forward pass.
        peak: Of a device, in FLOPs a second; 0 where nobody knows.
        world_size: Devices.
        row_tokens: Tokens of a sample; 0: it is no text.
    """
    share = mfu(samples_per_s, flops_per_row=flops_per_row, peak=peak, world_size=world_size)
    return {"mfu": share} | ({"tokens_per_s": samples_per_s * row_tokens} if row_tokens else {})
