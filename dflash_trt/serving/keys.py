"""Keys between the processes of one server, and the client that the application names."""

import hmac
import os
import secrets
from collections.abc import Mapping
from typing import Any

import numpy as np

from dflash_trt.decoding.arrays import Int64
from dflash_trt.errors import ServerError

INTERNAL_KEY = "DFLASH_TRT_INTERNAL_KEY"  # the model `dflash` sends it to `verify` and `draft`
CLIENT_KEY_VARIABLE = "DFLASH_TRT_CLIENT_KEY"  # proves that CLIENT comes from the application
CLIENT = "client"  # request parameter: who asks
CLIENT_KEY = "client-key"  # request parameter
# name of who measures a drafter: drafts in each round, takes no place in the queue
MEASURING_CLIENT = "proof"


def new_key() -> str:
    return secrets.token_hex(16)


def env_value(name: str) -> str:
    value = os.environ.get(name)
    if not value:
        raise ServerError(
            f"{name} is not in the environment of this Triton server",
            "Start it with `dflash-trt serve`, or set it as docs/serving.md says.",
        )
    return value


def key_tensor() -> Int64:
    """Return the server's key for the internal models: 128 bits, shape `[2]`."""
    return np.frombuffer(bytes.fromhex(env_value(INTERNAL_KEY)), np.int64)


def is_key(shown: bytes) -> bool:
    return hmac.compare_digest(shown, bytes.fromhex(env_value(INTERNAL_KEY)))


def client_parameters(client: str, client_key: str) -> dict[str, str]:
    return {CLIENT: client, CLIENT_KEY: client_key}


def client_of(parameters: Mapping[str, Any]) -> str:
    """Return the client that the application names; "" without its key."""
    shown = str(parameters.get(CLIENT_KEY, "")).encode()
    key = os.environ.get(CLIENT_KEY_VARIABLE, "").encode()
    trusted = key and hmac.compare_digest(shown, key)
    return str(parameters.get(CLIENT, "")) if trusted else ""
