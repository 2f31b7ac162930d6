"""GGUF files (llama.cpp) as the source of a target.

`convert.py` writes what a Hugging Face directory would hold beside the weights, so that nothing
else has to know of the format; the weights stay in the file (`tensors.py`).
"""

from dflash_trt.checkpoints.gguf.blocks import BITS, Blocks
from dflash_trt.checkpoints.gguf.convert import as_directory, packaged
from dflash_trt.checkpoints.gguf.tensors import LINK, Packed, open_tensors
