"""Two nodes on one machine: two network namespaces connected only by a virtual cable (a veth pair).

They share the file system, as the nodes of a cluster often do.
"""

from __future__ import annotations

import json
import os
import re
import shutil
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import pytest
from helpers.jobs import Job, read_steps, unavailable

from app.bench.scaling.nodes import (
    ADDRESSES,
    SYSTEM_PATH,
    NamespacesUnavailable,
    connect,
    network_namespaces,
    run_command,
)

PROJECT = Path(__file__).parents[2]
SCRIPT = PROJECT / "run_scripts" / "multi_node.sh"
SAMPLE = PROJECT / "data" / "sample_reviews.csv"


@pytest.fixture
def nodes() -> Iterator[list[str]]:
    """The names of two network namespaces with the addresses 10.77.0.1 and 10.77.0.2."""
    with ExitStack() as stack:
        try:
            names = stack.enter_context(network_namespaces())
        except NamespacesUnavailable as refusal:
            unavailable(str(refusal))
        connect(names)
        yield names
    assert not set(names) & set(ip("netns", "list").stdout.split())


def ip(*arguments: str) -> subprocess.CompletedProcess[str]:
    return run_command(["ip", *arguments])


def start(nodes: list[str], rank: int, *arguments: str, log: Path, **more: str) -> subprocess.Popen[bytes]:
    """Start multi_node.sh with `arguments` on a node, and write its output to `log`."""
    place = {"NNODES": "2", "NODE_RANK": str(rank), "MASTER_ADDR": ADDRESSES[0], "MASTER_PORT": "29500"}
    place |= {"NPROC_PER_NODE": "1"} | more
    environment = {k: v for k, v in os.environ.items() if k != "GLOO_SOCKET_IFNAME"} | place | {"PATH": SYSTEM_PATH}
    command = ["ip", "netns", "exec", nodes[rank], "bash", str(SCRIPT), *arguments]
    with log.open("w") as output:
        return subprocess.Popen(command, env=environment, stdout=output, stderr=subprocess.STDOUT)


def wait_until(happened: Callable[[], bool], seconds: float) -> None:
    """Wait for a condition, but shorter than pytest's own limit, so that a failure shows the logs."""
    deadline = time.monotonic() + seconds
    while time.monotonic() < deadline and not happened():
        time.sleep(0.1)


def run_on_both(nodes: list[str], *arguments: str, log_folder: Path, **more: str) -> list[str]:
    """Run multi_node.sh with `arguments` on both nodes, assert that both exit 0, and return their output."""
    logs = [log_folder / f"node{rank}.log" for rank in range(2)]
    processes = [start(nodes, rank, *arguments, log=log, **more) for rank, log in enumerate(logs)]
    wait_until(lambda: all(process.poll() is not None for process in processes), 200)
    printed = [log.read_text() for log in logs]
    assert [process.returncode for process in processes] == [0, 0], "\n".join(printed)
    return printed


@pytest.mark.launched
@pytest.mark.slow
def test_two_nodes_train_together(nodes: list[str], tmp_path: Path) -> None:
    """With `static`, and two ranks on each node; those that lose a node train with `c10d`."""
    run = tmp_path / "run"
    settings = ["--csv", str(SAMPLE), "--max_steps", "3", "--output_dir", str(run)]
    run_on_both(nodes, "static", "app.ddp_loop", *settings, log_folder=tmp_path, NPROC_PER_NODE="2")

    assert json.loads((run / "settings.json").read_text())["world_size"] == 4
    steps = [json.loads(line)["step"] for line in (run / "steps.jsonl").read_text().splitlines()]
    assert steps == [1, 2, 3]
    assert (run / "model" / "model.safetensors").is_file()


@pytest.mark.launched
@pytest.mark.slow
def test_a_node_that_dies_and_comes_back_loses_nothing(nodes: list[str], tmp_path: Path) -> None:
    dying = 1  # node 0 hosts the rendezvous: if it dies, the job ends and has to be started again with `auto`
    run = tmp_path / "run"
    flags = ["--csv", str(SAMPLE), "--max_steps", "40", "--save_strategy", "steps", "--save_steps", "5"]
    arguments = ["c10d", "app.ddp_loop", *flags, "--output_dir", str(run), "--eval_strategy", "no"]
    logs = [tmp_path / f"{name}.log" for name in ("node0", "node1", "node1-again")]
    first, second = (start(nodes, rank, *arguments, log=logs[rank], MAX_RESTARTS="3") for rank in range(2))
    wait_until((run / "checkpoints" / "checkpoint-10" / "COMPLETE").exists, 120)
    pids = ip("netns", "pids", nodes[dying]).stdout.split()
    subprocess.run(["kill", "-KILL", *pids], check=True)
    second.wait(60)
    again = start(nodes, dying, *arguments, log=logs[2], MAX_RESTARTS="3")
    wait_until(lambda: first.poll() is not None and again.poll() is not None, 240)
    printed = "\n".join(log.read_text() for log in logs)
    assert [first.returncode, again.returncode] == [0, 0], printed
    assert "resumed from" in printed
    steps = [json.loads(line)["step"] for line in (run / "steps.jsonl").read_text().splitlines()]
    assert steps == list(range(1, 41))


def comparable_steps(run: Path) -> list[dict[str, Any]]:
    """The lines of steps.jsonl without the time that each step took."""
    return [{name: value for name, value in step.items() if name != "seconds"} for step in read_steps(run)]


@pytest.mark.launched
@pytest.mark.slow
def test_training_continues_without_a_lost_node_and_again_with_it(nodes: list[str], tmp_path: Path) -> None:
    """Two ranks, then one, then two again: the results are those of a single process that nothing disturbs."""
    run, uninterrupted = tmp_path / "run", tmp_path / "uninterrupted"
    flags = ["--csv", str(SAMPLE), "--max_steps", "200", "--train_batch_size", "16", "--max_length", "48"]
    flags += ["--logical_ranks", "4", "--threads", "1", "--eval_strategy", "steps", "--eval_steps", "100"]
    flags += ["--use_cpu", "--disable_tqdm", "--cache_dir", str(tmp_path / "cache")]
    arguments = ["c10d", "app.ddp_loop", *flags, "--strategy", "zero3", "--output_dir", str(run)]
    arguments += ["--save_strategy", "steps", "--save_steps", "5"]
    place = {"NNODES": "1:2", "MASTER_PORT": "29510", "MAX_RESTARTS": "3"}
    # A node is lost if it has been silent for 5 s. The others then wait up to 5 s for more nodes.
    place["RDZV_CONF"] = "keep_alive_interval=1,keep_alive_max_attempt=5,last_call_timeout=5"
    logs = [tmp_path / f"{name}.log" for name in ("node0", "node1", "node1-again")]

    def trains_on(ranks: int) -> bool:
        settings = run / "settings.json"  # a job that starts or resumes writes it before its first step
        return settings.exists() and json.loads(settings.read_text())["world_size"] == ranks

    def steps() -> int:
        return len((run / "steps.jsonl").read_bytes().splitlines()) if (run / "steps.jsonl").exists() else 0

    def require(happened: Callable[[], bool], seconds: float) -> None:
        wait_until(happened, seconds)
        assert happened(), "\n".join(log.read_text() for log in logs if log.exists())

    first, second = (start(nodes, rank, *arguments, log=logs[rank], **place) for rank in range(2))
    require(lambda: trains_on(2) and steps() >= 10, 120)
    subprocess.run(["kill", "-KILL", *ip("netns", "pids", nodes[1]).stdout.split()], check=True)
    second.wait(60)
    with Job(
        "ddp_loop", *flags, "--save_strategy=no", f"--output_dir={uninterrupted}", cwd=tmp_path, ranks=0
    ) as single:
        require(lambda: trains_on(1), 120)
        before = steps()
        require(lambda: steps() > before, 120)
        again = start(nodes, 1, *arguments, log=logs[2], **place)
        require(lambda: trains_on(2), 120)
        assert single.finish().status == 0
    require(lambda: first.poll() is not None and again.poll() is not None, 200)
    assert [first.returncode, again.returncode] == [0, 0], "\n".join(log.read_text() for log in logs)

    assert trains_on(2)
    assert comparable_steps(run) == comparable_steps(uninterrupted)
    for name in ("predictions.csv", "model/model.safetensors"):
        assert (run / name).read_bytes() == (uninterrupted / name).read_bytes(), name
    assert not [pid for name in nodes for pid in ip("netns", "pids", name).stdout.split()]


@pytest.mark.launched
@pytest.mark.slow
@pytest.mark.parametrize("form", ["static", "c10d"])
def test_if_the_cable_is_cut_each_node_names_the_other_and_ends(nodes: list[str], form: str, tmp_path: Path) -> None:
    for name in nodes:  # with c10d, torchrun waits until TCP gives up on a silent peer: here after seconds
        ip("netns", "exec", name, "sh", "-c", "echo 5 >/proc/sys/net/ipv4/tcp_retries2")
    run = tmp_path / "run"
    flags = ["--csv", str(SAMPLE), "--max_steps", "5000", "--ddp_timeout", "15", "--output_dir", str(run)]
    logs = [tmp_path / f"node{rank}.log" for rank in range(2)]
    jobs = [start(nodes, rank, form, "app.ddp_loop", *flags, log=log) for rank, log in enumerate(logs)]
    wait_until(lambda: (run / "steps.jsonl").exists(), 150)
    ip("-n", nodes[0], "link", "set", "cable", "down")
    wait_until(lambda: all(job.poll() is not None for job in jobs), 150)
    printed = [log.read_text() for log in logs]
    assert all(job.poll() not in (None, 0) for job in jobs), "\n".join(printed)
    for text in printed:
        mine = [line for line in text.splitlines() if line.startswith("error: ")]
        assert len(mine) == 1, text
        here, there = re.search(r"rank (\d) lost contact with rank\(s\) (\d), after step \d+", mine[0]).groups()
        assert {here, there} == {"0", "1"}
    assert not [pid for name in nodes for pid in ip("netns", "pids", name).stdout.split()]


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


# Makes a node's host name stand for 127.0.1.1 on itself, as Debian does, and runs a command there.
NAMED = """
hostname "$1"; mount --bind "$2" /etc/hosts; exec "${@:3}"
"""


@pytest.mark.launched
@pytest.mark.slow
@pytest.mark.parametrize("program", ["multi_node.sh", "torchrun"])
def test_a_host_name_that_is_a_loopback_address_on_its_own_node(nodes: list[str], program: str, tmp_path: Path) -> None:
    names, port = ["node-a", "node-b"], "29500"
    run = ["app.ddp_loop", "--csv", str(SAMPLE), "--max_steps", "2", "--output_dir", str(tmp_path / "run")]
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
    wait_until(lambda: all(job.poll() is not None for job in jobs), 150)
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
