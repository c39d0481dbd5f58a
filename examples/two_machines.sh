#!/bin/bash
# A recipe on two machines or more without a scheduler. Run it on each, from the folder of a checkout:
#   MAIN_HOST=10.0.0.1 MACHINE_RANK=0 GPUS=8 examples/two_machines.sh my.yaml    # on 10.0.0.1
#   MAIN_HOST=10.0.0.1 MACHINE_RANK=1 GPUS=8 examples/two_machines.sh my.yaml    # on the other
# MACHINES counts them, CONFIG is the accelerate configuration, PORT a free port of the first machine.
set -euo pipefail

: "${1:?is missing, the recipe: examples/two_machines.sh my.yaml}"
: "${MAIN_HOST:?is not set; give the address of the first machine, the same on all}"
: "${MACHINE_RANK:?is not set; give 0 on the first machine, 1 on the next}"
: "${GPUS:?is not set; give the number of GPUs that each machine has}"
machines=${MACHINES:-2} config=${CONFIG:-configs/accelerate/fsdp2.yaml}
for name in GPUS MACHINE_RANK machines; do
  [[ ${!name} =~ ^(0|[1-9][0-9]*)$ ]] || { echo "${name^^} is ${!name}; it must be a whole number" >&2; exit 1; }
done
((MACHINE_RANK < machines)) || { echo "MACHINE_RANK is $MACHINE_RANK; it must be below MACHINES, $machines" >&2; exit 1; }
[[ -f $config ]] || { echo "CONFIG is $config, which is no file in $PWD; start in a checkout, or set CONFIG" >&2; exit 1; }

exec accelerate launch --config_file "$config" \
  --num_machines "$machines" --num_processes "$((machines * GPUS))" --machine_rank "$MACHINE_RANK" \
  --main_process_ip "$MAIN_HOST" --main_process_port "${PORT:-29500}" \
  -m liger_trainer train "$@"
