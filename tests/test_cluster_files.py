"""The files that start jobs on clusters: valid for their schemas, with flags that samebits accepts."""

from __future__ import annotations

import re
import shlex
from pathlib import Path
from typing import Any

import pytest
import yaml
from kubeflow_trainer_api import models

from app.cli import parse_settings

PROJECT = Path(__file__).parents[1]
KUBERNETES = PROJECT / "run_scripts" / "kubernetes"
SKY = PROJECT / "run_scripts" / "sky.yaml"
DOCKERFILE = (PROJECT / "Dockerfile").read_text()
KINDS = {
    "TrainJob": models.TrainerV1alpha1TrainJob,
    "TrainingRuntime": models.TrainerV1alpha1TrainingRuntime,
    "Job": models.IoK8sApiBatchV1Job,
    "Service": models.IoK8sApiCoreV1Service,
}
LAUNCHER_FLAGS = ("nnodes", "node_rank", "max_restarts", "rdzv_", "master_")
STOPPED, MISTAKE = 75, 2  # the exit statuses of `samebits train`


def read(name: str) -> dict[str, dict[str, Any]]:
    """Return the resources in a file, by kind."""
    return {resource["kind"]: resource for resource in yaml.safe_load_all((KUBERNETES / name).read_text())}


def unknown_keys(given: Any, understood: Any, place: str = "") -> list[str]:
    """Return the places at which a schema has not understood what a file gives."""
    if isinstance(given, dict) and isinstance(understood, dict):
        return [problem for key in given for problem in unknown_keys(given[key], understood.get(key), f"{place}/{key}")]
    if isinstance(given, list) and isinstance(understood, list) and len(given) == len(understood):
        pairs = enumerate(zip(given, understood, strict=True))
        return [problem for i, (a, b) in pairs for problem in unknown_keys(a, b, f"{place}/{i}")]
    return [] if given == understood else [place]


@pytest.mark.parametrize("name", ["trainjob.yaml", "job.yaml"])
def test_kubernetes_resources_are_valid_for_their_schemas(name):
    for kind, resource in read(name).items():
        assert unknown_keys(resource, KINDS[kind].from_dict(resource).to_dict()) == []


def training_jobs() -> list[Any]:
    runtime, train_job = read("trainjob.yaml").values()
    of_trainer = runtime["spec"]["template"]["spec"]["replicatedJobs"][0]["template"]["spec"]
    job = read("job.yaml")["Job"]["spec"]
    in_job = job["template"]["spec"]["containers"][0]["args"]
    return [
        pytest.param(of_trainer, train_job["spec"]["trainer"]["args"], id="trainjob"),
        pytest.param(job, in_job, id="job"),
    ]


@pytest.mark.parametrize(("job", "arguments"), training_jobs())
def test_a_pod_that_has_saved_a_checkpoint_is_started_again(job, arguments):
    actions = {
        rule["onExitCodes"]["values"][0]: rule["action"]
        for rule in job["podFailurePolicy"]["rules"]
        if "onExitCodes" in rule
    }
    assert actions == {STOPPED: "Ignore", MISTAKE: "FailJob"}
    pod = job["template"]["spec"]
    assert pod["restartPolicy"] == "Never"
    assert pod["terminationGracePeriodSeconds"] >= 60
    assert pod["securityContext"]["runAsNonRoot"]
    check_training(arguments)


def check_training(arguments: list[str]) -> None:
    program, *flags = arguments
    assert program == "train"
    own = [flag for flag in flags if not flag.removeprefix("--").startswith(LAUNCHER_FLAGS)]
    settings = parse_settings(own)
    assert settings.resume_from_checkpoint == "auto"
    assert settings.output_dir is not None
    assert settings.save_strategy == "steps"


def test_sky_resumes_a_stopped_run():
    task = yaml.safe_load(SKY.read_text())
    assert task["resources"]["job_recovery"] == {"recover_on_exit_codes": [STOPPED]}
    command = task["run"].split("-m app ")[1].replace("\\\n", " ")
    check_training(shlex.split(re.sub(r"\$\([^)]*\)", "10.0.0.1", command)))


def test_the_image_is_built_from_the_wheel_and_not_run_as_root():
    sources = [source for line in re.findall(r"^COPY ((?!--).*) \S+$", DOCKERFILE, re.M) for source in line.split()]
    assert "app" in sources
    assert all((PROJECT / source).exists() for source in sources)
    last_stage = DOCKERFILE.rpartition("\nFROM ")[2]
    assert re.search(r"^USER samebits$.*^ENTRYPOINT \[\"samebits\"\]$", last_stage, re.M | re.S)
    assert "constraints.txt" in last_stage
    version = re.search(r"^ARG PYTHON=(\S+)$", DOCKERFILE, re.M)
    assert version is not None
    assert f"Programming Language :: Python :: {version[1]}" in (PROJECT / "pyproject.toml").read_text()
