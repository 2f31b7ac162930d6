"""What `choose_args` gives."""

from dataclasses import dataclass
from typing import Any

import yaml
from pydantic import PrivateAttr

from dflash_trt.config import Version
from dflash_trt.tensorrt_llm.schema import DFlashDecodingConfig, TorchLlmArgs


@dataclass(frozen=True)
class Chosen:
    """One argument and why it is as it is."""

    argument: str  # of LLM(...), dotted
    value: Any
    why: str
    source: str


class LlmArgs(TorchLlmArgs):
    """`LLM(...)`'s arguments for one version; what is not set is upstream's default."""

    speculative_config: DFlashDecodingConfig = DFlashDecodingConfig()

    _version: Version = PrivateAttr()
    _chosen: tuple[Chosen, ...] = PrivateAttr()

    @property
    def version(self) -> Version:
        """Of TensorRT-LLM, that they are typed for."""
        return self._version

    @property
    def chosen(self) -> tuple[Chosen, ...]:
        """What is set, in the order of the rules; overrides without a rule come last."""
        return self._chosen

    def to_dict(self) -> dict[str, Any]:
        """What is set, ready for `LLM(**...)`."""
        return self.model_dump(exclude_unset=True)

    def to_yaml(self) -> str:
        """The same as a file, for `TorchLlmArgs.from_yaml` and `trtllm-serve --config`."""
        return yaml.safe_dump(self.to_dict(), sort_keys=False, allow_unicode=True)
