#!/bin/bash
# A slice of TPU VMs trains as one run, and is deleted when it has ended:
#
#   NFS=10.0.0.2:/share deploy/tpu-vm/run.sh NAME ZONE v5litepod-16 v2-alpha-tpuv5-lite PACKAGE
#
# NFS is a file system that all its workers can mount, such as Filestore's: the run directory is there, and the same
# command goes on after a preemption. PACKAGE is what pip installs, such as podracer-rl[tpu].
# Written after the manuals of Cloud TPU; not yet run there.
set -euo pipefail
if [ "$#" -ne 5 ] || [ -z "${NFS:-}" ]; then
    sed -n '2,8p' "$0" >&2
    exit 2
fi
name=$1 zone=$2 kind=$3 version=$4 package=$5
run_dir=/mnt/podracer/$name

everywhere() {
    gcloud compute tpus tpu-vm ssh "$name" --zone "$zone" --worker=all --command "$1"
}

gcloud compute tpus tpu-vm create "$name" --zone "$zone" --accelerator-type "$kind" --version "$version" --spot
trap 'gcloud compute tpus tpu-vm delete "$name" --zone "$zone" --quiet' EXIT

everywhere "sudo apt-get install -qq -y nfs-common tmux && sudo mkdir -p /mnt/podracer \
    && sudo mount -o rw $NFS /mnt/podracer && sudo chmod 777 /mnt/podracer"
everywhere "pip install -q '$package'"

# In tmux, so that it does not end with the connection; the log of each worker stays on the worker.
train="podracer train ppo cartpole --total-steps 1000000000 --topology pod --resume --run-dir $run_dir"
everywhere "tmux new-session -d -s podracer \"\$HOME/.local/bin/$train > podracer.log 2>&1\""
gcloud compute tpus tpu-vm ssh "$name" --zone "$zone" --worker=0 \
    --command "while tmux has-session -t podracer 2>/dev/null; do sleep 30; done; tail -n 5 podracer.log"
gcloud compute tpus tpu-vm scp --recurse "$name:$run_dir" "$name" --zone "$zone" --worker=0
