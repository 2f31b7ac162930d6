#!/usr/bin/env bash
# Fetches the target into the Hub's cache, at the commit of the build: without the copies that gpt-oss
# has of its weights in two more formats, which TensorRT-LLM would fetch too.
set -euo pipefail

cd "$(dirname "${BASH_SOURCE[0]}")/.."
target=$(python3 -c 'import json
target = json.load(open("manifest.json"))["hub"]["target"]
print(target["id"], "--revision", target["commit"])')
# shellcheck disable=SC2086  # three words
exec hf download $target --exclude "original/*" --exclude "metal/*"
