#!/usr/bin/env bash
#SBATCH --job-name=thinwire
#SBATCH --nodes=1
#SBATCH --ntasks-per-node=1
#SBATCH --gpus-per-node=8
#SBATCH --requeue
# One job a site; a site is one worker. Submit it at each, with its own number:
#   export THINWIRE_AT='tcp://login0.example.org:29400?workers=2&worker=0'
#   sbatch --export=ALL slurm.sh train.py
# The address must be one of the node that runs worker 0: sites that cannot be reached from outside
# need a tunnel to it, such as `ssh -N -R 29400:localhost:29400 login0.example.org`, and gloo's own
# connections a network that both are on (docs/launching.md).
set -euo pipefail

: "${THINWIRE_AT:?}"
srun torchrun --standalone --nproc-per-node "${SLURM_GPUS_ON_NODE:-1}" "$@"
