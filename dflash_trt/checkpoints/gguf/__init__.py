"""GGUF files (llama.cpp) as the source of a target.

`convert.py` writes what a Hugging Face directory would hold beside the weights, so that nothing
else has to know of the format; the weights stay in the file (`tensors.py`).
"""
