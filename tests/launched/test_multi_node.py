"""Two nodes on one machine (see helpers/two_nodes.py). tests/launched/test_resumed_runs.py lets one of them die."""

from __future__ import annotations

import json
import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
from helpers.jobs import PROJECT, SAMPLE_CSV, read_steps
from helpers.two_nodes import SCRIPT, ip, processes_on, start, wait_for_all, wait_until

from app.bench.two_nodes import ADDRESSES, SYSTEM_PATH


def run_on_both(nodes: list[str], *arguments: str, log_folder: Path, **more: str) -> list[str]:
    """Run multi_node.sh with `arguments` on both nodes, assert that both exit 0, and return their output."""
    logs = [log_folder / f"node{rank}.log" for rank in range(2)]
    processes = [start(nodes, rank, *arguments, log=log, **more) for rank, log in enumerate(logs)]
    wait_for_all(processes, 400)  # a limit only has to end what hangs, also on a busy machine
    printed = [log.read_text() for log in logs]
    assert [process.returncode for process in processes] == [0, 0], "\n".join(printed)
    return printed


@pytest.mark.launched
@pytest.mark.slow
def test_two_nodes_train_together(nodes: list[str], tmp_path: Path) -> None:
    """With `static`, and two ranks on each node; jobs that lose a node train with `c10d`."""
    run = tmp_path / "run"
    settings = ["--csv", str(SAMPLE_CSV), "--max_steps", "3", "--output_dir", str(run)]
    run_on_both(nodes, "static", "app.ddp_loop", *settings, log_folder=tmp_path, NPROC_PER_NODE="2")

    assert json.loads((run / "settings.json").read_text())["world_size"] == 4
    steps = [json.loads(line)["step"] for line in (run / "steps.jsonl").read_text().splitlines()]
    assert steps == [1, 2, 3]
    assert (run / "model" / "model.safetensors").is_file()


@pytest.mark.launched
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
        mine = [line for line in text.splitlines() if line.startswith("error: ")]
        assert len(mine) == 1, text
        here, there = re.search(r"rank (\d) lost contact with rank\(s\) (\d), after step \d+", mine[0]).groups()
        assert {here, there} == {"0", "1"}
    assert not [pid for name in nodes for pid in processes_on(name)]


@pytest.mark.launched
@pytest.mark.slow
@pytest.mark.parametrize("form", ["static", "c10d"])
def test_the_ranks_connect_over_the_cable(nodes: list[str], form: str, tmp_path: Path) -> None:
    """The ranks that each form promises, and a sum that needs both of them."""
    (tmp_path / "connect.py").write_text(
        "import os, torch, torch.distributed as dist\n"
        "dist.init_process_group('gloo')\n"
        "total = torch.tensor([10.0 ** dist.get_rank()])\n"
        "dist.all_reduce(total)\n"
        "print('rank', dist.get_rank(), 'sum', total.item(), 'by', os.environ['GLOO_SOCKET_IFNAME'], flush=True)\n"
        "dist.destroy_process_group()\n"
    )
    with pytest.MonkeyPatch.context() as environment:
        environment.setenv("PYTHONPATH", str(tmp_path))
        printed = run_on_both(nodes, form, "connect", log_folder=tmp_path)

    ranks = [next(line for line in text.splitlines() if line.startswith("rank ")) for text in printed]
    expected = [f"rank {rank} sum 11.0 by cable" for rank in range(2)]
    assert ranks == expected if form == "static" else sorted(ranks) == expected


@pytest.mark.launched
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


# Makes a node's host name stand for 127.0.1.1 on itself, as Debian does, and runs a command there.
NAMED = """
hostname "$1"; mount --bind "$2" /etc/hosts; exec "${@:3}"
"""


@pytest.mark.launched
@pytest.mark.slow
@pytest.mark.parametrize("program", ["multi_node.sh", "torchrun"])
def test_a_host_name_that_is_a_loopback_address_on_its_own_node(nodes: list[str], program: str, tmp_path: Path) -> None:
    names, port = ["node-a", "node-b"], "29500"
    run = ["app.ddp_loop", "--csv", str(SAMPLE_CSV), "--max_steps", "2", "--output_dir", str(tmp_path / "run")]
    run += ["--max_length", "16", "--use_cpu", "--threads", "1", "--eval_strategy", "no", "--ddp_timeout", "60"]
    jobs, logs = [], [tmp_path / f"{name}.log" for name in names]
    for rank, (node, name, log) in enumerate(zip(nodes, names, logs, strict=True)):
        hosts = tmp_path / f"{name}.hosts"
        lines = [(ADDRESSES[i] if i != rank else "127.0.1.1", other) for i, other in enumerate(names)]
        hosts.write_text("127.0.0.1 localhost\n" + "".join(f"{address} {other}\n" for address, other in lines))
        place = {"NNODES": "2", "NODE_RANK": str(rank), "MASTER_ADDR": names[0], "MASTER_PORT": port}
        if program == "torchrun":
            place = {}
            command = [sys.executable, "-m", "torch.distributed.run", "--nnodes=2", "--nproc_per_node=1"]
            command += ["--rdzv_backend=c10d", f"--rdzv_endpoint={names[0]}:{port}", "--rdzv_conf"]
            command += [f"is_host={str(rank == 0).lower()}", "-m", *run]
        else:
            place["NPROC_PER_NODE"] = "1"
            command = ["bash", str(SCRIPT), "static", *run]
        environment = {k: v for k, v in os.environ.items() if k != "GLOO_SOCKET_IFNAME"} | place
        inside = ["ip", "netns", "exec", node, "unshare", "--mount", "--uts", "bash", "-c", NAMED, "_", name]
        with log.open("w") as output:
            jobs.append(
                subprocess.Popen(
                    [*inside, str(hosts), *command],
                    env=environment | {"PATH": SYSTEM_PATH},
                    cwd=PROJECT,
                    stdout=output,
                    stderr=subprocess.STDOUT,
                )
            )
    wait_for_all(jobs, 150)
    assert [job.returncode for job in jobs] == [0, 0], "\n".join(log.read_text() for log in logs)
    assert len(read_steps(tmp_path / "run")) == 2


@pytest.mark.parametrize(("address", "endpoint"), [("127.0.0.1", "127.0.0.1:29500"), ("::1", "[::1]:29500")])
def test_torchrun_gets_the_job_and_this_nodes_interface(tmp_path: Path, address: str, endpoint: str) -> None:
    """With a stand-in for torchrun, which prints its arguments and environment."""
    (tmp_path / "run_scripts").mkdir()
    shutil.copy(SCRIPT, tmp_path / "run_scripts")  # not from the repository, whose .venv has the real one
    torchrun = tmp_path / "torchrun"
    torchrun.write_text('#!/usr/bin/env bash\nprintf "%s\\n" "$@"; env\n')
    torchrun.chmod(0o755)
    place = PLACE | {"MASTER_ADDR": address, "RDZV_ID": "job-7", "GLOO_SOCKET_IFNAME": "eth7"}
    path = os.pathsep.join([str(tmp_path), SYSTEM_PATH])
    done = subprocess.run(
        ["bash", str(tmp_path / "run_scripts" / SCRIPT.name), "c10d", "app.ddp_loop", "--use_cpu"],
        env={"PATH": path, "PYTHONPATH": str(PROJECT)} | place,
        capture_output=True,
        text=True,
    )
    assert done.returncode == 0, done.stderr
    printed = done.stdout.splitlines()
    assert {f"--rdzv_endpoint={endpoint}", "--rdzv_id=job-7", "NCCL_SOCKET_IFNAME==eth7"} <= set(printed)


@pytest.mark.launched
@pytest.mark.slow
def test_no_more_bytes_leave_a_node_than_planned(nodes: list[str], tmp_path: Path) -> None:
    """Counted by the kernel, for two ranks on each node. A ring all-reduce would send 1.5 times the gradients."""
    with pytest.MonkeyPatch.context() as environment:
        environment.setenv("PYTHONPATH", str(Path(__file__).parent))
        arguments = ["static", "bytes_between_nodes", "--use_cpu", "--threads=1"]
        printed = run_on_both(nodes, *arguments, log_folder=tmp_path, NPROC_PER_NODE="2")
    for text in printed:
        found = json.loads(next(line for line in text.splitlines() if line.startswith("{")))
        planned = {"average": 1.0, "reduce-scatter": 0.5}
        for name, share in planned.items():
            assert share <= found[name] < 1.1 * share, "headers and acknowledgments take less than a tenth"
            assert found[f"{name}, one level"] > 1.4 * share
        assert found["ring"] == pytest.approx(1.5, rel=0.1)


def refusal_of(*arguments: str, **environment: str) -> str:
    """Return the line with which multi_node.sh refuses its arguments."""
    result = subprocess.run(
        ["bash", str(SCRIPT), *arguments], env={"PATH": SYSTEM_PATH} | environment, capture_output=True, text=True
    )
    assert result.returncode == 2
    assert result.stdout == ""
    assert result.stderr.count("\n") == 1
    return result.stderr


PLACE = {"NNODES": "1", "NODE_RANK": "0", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "29500"}


@pytest.mark.parametrize("missing", PLACE)
def test_a_missing_variable_is_named(missing: str) -> None:
    rest = {name: value for name, value in PLACE.items() if name != missing}
    assert f"{missing} is not set" in refusal_of("static", "app.ddp_loop", **rest)


@pytest.mark.parametrize("arguments", [[], ["static"]])
def test_a_missing_form_or_module_is_reported(arguments: list[str]) -> None:
    assert "usage: multi_node.sh" in refusal_of(*arguments, **PLACE)


def test_an_unknown_form_is_reported() -> None:
    assert "static or c10d, not etcd" in refusal_of("etcd", "app.ddp_loop", **PLACE)


def test_an_unknown_address_is_reported() -> None:
    assert "MASTER_ADDR nowhere.invalid" in refusal_of(
        "static", "app.ddp_loop", **PLACE | {"MASTER_ADDR": "nowhere.invalid"}
    )
