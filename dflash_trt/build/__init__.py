"""From a build config to a directory that `serve` takes."""
