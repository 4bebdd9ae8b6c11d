#!/usr/bin/env bash
# Two nodes that this machine reaches by ssh, one thinwire worker each; all GPUs of a node are one
# worker. Usage: ssh.sh NODE0 NODE1 -- train.py [ARGUMENTS]   (the same path on both)
set -euo pipefail

usage="usage: ssh.sh NODE0 NODE1 -- train.py [ARGUMENTS]"
nodes=()
while [[ $# -gt 0 && $1 != -- ]]; do nodes+=("$1"); shift; done
if [[ ${#nodes[@]} -eq 0 || $# -lt 2 ]]; then echo "$usage" >&2; exit 2; fi
shift
# Worker 0's address as the others reach it; open this port, and those that the system chooses.
meet="${MEET:-${nodes[0]}:29400}"
gpus="${GPUS:-8}"

started=()
for worker in "${!nodes[@]}"; do
  ssh -o BatchMode=yes "${nodes[$worker]}" \
    "cd '$PWD' && THINWIRE_AT='tcp://$meet?workers=${#nodes[@]}&worker=$worker' \
     torchrun --standalone --nproc-per-node $gpus $*" > >(sed "s/^/[${nodes[$worker]}] /") 2>&1 &
  started+=($!)
done
# The first that fails ends all: the others would wait for it until their timeout.
status=0
for _ in "${started[@]}"; do wait -n || { status=$?; break; }; done
if [[ $status -ne 0 ]]; then kill "${started[@]}" 2>/dev/null || true; fi
exit "$status"
