"""OpenVINO GenAI for scripts/engines_table.py, in an environment of its own.

    PYTHON openvino_worker.py MODEL THREADS

MODEL: what optimum-intel exported. Asked as `torch_worker` of scripts/peers.py is, it answers by
[seconds].
"""

from __future__ import annotations

import json
import sys
import time

import numpy as np
import openvino as ov
import openvino_genai as genai


def main(model: str, threads: int) -> None:
    hints = {"INFERENCE_NUM_THREADS": threads, "INFERENCE_PRECISION_HINT": "f32"}
    pipe = genai.LLMPipeline(model, "CPU", KV_CACHE_PRECISION="f32", **hints)

    def generate(prompts: list[list[int]], tokens: int) -> None:
        ids = np.array(prompts, np.int64)
        inputs = genai.TokenizedInputs(ov.Tensor(ids), ov.Tensor(np.ones_like(ids)))
        pipe.generate(inputs, genai.GenerationConfig(max_new_tokens=tokens, ignore_eos=True))

    generate([[1] * 64], 8)  # warm-up
    for line in sys.stdin:
        _, prompts, tokens, _ = json.loads(line)
        start = time.perf_counter()
        generate(prompts, tokens)
        print(json.dumps([time.perf_counter() - start]), flush=True)


if __name__ == "__main__":
    main(sys.argv[1], int(sys.argv[2]))
