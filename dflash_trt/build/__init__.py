"""From a build config to a directory that `serve` takes."""

from dflash_trt.build.manifest import (
    Depth,
    Manifest,
    check_build,
    differences,
    read_manifest,
    speculation_of,
)
