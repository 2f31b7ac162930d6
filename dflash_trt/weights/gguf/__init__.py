"""GGUF files (llama.cpp): tensors by Hugging Face name, and a file as a checkpoint directory.

The `gguf` package, an extra, reads the header and knows the formats. Blocks of integers can also be
read as stored, for our quantized graphs.
"""

from dflash_trt.weights.gguf.blocks import PLAIN, Blocks, Form, Packed
from dflash_trt.weights.gguf.directory import LINK, as_directory, find_packaged_file, open_tensors
from dflash_trt.weights.gguf.tensors import Stack, cut_stack, left_out, tensor_types
