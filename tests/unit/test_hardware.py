"""Machines: the presets, and a user's own."""

import pytest
import yaml
from pydantic import TypeAdapter, ValidationError

from dflash_trt.errors import ConfigError
from dflash_trt.planning import PRESETS, Machine, machine

OWN = """
name: lab
gpus: 4
gpu:
  name: H100 NVL
  sm: 90
  memory_bytes: 100_000_000_000
  bandwidth: 3.9e+12
  flops: {bf16: 8.0e+14, fp8: 1.6e+15}
  link_bandwidth: 3.0e+11
"""


def test_presets_are_known_by_name() -> None:
    assert machine("dgx-b300") is PRESETS["dgx-b300"]
    assert machine("gb300-nvl72-slice").domain == 8
    with pytest.raises(ConfigError, match=r"'dgx-a100'.*dgx-b300, dgx-b200"):
        machine("dgx-a100")


def test_an_own_machine_is_a_mapping() -> None:
    own = TypeAdapter(str | Machine).validate_python(yaml.safe_load(OWN))
    assert machine(own) is own
    assert (own.domain, own.gpu.sm, own.gpu.flops.fp8) == (4, 90, 1.6e15)


def test_an_own_machine_has_no_other_fields() -> None:
    with pytest.raises(ValidationError, match="watts"):
        TypeAdapter(Machine).validate_python(yaml.safe_load(OWN) | {"watts": 700})
