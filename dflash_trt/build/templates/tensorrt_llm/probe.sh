#!/bin/sh
# Ready and alive mean here: tokens have been generated since this was last asked, or the model
# generates one now. Triton's own readiness says 200 whatever its model processes do, and a full
# queue refuses requests of a server that is well.
seen=${TMPDIR:-/tmp}/dflash-probe
now=$(curl --fail --silent --max-time 3 "http://127.0.0.1:${METRICS_PORT:-8002}/metrics" |
  grep '^trtllm_generation_tokens_total')
before=$(cat "$seen" 2>/dev/null)
echo "$now" >"$seen"
[ -n "$before" ] && [ -n "$now" ] && [ "$now" != "$before" ] && exit 0
exec curl --fail --silent --show-error --max-time 25 --output /dev/null \
  --data '{"text_input": "a", "max_tokens": 1}' \
  "http://127.0.0.1:${HTTP_PORT:-8000}/v2/models/dflash/generate"
