#!/bin/bash
# A slice of TPU VMs trains as one run, and is deleted when it has ended:
#
#   NFS=10.0.0.2:/share deploy/tpu-vm/run.sh NAME ZONE v5litepod-16 v2-alpha-tpuv5-lite PACKAGE
#
# NFS is a file system that all its workers can mount, such as Filestore's: the run directory is there, and is fetched at
# the end. PACKAGE is what pip installs, such as "podracer-rl[tpu] @ git+https://HOST/OWNER/NAME".
#
# It exits with the code of training, and with 143 where the slice was preempted: the same command then goes on. While
# training goes on the slice is not deleted, whatever happens here: after Ctrl-C, or without a network, the same command
# watches it again. Tested without the cloud; not yet run in it.
set -euo pipefail
if [ "$#" -ne 5 ] || [ -z "${NFS:-}" ]; then
    sed -n '2,7p' "$0" >&2
    exit 2
fi
name=$1 zone=$2 kind=$3 version=$4 package=$5
run_dir=/mnt/podracer/$name
pause=${PAUSE:-30} # seconds

tpu() {
    local verb=$1
    shift
    gcloud compute tpus tpu-vm "$verb" "$@" --zone "$zone"
}
on() {
    tpu ssh "$name" --worker="$1" --command "$2"
}
state() { # nothing where there is no such slice
    tpu list --format 'value(name.basename(),state)' | awk -v name="$name" '$1 == name { print $2 }'
}
thrice() { # a connection may drop at any time
    "$@" || { sleep "$pause" && "$@"; } || { sleep "$pause" && "$@"; }
}

found=$(state)
case "$found" in
    PREEMPTED | TERMINATED | STOPPED) thrice tpu delete "$name" --quiet && found= ;;
esac
[ "$found" ] || tpu create "$name" --accelerator-type "$kind" --version "$version" --spot
training=$found # if it was there, by the same command

leave() {
    local code=$?
    if [ "$training" ]; then
        echo "$0: $name may still train. The same command watches it again, and this ends it:" >&2
        echo "gcloud compute tpus tpu-vm delete $name --zone $zone" >&2
    else
        thrice tpu delete "$name" --quiet
    fi
    exit "$code"
}
trap leave EXIT

# The log is there once training has begun; until then all of this can be done again. The image's Python may be too old.
# In tmux training does not end with the connection. Users of the workers may have other numbers, and share the run.
train="podracer train ppo cartpole --total-steps 1000000000 --topology pod --resume --run-dir $run_dir"
thrice on all "set -e
    [ ! -e podracer.log ] || exit 0
    sudo apt-get update -qq -o DPkg::Lock::Timeout=300
    sudo apt-get install -qq -y -o DPkg::Lock::Timeout=300 nfs-common tmux
    sudo mkdir -p /mnt/podracer
    mountpoint -q /mnt/podracer || sudo mount -o rw '$NFS' /mnt/podracer
    sudo chmod 777 /mnt/podracer
    pip install -q --user uv
    PATH=\$HOME/.local/bin:\$PATH
    [ -e env ] || uv venv -q --python 3.12 env
    uv pip install -q --python env/bin/python '$package'
    tmux new-session -d -s podracer 'umask 0; env/bin/$train > podracer.log 2>&1; echo \$? > podracer.code'
    until [ -e podracer.log ]; do sleep 0.1; done"
training=yes

look="if [ -s podracer.code ]; then cat podracer.code
    elif tmux has-session -t podracer; then echo training; else echo gone; fi"
code='' missed=0
while [ -z "$code" ]; do
    sleep "$pause"
    if said=$(on 0 "$look" | tail -n 1) && [ "$said" ]; then
        missed=0
        case "$said" in
            training) ;;
            gone) code=1 ;;
            *) code=$said ;;
        esac
    elif now=$(state) && [[ "$now" =~ ^(PREEMPTED|TERMINATED|STOPPED|)$ ]]; then
        code=143
    elif [ "$((++missed))" -ge 20 ]; then
        exit 1
    fi
done
training=

if [ "$said" ]; then
    on 0 "tail -n 5 podracer.log" || true
    thrice tpu scp --recurse "$name:$run_dir" "$name" --worker=0 || echo "$0: fetch it from $run_dir of $NFS." >&2
fi
exit "$code"
