#!/usr/bin/env bash
#SBATCH --job-name=samebits
#SBATCH --nodes=2
#SBATCH --ntasks-per-node=1
#SBATCH --gpus-per-node=8
#SBATCH --cpus-per-task=32
#SBATCH --time=04:00:00
#SBATCH --signal=B:USR1@120
#SBATCH --requeue
#SBATCH --open-mode=append
# Train on several nodes under Slurm. From the repository, on a file system that all nodes share, after setup.sh:
#
#   sbatch run_scripts/slurm.sh app.ddp_loop --csv reviews.csv
#   sbatch --nodes=4 --gpus-per-node=4 run_scripts/slurm.sh app.trainer_run --csv reviews.csv
#
# Adapt the #SBATCH lines to your cluster. Two minutes before the time limit, or when a job of a higher priority preempts
# this one, Slurm sends a signal, all ranks save a checkpoint and exit, and the job is requeued. It keeps its job id, so
# it finds its run folder and resumes.
set -euo pipefail
cd "${SLURM_SUBMIT_DIR:?start this script with sbatch, from the repository}"
[ $# -ge 1 ] || { echo "slurm.sh: usage: sbatch run_scripts/slurm.sh MODULE [settings]" >&2; exit 2; }

export NNODES=$SLURM_JOB_NUM_NODES
read -r MASTER_ADDR < <(scontrol show hostnames "$SLURM_JOB_NODELIST") # the first node
export MASTER_ADDR MASTER_PORT=$((20000 + SLURM_JOB_ID % 10000)) # another port for each job on the same node
export RDZV_ID=slurm-$SLURM_JOB_ID # nodes of another job with the same port cannot join
# torchrun kills its ranks 30 s after a signal unless this is set. Slurm ends the job 120 s after it: see --signal above.
export TORCH_ELASTIC_SHUTDOWN_TIMEOUT=${TORCH_ELASTIC_SHUTDOWN_TIMEOUT:-100}
# Since Slurm 22.05, srun does not take over --cpus-per-task, and all ranks would share one core.
if [ -n "${SLURM_CPUS_PER_TASK:-}" ]; then export SRUN_CPUS_PER_TASK=$SLURM_CPUS_PER_TASK; fi

wait_for() { # return the status of a process; a signal interrupts `wait`
  while wait "$1" || true; kill -0 "$1" 2>/dev/null; do :; done
  wait "$1"
}

# One torchrun per node. It exits with 1 when its ranks have saved a checkpoint and exited with 75. So each node exits with
# 75 instead if it had a signal: SIGUSR1 as above, or SIGTERM if a job of a higher priority preempts this one.
# shellcheck disable=SC2016 # the variables are set on each node
node='signaled= status=0
trap "signaled=yes" USR1 TERM # Slurm sends it to torchrun and the ranks, too
# In the foreground: bash runs the trap when this has ended. `wait` would lose the status if both came at once.
NODE_RANK=$SLURM_NODEID bash run_scripts/multi_node.sh c10d "$@" || status=$?
# srun returns the highest status, and sends SIGTERM to the other nodes after a failure. So that one has a higher status.
if [ "$status" != 0 ]; then if [ -n "$signaled" ]; then status=75; else status=76; fi; fi
exit "$status"'
trap 'kill -USR1 "$job" || true' USR1 # srun forwards it to all processes of the job; srun may have just ended
# If torchrun fails on one node, Slurm ends it on the others, which would wait for that node.
srun --kill-on-bad-exit=1 bash -c "$node" _ \
  "$1" --output_dir "runs/slurm-$SLURM_JOB_ID" --resume_from_checkpoint auto "${@:2}" &
job=$!
status=0
wait_for "$job" || status=$?
if [ "$status" = 76 ]; then status=1; fi
# A job that its user has canceled is no longer running, and stays canceled.
if [ "$status" = 75 ] && [ "$(squeue --noheader --jobs="$SLURM_JOB_ID" --format=%T)" = RUNNING ]; then
  scontrol requeue "$SLURM_JOB_ID"
fi
exit "$status"
