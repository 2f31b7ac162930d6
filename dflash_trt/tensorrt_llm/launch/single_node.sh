#!/usr/bin/env bash
# Serves this build with the tritonserver of this machine or container. More arguments go to it:
# it answers on this machine only unless they say otherwise (--http-address=0.0.0.0 ...).
# The Python of its models must have dflash-trt and tensorrt_llm.
set -euo pipefail

build=$(cd "$(dirname "${BASH_SOURCE[0]}")/.." && pwd)
case $build in
*[[:space:]]*)
  echo "Triton starts no Python model under a path with a space: move $build" >&2
  exit 2
  ;;
esac
nodes=@NODES@
if [ "$nodes" -gt 1 ] && [ -z "${TLLM_SPAWN_PROXY_PROCESS:-}" ]; then
  echo "this build takes $nodes machines: start it with launch/slurm.sh or launch/mpi.sh" >&2
  exit 2
fi
# shellcheck source=/dev/null
. "$build/engines/tensorrt_llm/env.sh"
umask 077  # shared memory holds prompts
DFLASH_TRT_RUNTIME=$(mktemp -d /tmp/dflash-trt-XXXXXXXX)  # for a socket between the models
export DFLASH_TRT_RUNTIME
exec tritonserver \
  --model-repository="$build/model_repository" \
  --model-control-mode=explicit --load-model='*' \
  --http-address=127.0.0.1 --grpc-address=127.0.0.1 --metrics-address=127.0.0.1 \
  --disable-auto-complete-config \
  "$@"
