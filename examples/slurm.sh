#!/bin/bash
# A recipe on several machines with Slurm, from the folder of a checkout:
#   sbatch --nodes=2 --gpus-per-node=8 examples/slurm.sh my.yaml --learning_rate 1e-5
# CONFIG is the accelerate configuration, PORT a free port of the first machine.
#SBATCH --job-name=liger_trainer
#SBATCH --nodes=2
#SBATCH --ntasks-per-node=1
#SBATCH --gpus-per-node=8
#SBATCH --cpus-per-task=64
#SBATCH --time=24:00:00
#SBATCH --signal=TERM@120
#SBATCH --requeue
set -euo pipefail

: "${1:?is missing, the recipe: sbatch examples/slurm.sh my.yaml}"
: "${SLURM_JOB_NODELIST:?is not set; Slurm sets it: start this script with sbatch}"
: "${SLURM_GPUS_ON_NODE:?is not set; ask for GPUs: sbatch --gpus-per-node=8}"
export CONFIG=${CONFIG:-configs/accelerate/fsdp2.yaml} PORT=${PORT:-29500}
[[ -f $CONFIG ]] || { echo "CONFIG is $CONFIG, which is no file in $PWD; submit from a checkout, or set CONFIG" >&2; exit 1; }

hosts=$(scontrol show hostnames "$SLURM_JOB_NODELIST")
export MAIN_HOST=${hosts%%$'\n'*}  # the first
export SRUN_CPUS_PER_TASK=${SLURM_CPUS_PER_TASK:-1}  # srun does not take it from sbatch by itself

# One task a machine starts the launcher, which starts one process a GPU.
srun bash -c 'accelerate launch --config_file "$CONFIG" \
  --num_machines "$SLURM_NNODES" --num_processes "$((SLURM_NNODES * SLURM_GPUS_ON_NODE))" --machine_rank "$SLURM_NODEID" \
  --main_process_ip "$MAIN_HOST" --main_process_port "$PORT" \
  -m liger_trainer train "$@" --resume_from_checkpoint true' bash "$@"
