"""The part of Triton's driver (the language) that a compiler needs, for a GPU that is not here.

Follows `triton.backends.driver.GPUDriver` of Triton 3.5 to 3.9: compiling asks for the target, the
device and the stream. Whatever needs a GPU is missing, and ends in an AttributeError.
"""

from dataclasses import dataclass

from triton.backends.compiler import GPUTarget

WARP = 32  # threads


@dataclass(frozen=True)
class Driver:
    capability: int  # 90 for 9.0

    def get_current_target(self) -> GPUTarget:
        return GPUTarget("cuda", self.capability, WARP)

    def get_current_device(self) -> int:
        return 0

    def get_current_stream(self, device: int) -> int:
        return device
