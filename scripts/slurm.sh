#!/usr/bin/env bash
# A SLURM of one machine for the tests of cluster=slurm: Debian's, installed where that is possible, started in a folder
# of its own on loopback.
#     scripts/slurm.sh install        install slurmctld, slurmd and munge unless they are there; says so if it cannot
#     scripts/slurm.sh start FOLDER   start it; then: export SLURM_CONF=FOLDER/slurm.conf
#     scripts/slurm.sh stop FOLDER    stop what was started
#     scripts/slurm.sh check          install it, run the tests of cluster=slurm on it and show the jobs' logs
set -euo pipefail

complete() {
    for name in munged slurmctld slurmd sbatch; do
        PATH=$PATH:/usr/sbin command -v "$name" > /dev/null || return 1
    done
}

install_packages() {
    complete && return
    if [ "$(id -u)" = 0 ] && command -v apt-get > /dev/null; then
        echo "Installing Debian's slurmctld, slurmd and munge for the tests of cluster=slurm"
        if apt-get update -qq > /dev/null 2>&1 && DEBIAN_FRONTEND=noninteractive apt-get install -y -qq \
            --no-install-recommends slurmctld slurmd slurm-client munge > /dev/null 2>&1 && complete; then
            return
        fi
    fi
    echo "No SLURM here and none could be installed: the tests of cluster=slurm are skipped"
}

start() {
    folder=$1 host=$(hostname -s)
    mkdir -p "$folder"/{state,spool,munge}
    # A munge of our own: its key, socket and log lie in the folder.
    head -c 1024 /dev/urandom > "$folder/munge/key"
    chown -R munge: "$folder/munge" && chmod 700 "$folder/munge" && chmod 600 "$folder/munge/key"
    chmod 711 "$folder/munge"
    setpriv --reuid=munge --regid=munge --clear-groups munged --key-file="$folder/munge/key" --socket="$folder/munge/socket" \
        --pid-file="$folder/munge/pid" --log-file="$folder/munge/log" --seed-file="$folder/munge/seed" --force
    cat > "$folder/slurm.conf" << CONF
ClusterName=test
SlurmctldHost=$host(127.0.0.1)
SlurmctldPort=${SLURM_TEST_PORT:-16817}
SlurmdPort=$((${SLURM_TEST_PORT:-16817} + 1))
SlurmUser=root
SlurmdUser=root
AuthType=auth/munge
CryptoType=crypto/munge
# A job that was put back may start again after so many seconds (120 by default).
AuthInfo=socket=$folder/munge/socket,cred_expire=5
ProctrackType=proctrack/linuxproc
TaskPlugin=task/none
SelectType=select/cons_tres
SelectTypeParameters=CR_CPU
SchedulerParameters=sched_interval=1,sched_min_interval=100000,batch_sched_delay=0,bf_interval=1
PreemptType=preempt/partition_prio
PreemptMode=REQUEUE
JobAcctGatherType=jobacct_gather/none
AccountingStorageType=accounting_storage/none
MpiDefault=none
ReturnToService=2
KillWait=10
StateSaveLocation=$folder/state
SlurmdSpoolDir=$folder/spool
SlurmctldPidFile=$folder/slurmctld.pid
SlurmdPidFile=$folder/slurmd.pid
SlurmctldLogFile=$folder/slurmctld.log
SlurmdLogFile=$folder/slurmd.log
NodeName=$host NodeAddr=127.0.0.1 CPUs=2 RealMemory=2048 State=UNKNOWN
PartitionName=main Nodes=$host Default=YES MaxTime=INFINITE State=UP PriorityTier=1 GraceTime=10
PartitionName=urgent Nodes=$host MaxTime=INFINITE State=UP PriorityTier=2 PreemptMode=OFF
CONF
    slurmctld -c -f "$folder/slurm.conf"
    slurmd -c -f "$folder/slurm.conf"
    export SLURM_CONF=$folder/slurm.conf
    for _ in $(seq 100); do
        [ "$(sinfo --noheader --partition=main --format=%T 2> /dev/null)" = idle ] && return
        sleep 0.1
    done
    echo "SLURM did not start; see $folder/slurmctld.log and $folder/slurmd.log"
    stop "$folder"
    exit 1
}

stop() {
    for file in "$1"/slurmd.pid "$1"/slurmctld.pid "$1"/munge/pid; do
        [ -s "$file" ] || continue
        pid=$(cat "$file")
        kill "$pid" 2> /dev/null || continue
        for _ in $(seq 100); do
            kill -0 "$pid" 2> /dev/null || break
            sleep 0.1
        done
        kill -KILL "$pid" 2> /dev/null || true
    done
}

PATH=$PATH:/usr/sbin
case ${1:-} in
    install) install_packages ;;
    start | stop) "$1" "$(realpath "$2")" ;;
    check)
        cd "$(dirname "$0")/.."
        bash scripts/setup.sh
        install_packages
        OMP_NUM_THREADS=1 exec .venv/bin/python -m pytest tests/cli/test_slurm.py -rP
        ;;
    *) sed -n '2,7s/^# //p' "$0"; exit 2 ;;
esac
