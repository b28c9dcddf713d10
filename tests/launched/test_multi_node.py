"""Two nodes on one machine (see two_nodes.py).

test_pages.py trains a model on them, and in test_resumed_runs.py one of them dies.
"""

from __future__ import annotations

import os
import re
import shutil
import subprocess
from pathlib import Path

import pytest
from helpers.jobs import PROJECT, SAMPLE_CSV
from launched.two_nodes import SCRIPT, ip, processes_on, start, wait_for_all, wait_until

from app.bench.two_nodes import ADDRESSES, SYSTEM_PATH

pytestmark = pytest.mark.launched


def run_on_both(nodes: list[str], *arguments: str, log_folder: Path, status: int = 0, **more: str) -> list[str]:
    """Run multi_node.sh with `arguments` on both nodes, which have to end with a status; return their output."""
    logs = [log_folder / f"node{rank}.log" for rank in range(2)]
    jobs = [start(nodes, rank, *arguments, log=log, **more) for rank, log in enumerate(logs)]
    wait_for_all(jobs, 400)  # a limit only has to end what hangs, also on a busy machine
    printed = [log.read_text() for log in logs]
    assert [job.poll() for job in jobs] == [status, status], "\n".join(printed)
    return printed


def errors(text: str) -> list[str]:
    return [line for line in text.splitlines() if line.startswith("error: ")]


@pytest.mark.slow
def test_the_ranks_of_both_nodes_are_listed_and_train_together(nodes: list[str], tmp_path: Path) -> None:
    printed = run_on_both(nodes, "static", "app.check", "--use_cpu", log_folder=tmp_path, NPROC_PER_NODE="2")
    places = re.findall(r"rank (\d)  local rank (\d) of 2, \S+, cpu, (\S+) \(cable\), torch \S+, gloo", printed[0])
    assert places == [(str(rank), str(rank % 2), ADDRESSES[rank // 2]) for rank in range(4)]
    assert f"4 on 2 node(s), which meet at {ADDRESSES[0]}:29500" in printed[0]
    assert re.search(r"correct sum: \d+\.\d ms the first time", printed[0])
    assert re.search("toy DDP step .*equal weights afterwards", printed[0])
    assert " rank " not in printed[1], "rank 0 prints"


@pytest.mark.slow
@pytest.mark.parametrize("obstacle", ["eth7", "a firewall"])
def test_nodes_that_do_not_reach_each_other_are_one_line(nodes: list[str], obstacle: str, tmp_path: Path) -> None:
    """The interface does not exist, or a firewall leaves only the port of the rendezvous."""
    interface = {"GLOO_SOCKET_IFNAME": obstacle} if obstacle == "eth7" else {}
    if not interface:  # node 0 drops what it would send from all ports that the system assigns
        ip("-n", nodes[0], "rule", "add", "ipproto", "tcp", "sport", "30000-65534", "blackhole")
    flags = ["static", "app.check", "--use_cpu", "--ddp_timeout=10"]
    printed = run_on_both(nodes, *flags, log_folder=tmp_path, status=1, **interface)
    for rank, text in enumerate(printed):
        (line,) = errors(text)
        assert line.startswith(f"error: rank {rank} could not connect to the other ranks: ")
        assert not interface or obstacle in line


@pytest.mark.slow
@pytest.mark.parametrize("form", ["static", "c10d"])
def test_if_the_cable_is_cut_each_node_names_the_other_and_ends(nodes: list[str], form: str, tmp_path: Path) -> None:
    for name in nodes:  # with c10d, torchrun waits until TCP gives up on a silent peer: here after seconds
        ip("netns", "exec", name, "sh", "-c", "echo 5 >/proc/sys/net/ipv4/tcp_retries2")
    run = tmp_path / "run"
    flags = ["--csv", str(SAMPLE_CSV), "--max_steps", "5000", "--ddp_timeout", "15", "--output_dir", str(run)]
    logs = [tmp_path / f"node{rank}.log" for rank in range(2)]
    jobs = [start(nodes, rank, form, "app.ddp_loop", *flags, log=log) for rank, log in enumerate(logs)]
    wait_until(lambda: (run / "steps.jsonl").exists(), 150)
    ip("-n", nodes[0], "link", "set", "cable", "down")
    wait_for_all(jobs, 150)
    printed = [log.read_text() for log in logs]
    assert all(job.poll() not in (None, 0) for job in jobs), "\n".join(printed)
    for text in printed:
        (line,) = errors(text)
        here, there = re.search(r"rank (\d) lost contact with rank\(s\) (\d), after step \d+", line).groups()
        assert {here, there} == {"0", "1"}
    assert not [pid for name in nodes for pid in processes_on(name)]


@pytest.mark.slow
def test_ranks_of_two_nodes_connect_again_after_a_sigkill(nodes: list[str], tmp_path: Path) -> None:
    """Once while they communicate, and once while they start, so that the nodes count different numbers of restarts."""
    (tmp_path / "restarted.py").write_text(
        "import os, signal\n"
        "from pathlib import Path\n"
        "from app.distributed.collectives import barrier\n"
        "from app.distributed.process_group import join\n"
        "from app.settings import Settings\n"
        "def kill_once(moment):\n"
        "    marker = Path(__file__).with_name(moment)\n"
        "    if os.environ['RANK'] == '1' and not marker.exists():\n"
        "        marker.touch()\n"
        "        os.kill(os.getpid(), signal.SIGKILL)\n"
        "if Path(__file__).with_name('running').exists():\n"
        "    kill_once('starting')\n"
        "with join(Settings(use_cpu=True, threads=1, ddp_timeout=20)) as world:\n"
        "    kill_once('running')\n"
        "    barrier(world)\n"
        "print('rank', world.rank, 'has finished', flush=True)\n"
    )
    with pytest.MonkeyPatch.context() as environment:
        environment.setenv("PYTHONPATH", os.pathsep.join([str(tmp_path), str(PROJECT)]))
        printed = run_on_both(nodes, "c10d", "restarted", log_folder=tmp_path, MAX_RESTARTS="9")
    finished = [line for text in printed for line in text.splitlines() if line.startswith("rank ")]
    assert sorted(finished) == ["rank 0 has finished", "rank 1 has finished"]


# ---- the script ------------------------------------------------------------------------------------------------------

PLACE = {"NNODES": "1", "NODE_RANK": "0", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "29500"}


def run_script(script: Path, *arguments: str, path: str = SYSTEM_PATH, **place: str | None):
    environment = PLACE | {"PATH": path, "PYTHONPATH": str(PROJECT)} | place
    environment = {name: value for name, value in environment.items() if value is not None}
    return subprocess.run(["bash", str(script), *arguments], env=environment, capture_output=True, text=True)


@pytest.mark.parametrize(("address", "endpoint"), [("127.0.0.1", "127.0.0.1:29500"), ("::1", "[::1]:29500")])
def test_torchrun_gets_the_job_and_this_nodes_interface(tmp_path: Path, address: str, endpoint: str) -> None:
    (tmp_path / "run_scripts").mkdir()
    script = shutil.copy(SCRIPT, tmp_path / "run_scripts")  # not from the repository, whose .venv has the real torchrun
    torchrun = tmp_path / "torchrun"
    torchrun.write_text('#!/usr/bin/env bash\nprintf "%s\\n" "$@"; env\n')
    torchrun.chmod(0o755)
    place = {"MASTER_ADDR": address, "RDZV_ID": "job-7", "GLOO_SOCKET_IFNAME": "eth7"}
    done = run_script(script, "c10d", "app.ddp_loop", path=f"{tmp_path}:{SYSTEM_PATH}", **place)
    assert done.returncode == 0, done.stderr
    expected = {f"--rdzv_endpoint={endpoint}", "--rdzv_id=job-7", "NCCL_SOCKET_IFNAME==eth7"}
    assert expected <= set(done.stdout.splitlines())


@pytest.mark.parametrize(
    ("arguments", "change", "line"),
    [
        *(("static app.ddp_loop", {missing: None}, f"{missing} is not set") for missing in PLACE),
        ("", {}, "usage: multi_node.sh"),
        ("static", {}, "usage: multi_node.sh"),
        ("etcd app.ddp_loop", {}, "static or c10d, not etcd"),
        ("static app.ddp_loop", {"MASTER_ADDR": "nowhere.invalid"}, "MASTER_ADDR nowhere.invalid"),
    ],
)
def test_a_mistake_is_one_line(arguments: str, change: dict[str, str | None], line: str) -> None:
    done = run_script(SCRIPT, *arguments.split(), **change)
    assert (done.returncode, done.stdout, done.stderr.count("\n")) == (2, "", 1)
    assert line in done.stderr
