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
machines=${MACHINES:-2} config=${CONFIG:-configs/accelerate/fsdp2.yaml} port=${PORT:-29500}
for name in GPUS MACHINE_RANK machines port; do
  [[ ${!name} =~ ^(0|[1-9][0-9]*)$ ]] || { echo "${name^^} is ${!name}; it must be a whole number" >&2; exit 1; }
done
((GPUS > 0)) || { echo "GPUS is 0; give the number of GPUs that each machine has" >&2; exit 1; }
((0 < port && port < 65536)) || { echo "PORT is $port; it must be from 1 to 65535" >&2; exit 1; }
((MACHINE_RANK < machines)) || { echo "MACHINE_RANK is $MACHINE_RANK; it must be below MACHINES, $machines" >&2; exit 1; }
[[ -f $config ]] || { echo "CONFIG is $config, which is no file in $PWD; start in a checkout, or set CONFIG" >&2; exit 1; }
if ((MACHINE_RANK == 0)) && (exec 3<>"/dev/tcp/127.0.0.1/$port") 2>/dev/null; then
  echo "PORT is $port, which another program of this machine has; set it to a free one, the same on all machines" >&2; exit 1
fi
if command -v getent >/dev/null; then
  found=$(getent ahosts "$MAIN_HOST") || { echo "MAIN_HOST is $MAIN_HOST, which has no address here; give one that all machines reach" >&2; exit 1; }
  elsewhere=1
  for address in $(cut -d ' ' -f 1 <<<"$found"); do
    [[ $address == 127.* || $address == ::1 || " $(hostname -I) " == *" $address "* ]] && elsewhere=0
  done
  ((elsewhere == (MACHINE_RANK > 0))) || echo "MAIN_HOST is $MAIN_HOST and MACHINE_RANK $MACHINE_RANK: is this the first machine? 0 is the one at MAIN_HOST" >&2
fi
echo "machine $MACHINE_RANK of $machines waits for the others at $MAIN_HOST:$port, for ten minutes" >&2

exec accelerate launch --config_file "$config" \
  --num_machines "$machines" --num_processes "$((machines * GPUS))" --machine_rank "$MACHINE_RANK" \
  --main_process_ip "$MAIN_HOST" --main_process_port "$port" \
  -m liger_trainer train "$@"
