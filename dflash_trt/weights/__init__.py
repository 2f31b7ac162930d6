"""Weights: tensors out of safetensors and GGUF files, quantized ones too, read when asked for."""

from dflash_trt.weights.gguf import Blocks, Form
from dflash_trt.weights.json_file import read_bytes, read_json
from dflash_trt.weights.stored import MODELOPT_FILE, Span
from dflash_trt.weights.weights import INDEX, Weights, open_files
