"""What an engine kind is: a record that other rooms read where kinds differ.

A kind is a record here, a section of the config with its `written` (`config/build.py`), and its
modules in `engines/`.
"""

from dataclasses import dataclass
from typing import Literal

GraphKind = Literal["onnxruntime", "pytorch", "tensorrt"]  # kinds that step graphs


@dataclass(frozen=True, kw_only=True)
class GraphFacts:
    """What is so of a kind whose engines are made from graphs; modules are those of `engines/`."""

    engine: str  # module with the class `Engine`
    compiler: str | None = None  # module that turns built graphs of kind onnxruntime into this kind
    machine: str | None = None  # module with `check_machine`, which raises EngineError
    # how the graph is written
    runtime_operators: bool = False  # with operators of ONNX Runtime's own
    data_dependent_shapes: bool = False  # computes chosen experts alone
    experts_as_stored: bool = False  # in the checkpoint's dtype, else float32
    why_no_recurrence: str | None = None  # why there are no hybrids
    # how it is stepped
    records_steps: bool = True  # a size is prepared when it first occurs, so sizes are few
    longest_step: int | None = None  # tokens of a sequence; None: any
    # how it is served
    compiles_kernels: bool = False  # at the first use
    is_planned: bool = False  # `plan` knows how long its steps take


@dataclass(frozen=True, kw_only=True)
class EngineKind:
    name: str
    gpus: int  # of a server, unless its config says how many
    notes: tuple[str, ...] = ()  # what is not shown of it
    unused: frozenset[str] = frozenset()  # packages that its server does without
    used: frozenset[str] = frozenset()  # packages that otherwise only a build needs
    graphs: GraphFacts | None  # None: it reads checkpoints and runs rounds itself


ONNXRUNTIME = EngineKind(
    name="onnxruntime",
    gpus=0,
    graphs=GraphFacts(
        engine="onnxruntime",
        runtime_operators=True,
        data_dependent_shapes=True,
        records_steps=False,
    ),
)
PYTORCH = EngineKind(
    name="pytorch",
    gpus=1,
    notes=("it was run on a CPU alone, its kernels in Triton's interpreter",),
    unused=frozenset({"onnxruntime"}),
    used=frozenset({"onnx-ir"}),  # reads graphs
    graphs=GraphFacts(
        engine="pytorch.engine",
        machine="pytorch.machine",
        experts_as_stored=True,
        longest_step=512,  # what attention keeps of more is large
        compiles_kernels=True,
        is_planned=True,
    ),
)
TENSORRT = EngineKind(
    name="tensorrt",
    gpus=1,
    notes=("its plans were built and checked, never run",),
    graphs=GraphFacts(
        engine="tensorrt.engine",
        compiler="tensorrt.plan",
        machine="tensorrt.library",
        why_no_recurrence="TensorRT has no LinearAttention (opset 27): a plugin for it is wanted",
    ),
)
TENSORRT_LLM = EngineKind(
    name="tensorrt_llm",
    gpus=1,
    unused=frozenset({"llguidance", "onnxruntime"}),
    graphs=None,
)

KINDS = {kind.name: kind for kind in (ONNXRUNTIME, PYTORCH, TENSORRT, TENSORRT_LLM)}


def graph_facts(kind: GraphKind) -> GraphFacts:
    facts = KINDS[kind].graphs
    assert facts is not None
    return facts
