"""The values of exported codes by ModelOpt's own classes; importing it changes transformers."""

import torch
from modelopt.torch.quantization.qtensor import FP8QTensor, NVFP4QTensor


def dequantized(tensors: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """Return the float32 values of the quantized ones, by name."""
    found = {}
    for name, codes in tensors.items():
        scale, double = tensors.get(f"{name}_scale"), tensors.get(f"{name}_scale_2")
        if double is not None:
            shape = (codes.shape[0], codes.shape[1] * 2)
            found[name] = NVFP4QTensor(shape, torch.float32, codes).dequantize(
                scale=scale, double_scale=double, block_sizes={-1: 16}
            )
        elif scale is not None:
            found[name] = FP8QTensor(codes.shape, torch.float32, codes).dequantize(scale=scale)
    return found
