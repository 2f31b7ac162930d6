#!/usr/bin/env bash
# The other pods of a LeaderWorkerSet group: an sshd of this user, for the leader's mpirun.
set -euo pipefail

keys=$HOME/.sshd
install -D --mode=600 /etc/dflash-ssh/id.pub "$keys/authorized"
[ -f "$keys/host" ] || ssh-keygen -q -t ed25519 -N '' -f "$keys/host"
# the variables of this pod go to the ranks: a login has none of them
mkdir -p "$HOME/.ssh"
env | grep -E '^(PATH|LD_LIBRARY_PATH|OPAL_PREFIX|HF_|NCCL_|NVIDIA_|CUDA_)' > "$HOME/.ssh/environment"
exec /usr/sbin/sshd -D -e -f /dev/null -p 2222 -h "$keys/host" \
  -o "AuthorizedKeysFile=$keys/authorized" -o PidFile=none -o UsePAM=no -o StrictModes=no \
  -o PasswordAuthentication=no -o PermitUserEnvironment=yes
