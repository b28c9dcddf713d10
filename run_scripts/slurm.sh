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
# Adapt the #SBATCH lines to your cluster. Two minutes before the time limit Slurm signals this script, all ranks save a
# checkpoint and exit, and the job is requeued. It keeps its job id, so it finds its run folder and resumes.
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

# One torchrun per node. torchrun exits with 1 when its ranks exit with 75 (checkpoint saved), so remember the signal.
signaled=
trap 'signaled=yes; kill -USR1 "$job" || true' USR1 # srun forwards the signal to the ranks; it may have just ended
# If torchrun fails on one node, Slurm ends it on the others, which would wait for that node.
# shellcheck disable=SC2016 # SLURM_NODEID is set on each node
srun --kill-on-bad-exit=1 bash -c 'NODE_RANK=$SLURM_NODEID exec bash run_scripts/multi_node.sh c10d "$@"' \
  _ "$1" --output_dir "runs/slurm-$SLURM_JOB_ID" --resume_from_checkpoint auto "${@:2}" &
job=$!
status=0
wait "$job" || status=$?
if [ -n "$signaled" ]; then # the signal interrupted `wait`
  status=0
  wait "$job" || status=$?
  if [ "$status" != 0 ]; then scontrol requeue "$SLURM_JOB_ID"; fi
fi
exit "$status"
