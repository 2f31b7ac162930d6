#!/usr/bin/env bash
# One of several tasks, started in the build's folder. TensorRT-LLM's launcher runs Triton in the
# background: it passes on neither SIGTERM nor Triton's exit code, and hangs if that is not 0.
set -euo pipefail

if [ -n "${DFLASH_TRT_TASK:-}" ]; then  # the launcher calls this, in the first task
  bash launch/single_node.sh "$@" &
  echo $! > "$DFLASH_TRT_TASK/pid"
  code=0
  wait $! || code=$?
  echo "$code" > "$DFLASH_TRT_TASK/code"
  exit 0  # then the launcher stops the other tasks
fi
DFLASH_TRT_TASK=$(mktemp -d)
export DFLASH_TRT_TASK
trap 'rm -rf "$DFLASH_TRT_TASK"' EXIT
trap '[ ! -s "$DFLASH_TRT_TASK/pid" ] || kill -TERM "$(<"$DFLASH_TRT_TASK/pid")"' TERM INT
trtllm-llmapi-launch bash launch/task.sh "$@" &
code=0
wait $! || code=$?
while kill -0 $! 2>/dev/null; do  # a signal ended the wait
  code=0
  wait $! || code=$?
done
[ ! -s "$DFLASH_TRT_TASK/code" ] || code=$(<"$DFLASH_TRT_TASK/code")
exit "$code"
