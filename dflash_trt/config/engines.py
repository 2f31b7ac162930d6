"""What runs the two models: a section for each engine kind, chosen by `kind`."""

from typing import Literal

from pydantic import Field

from dflash_trt.config.section import Count, Section


class OnnxRuntime(Section):
    """Graphs on any CPU."""

    kind: Literal["onnxruntime"] = Field(default="onnxruntime", description="onnxruntime: any CPU")
    threads: Count = Field(default=2, description="CPU threads of one engine call")
    weights: Literal["copy", "link"] = Field(
        default="copy",
        description="copy: the build stands alone; link: it reads what it can from the original "
        "checkpoint files, which must stay as they are; saves disk, loads more slowly",
    )
    quantize: Literal["int8", "int4"] | None = Field(
        default=None,
        description="linear layers in int8 or int4, 32 weights with one scale; `build` measures "
        "what it costs in accuracy; unset: as the checkpoint has them",
    )


class TensorRT(Section):
    """Plans built from the same graphs."""

    kind: Literal["tensorrt"] = Field(description="tensorrt: NVIDIA GPUs")


class TensorRTLLM(Section):
    """A bundle for TensorRT-LLM's PyTorch backend."""

    kind: Literal["tensorrt_llm"] = Field(description="tensorrt_llm: NVIDIA GPUs, many at once")
