"""Presets of machines: memory and speed of their GPUs.

Figures are NVIDIA's, without sparsity: DGX B300, DGX B200, GB200 NVL72, GB300 NVL72, HGX H200 and
HGX H100 data sheets. `memory_bytes` is what `nvidia-smi` shows (275040, 183359, 284208, 189471,
143771 and 81559 MiB), which is less than the data sheets of Blackwell GPUs. Hopper has no FP4
units: its "fp4" is missing, and FP4 weights are multiplied in bf16.
"""

from collections.abc import Mapping
from dataclasses import dataclass

from pydantic import ConfigDict, NonNegativeInt, PositiveFloat, PositiveInt

from dflash_trt.errors import ConfigError

# descriptions below fields are used in the config's JSON Schema
STRICT = ConfigDict(extra="forbid", use_attribute_docstrings=True)


@dataclass(frozen=True)
class Flops:
    """Dense FLOP/s by the type that is multiplied; None: the GPU does not have it."""

    __pydantic_config__ = STRICT

    bf16: PositiveFloat
    """dense FLOP/s in bf16"""
    fp8: PositiveFloat | None = None
    """dense FLOP/s in FP8"""
    fp4: PositiveFloat | None = None
    """dense FLOP/s in FP4"""


@dataclass(frozen=True)
class Gpu:
    """One GPU. Also a mapping of these fields in a build config."""

    __pydantic_config__ = STRICT

    name: str
    """what it is called"""
    sm: PositiveInt
    """compute capability without its dot: 90, 100, 103"""
    memory_bytes: PositiveInt
    """all that the driver shows"""
    bandwidth: PositiveFloat
    """of its memory, bytes/s"""
    flops: Flops
    """by the type that is multiplied"""
    link_bandwidth: PositiveFloat
    """NVLink to the other GPUs of its domain, bytes/s one way"""


@dataclass(frozen=True)
class Machine:
    """Nodes of equal GPUs. Also a mapping of these fields in a build config."""

    __pydantic_config__ = STRICT

    name: str
    """what it is called"""
    gpu: Gpu
    """each of them"""
    gpus: PositiveInt
    """of one node"""
    nodes: PositiveInt = 1
    """how many there are"""
    nvlink_gpus: NonNegativeInt = 0
    """GPUs that NVLink joins, over nodes too; 0: those of a node"""

    @property
    def all_gpus(self) -> int:
        return self.gpus * self.nodes

    @property
    def domain(self) -> int:
        """GPUs that one model instance may span over NVLink."""
        return min(self.all_gpus, self.nvlink_gpus or self.gpus)


MIB = 1 << 20
H100 = Gpu("H100 SXM", 90, 81559 * MIB, 3.35e12, Flops(0.989e15, 1.979e15), 450e9)
H200 = Gpu("H200 SXM", 90, 143771 * MIB, 4.8e12, Flops(0.989e15, 1.979e15), 450e9)
B200 = Gpu("B200", 100, 183359 * MIB, 8e12, Flops(2.25e15, 4.5e15, 9e15), 900e9)
B300 = Gpu("B300", 103, 275040 * MIB, 8e12, Flops(2.25e15, 4.5e15, 13.1e15), 900e9)
GB200 = Gpu("GB200", 100, 189471 * MIB, 8e12, Flops(2.5e15, 5e15, 10e15), 900e9)
GB300 = Gpu("GB300", 103, 284208 * MIB, 8e12, Flops(2.5e15, 5e15, 15e15), 900e9)

PRESETS: Mapping[str, Machine] = {
    machine.name: machine
    for machine in (
        Machine("dgx-b300", B300, 8),
        Machine("dgx-b200", B200, 8),
        # two trays of four GPUs; NVLink joins all 72 of the rack
        Machine("gb300-nvl72-slice", GB300, 4, nodes=2, nvlink_gpus=72),
        Machine("gb200-nvl72-slice", GB200, 4, nodes=2, nvlink_gpus=72),
        Machine("hgx-h200", H200, 8),
        Machine("hgx-h100", H100, 8),
    )
}


def find_machine(given: str | Machine) -> Machine:
    """Return the machine of `engine.hardware`; ConfigError naming the known ones."""
    if isinstance(given, Machine):
        return given
    if given not in PRESETS:
        raise ConfigError(
            f"engine.hardware: no machine is called {given!r}",
            f"Take one of {', '.join(PRESETS)}, or describe your own by its fields",
        )
    return PRESETS[given]
