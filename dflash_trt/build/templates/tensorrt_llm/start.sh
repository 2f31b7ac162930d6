#!/usr/bin/env bash
# What the container runs: a rank on each GPU, and Triton open to the network but for what changes
# the server, which is behind a key that nobody is given. Arguments go to mpirun, TRITON_ARGS to Triton.
set -euo pipefail

cd "$(dirname "${BASH_SOURCE[0]}")/.."
key=$(openssl rand -hex 32)
closed={{ closed }}
export TRITON_ARGS="--http-address=0.0.0.0 --grpc-address=0.0.0.0 --metrics-address=0.0.0.0 \
  --http-restricted-api=$closed:admin-key=$key --grpc-restricted-protocol=$closed:admin-key=$key ${TRITON_ARGS:-}"
exec launch/mpi.sh "$@"
