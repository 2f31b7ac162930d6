#!/usr/bin/env bash
# Serves this build through Slurm: @NODES@ x @GPUS@ tasks, one for each GPU; the first runs Triton.
#
#   launch/slurm.sh [SRUN OPTIONS]     for a container of pyxis: --container-image=IMAGE
#                                      --container-mounts=BUILD:BUILD
#   sbatch --nodes=@NODES@ --ntasks-per-node=@GPUS@ --wrap 'BUILD/launch/slurm.sh'
#
# The build must lie at the same path on every machine. What Triton is to be told stands in
# TRITON_ARGS. Not run on a cluster by whoever wrote this: TensorRT-LLM calls its launcher
# experimental, and its Triton documentation says that tensor parallelism over nodes is not
# supported yet.
set -euo pipefail

DFLASH_TRT_BUILD=$(cd "$(dirname "${BASH_SOURCE[0]}")/.." && pwd)
export DFLASH_TRT_BUILD TRITON_ARGS="${TRITON_ARGS:-}"
# as TensorRT-LLM's own triton_backend/scripts/triton_task.sh has them
export PMIX_MCA_gds=hash UCX_UD_TIMEOUT=120s
# shellcheck disable=SC2016  # each task expands it
exec srun --nodes=@NODES@ --ntasks-per-node=@GPUS@ --mpi=pmix --kill-on-bad-exit=1 "$@" bash -c '
  cd "$DFLASH_TRT_BUILD" && . engines/tensorrt_llm/env.sh &&
  exec launch/task.sh $TRITON_ARGS'
