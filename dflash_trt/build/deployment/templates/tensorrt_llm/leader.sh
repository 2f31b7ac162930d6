#!/usr/bin/env bash
# The first pod of a LeaderWorkerSet group: waits for the others, then starts a rank for each GPU of
# the group; the first rank runs Triton.
set -euo pipefail

install -D --mode=600 /etc/dflash-ssh/id "$HOME/.ssh/id"
# the pods' host keys are made at their start; only the holders of the Secret can log in
ssh=(-i "$HOME/.ssh/id" -p 2222 -o StrictHostKeyChecking=no -o UserKnownHostsFile=/dev/null -o LogLevel=ERROR)

# NAME-0.NAME.NAMESPACE is the leader, NAME-0-1.NAME.NAMESPACE the first worker
leader=${LWS_LEADER_ADDRESS%%.*} domain=${LWS_LEADER_ADDRESS#*.}
hosts=$LWS_LEADER_ADDRESS:{{ gpus }}
for ((i = 1; i < LWS_GROUP_SIZE; i++)); do
  worker=$leader-$i.$domain
  for ((tries = 0; tries < 120; tries++)); do
    ssh "${ssh[@]}" "$worker" true 2>/dev/null && break
    sleep 5
  done
  ssh "${ssh[@]}" "$worker" true || { echo "worker $worker does not answer on port 2222" >&2; exit 1; }
  hosts+=,$worker:{{ gpus }}
done
exec "$(dirname "${BASH_SOURCE[0]}")/start.sh" --host "$hosts" --mca plm_rsh_args "${ssh[*]}"
