"""Builds: from a config to a directory that `serve` accepts."""

from dflash_trt.builder.manifest import (
    Depth,
    Manifest,
    check_build,
    differences,
    read_manifest,
    speculation_of,
)
