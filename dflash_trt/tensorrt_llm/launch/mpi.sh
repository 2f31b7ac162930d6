#!/usr/bin/env bash
# Serves this build through Open MPI: @RANKS@ tasks, @GPUS@ on each machine; the first runs Triton.
#
#   launch/mpi.sh [MPIRUN OPTIONS]     --hostfile HOSTS where there are several machines,
#                                      --allow-run-as-root in a container
#
# The build must lie at the same path on every machine. What Triton is to be told stands in
# TRITON_ARGS. Not run on a cluster by whoever wrote this: TensorRT-LLM calls its launcher
# experimental, and its Triton documentation says that tensor parallelism over nodes is not
# supported yet.
set -euo pipefail

DFLASH_TRT_BUILD=$(cd "$(dirname "${BASH_SOURCE[0]}")/.." && pwd)
export DFLASH_TRT_BUILD TRITON_ARGS="${TRITON_ARGS:-}"
# shellcheck disable=SC2016  # each task expands it
exec mpirun -np @RANKS@ --map-by ppr:@GPUS@:node \
  -x DFLASH_TRT_BUILD -x TRITON_ARGS -x PMIX_MCA_gds=hash -x UCX_UD_TIMEOUT=120s "$@" bash -c '
  cd "$DFLASH_TRT_BUILD" && . engines/tensorrt_llm/env.sh &&
  exec launch/task.sh $TRITON_ARGS'
