"""NCCL between the ranks of an engine on GPUs, one process each (see `ranks.py`).

Written after the documentation of nccl4py and of TensorRT's multi-device inference, and checked
against nccl4py's types. It has never run: that takes a machine with two GPUs.

    rank 0    hello = new_id(); Leader(directory, ranks, hello); join(0, ranks, hello)
    others    join(rank, ranks, follower.hello)
    all       give(context, communicator), for each execution context
"""

import ctypes
from typing import Any, Protocol

from nccl.core import Communicator, UniqueId, get_unique_id

_NAME = b"ncclComm_t"  # by which TensorRT knows the capsule; it must live as long as that


class Context(Protocol):
    """What is needed here of TensorRT's IExecutionContext (10.16 and later)."""

    def set_communicator(self, communicator: Any) -> bool: ...


def new_id() -> bytes:
    """What the ranks of a group find each other by; rank 0 makes it and tells the others."""
    return bytes(get_unique_id())


def join(rank: int, ranks: int, hello: bytes) -> Communicator:
    """The communicator of a rank, for the current CUDA device.

    Returns when all ranks have called it.
    """
    return Communicator.init(ranks, rank, UniqueId.from_bytes(hello))


def give(context: Context, communicator: Communicator) -> bool:
    """Have the collectives of an execution context go through it; False if TensorRT refuses.

    This too returns when all ranks have called it. Each does so in its own process: one after the
    other they would wait for ever. The communicator has to live as long as the context.
    """
    new = ctypes.pythonapi.PyCapsule_New
    new.restype, new.argtypes = (
        ctypes.py_object,
        (ctypes.c_void_p, ctypes.c_char_p, ctypes.c_void_p),
    )
    return context.set_communicator(new(communicator.ptr, _NAME, None))
