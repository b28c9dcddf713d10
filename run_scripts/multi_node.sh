#!/usr/bin/env bash
# Train over several machines. Call this on every node, each set up and with the same CSV, NODE_RANK alone differing:
#
#   NNODES=2 NODE_RANK=0 MASTER_ADDR=10.0.0.1 MASTER_PORT=29500 bash run_scripts/multi_node.sh static app.ddp_loop
#   NNODES=2 NODE_RANK=1 MASTER_ADDR=10.0.0.1 MASTER_PORT=29500 bash run_scripts/multi_node.sh static app.ddp_loop
#
# MASTER_ADDR is node 0's address, MASTER_PORT a free port there, NPROC_PER_NODE (default 1) the ranks on this node.
#   static   ranks follow NODE_RANK, so that node 0 holds rank 0, which writes the run
#   c10d     the nodes agree on their ranks, anew after each restart; NODE_RANK 0 only hosts the meeting
# MAX_RESTARTS (default 0): how often all ranks are started anew where one dies; they go on from the last checkpoint. With c10d
# a whole node may die: call this there again, and the others take it in. Give --output_dir, on a disk that all nodes share.
# A node that is cut off ends its ranks after --ddp_timeout. With c10d torchrun itself stays on until TCP gives up, by default
# a quarter of an hour: `sysctl -w net.ipv4.tcp_retries2=8` makes that two minutes.
# LOCAL_ADDR and GLOO_SOCKET_IFNAME: this node's own address and interface, where the ones found are not the right ones.
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."
refuse() { echo "multi_node.sh: $*" >&2; exit 2; }

for name in NNODES NODE_RANK MASTER_ADDR MASTER_PORT; do
  [ -n "${!name:-}" ] || refuse "$name is not set; wanted: NNODES, NODE_RANK, MASTER_ADDR, MASTER_PORT"
done
[ $# -ge 2 ] || refuse "wanted: static or c10d, then a module (app.ddp_loop, app.trainer_run) and its settings"
case $1 in static | c10d) ;; *) refuse "the first argument is static or c10d, not $1" ;; esac
if [ -d .venv/bin ]; then PATH=$PWD/.venv/bin:$PATH; fi
command -v torchrun >/dev/null || refuse "no torchrun here: call bash run_scripts/setup.sh on this node first"

# Gloo and c10d would look up the host's name, which is often 127.0.1.1: tell them the way that leads to node 0.
way=$(python -c '
import psutil, socket, sys
with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
    try:
        probe.connect((sys.argv[1], 9))  # sends nothing: UDP
    except OSError as problem:
        sys.exit(f"multi_node.sh: no way to MASTER_ADDR {sys.argv[1]}: {problem}")
    here = probe.getsockname()[0]
print(here, *(name for name, own in psutil.net_if_addrs().items() if here in (one.address for one in own)))
' "$MASTER_ADDR") || exit 2
read -r address interface _ <<<"$way"
export GLOO_SOCKET_IFNAME=${GLOO_SOCKET_IFNAME:-$interface}

case $1 in
  static) meet=(--node_rank="$NODE_RANK" --master_addr="$MASTER_ADDR" --master_port="$MASTER_PORT") ;;
  c10d) meet=(--rdzv_backend=c10d --rdzv_endpoint="$MASTER_ADDR:$MASTER_PORT" --local_addr="${LOCAL_ADDR:-$address}"
    --rdzv_conf=is_host="$([ "$NODE_RANK" = 0 ] && echo true || echo false)") ;;
esac
# Else a node that comes back waits in vain for what node 0 has told only once (torch 2.13).
export TORCH_DISABLE_SHARE_RDZV_TCP_STORE=1
exec torchrun --nnodes="$NNODES" --nproc_per_node="${NPROC_PER_NODE:-1}" --max-restarts="${MAX_RESTARTS:-0}" "${meet[@]}" \
  -m "${@:2}"
