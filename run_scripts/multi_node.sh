#!/usr/bin/env bash
# Train on several machines. Run setup.sh and then this script on every node, with the same CSV and settings; only
# NODE_RANK differs:
#
#   NNODES=2 NODE_RANK=0 MASTER_ADDR=10.0.0.1 MASTER_PORT=29500 bash run_scripts/multi_node.sh static app.ddp_loop
#   NNODES=2 NODE_RANK=1 MASTER_ADDR=10.0.0.1 MASTER_PORT=29500 bash run_scripts/multi_node.sh static app.ddp_loop
#
# The first argument is torchrun's rendezvous:
#   static   ranks follow NODE_RANK, so node 0 has rank 0, which writes the run's files
#   c10d     ranks are assigned at each start; node 0 only hosts the rendezvous. A node that failed can rejoin.
#
# NNODES            number of nodes; with c10d also a range such as 1:2, see docs/clusters.md
# MASTER_ADDR       address of node 0
# MASTER_PORT       a free port on node 0
# NPROC_PER_NODE    processes on this node; default: one per GPU, or 2 without GPUs
# MAX_RESTARTS      with c10d: how often torchrun restarts all ranks after a failure (default 0); they resume from the
#                   latest checkpoint, which must be on a file system that all nodes share (--output_dir)
# RDZV_CONF         with c10d: more of torchrun's --rdzv_conf, such as last_call_timeout=10,keep_alive_interval=2
# RDZV_ID           with c10d: a name of the job, which keeps the nodes of others out (default: none)
# LOCAL_ADDR, GLOO_SOCKET_IFNAME, NCCL_SOCKET_IFNAME
#                   this node's address and network interface, if the detected ones are wrong
# TORCH_ELASTIC_SHUTDOWN_TIMEOUT    seconds that a signaled job has to save a checkpoint (default 30)
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."
refuse() { echo "multi_node.sh: $*" >&2; exit 2; }

for name in NNODES NODE_RANK MASTER_ADDR MASTER_PORT; do
  [ -n "${!name:-}" ] || refuse "$name is not set; required: NNODES, NODE_RANK, MASTER_ADDR, MASTER_PORT"
done
[ $# -ge 2 ] || refuse "usage: multi_node.sh static|c10d MODULE [settings]; MODULE: app.ddp_loop or app.trainer_run"
case $1 in static | c10d) ;; *) refuse "the first argument must be static or c10d, not $1" ;; esac
if [ -d .venv/bin ]; then PATH=$PWD/.venv/bin:$PATH; fi
command -v torchrun >/dev/null || refuse "torchrun not found: run bash run_scripts/setup.sh on this node first"

# Gloo and c10d resolve the host name, often to 127.0.1.1. Use the address and interface that reach node 0 instead.
find_route="import sys; from app.distributed.network import find_route; print(*find_route(sys.argv[1]) or ())"
read -r address interface <<<"$(python -c "$find_route" "$MASTER_ADDR")"
[ -n "${interface:-}" ] || refuse "MASTER_ADDR $MASTER_ADDR is unreachable"
export GLOO_SOCKET_IFNAME=${GLOO_SOCKET_IFNAME:-$interface}
export NCCL_SOCKET_IFNAME=${NCCL_SOCKET_IFNAME:-=$GLOO_SOCKET_IFNAME} # with = it is the name, not how names begin
endpoint=$MASTER_ADDR:$MASTER_PORT
if [[ $MASTER_ADDR == *:* ]]; then endpoint=[$MASTER_ADDR]:$MASTER_PORT; fi # IPv6

gpus=$(nvidia-smi --list-gpus 2>/dev/null | grep --count GPU) || true
if [ "${gpus:-0}" = 0 ]; then gpus=2; fi
processes=${NPROC_PER_NODE:-$gpus}

case $1 in
  static) rendezvous=(--node_rank="$NODE_RANK" --master_addr="$MASTER_ADDR" --master_port="$MASTER_PORT") ;;
  c10d) rendezvous=(--rdzv_backend=c10d --rdzv_endpoint="$endpoint" --rdzv_id="${RDZV_ID:-none}"
    --local_addr="${LOCAL_ADDR:-$address}"
    --rdzv_conf=is_host="$([ "$NODE_RANK" = 0 ] && echo true || echo false)${RDZV_CONF:+,$RDZV_CONF}") ;;
esac
# Without this a node that rejoins waits for a key that node 0 has published only once (torch 2.13).
export TORCH_DISABLE_SHARE_RDZV_TCP_STORE=${TORCH_DISABLE_SHARE_RDZV_TCP_STORE:-1}
# SIGUSR1, which schedulers send before the time limit, would otherwise end torchrun before its ranks have saved.
exec torchrun --nnodes="$NNODES" --nproc_per_node="$processes" --max-restarts="${MAX_RESTARTS:-0}" \
  --signals_to_handle=SIGTERM,SIGINT,SIGHUP,SIGQUIT,SIGUSR1 "${rendezvous[@]}" -m "${@:2}"
