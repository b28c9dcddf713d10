"""The files that start jobs on clusters: valid for their schemas, with flags that samebits accepts."""

from __future__ import annotations

import re
import shlex
from typing import Any

import pytest
import yaml
from helpers.jobs import PROJECT
from kubeflow_trainer_api import models

from app.cli import parse_settings

SCRIPTS = PROJECT / "run_scripts"
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
    content = (SCRIPTS / "kubernetes" / name).read_text()
    return {resource["kind"]: resource for resource in yaml.safe_load_all(content)}


def check_training(arguments: list[str]) -> None:
    program, *flags = arguments
    assert program == "train"
    settings = parse_settings([flag for flag in flags if not flag.removeprefix("--").startswith(LAUNCHER_FLAGS)])
    assert settings.output_dir is not None
    assert (settings.resume_from_checkpoint, settings.save_strategy) == ("auto", "steps")


@pytest.mark.parametrize("name", ["trainjob.yaml", "job.yaml"])
def test_kubernetes_resources_are_valid_and_a_pod_that_has_saved_a_checkpoint_is_started_again(name):
    resources = read(name)
    understood = {kind: KINDS[kind].from_dict(resource).to_dict() for kind, resource in read(name).items()}
    for port in resources.get("Service", {"spec": {"ports": []}})["spec"]["ports"]:
        port["protocol"] = "TCP"  # the default, which the schema adds
    assert understood == resources, "no key is unknown"
    if name == "job.yaml":
        job = resources["Job"]["spec"]
        arguments = job["template"]["spec"]["containers"][0]["args"]
    else:
        job = resources["TrainingRuntime"]["spec"]["template"]["spec"]["replicatedJobs"][0]["template"]["spec"]
        arguments = resources["TrainJob"]["spec"]["trainer"]["args"]
    rules = [rule for rule in job["podFailurePolicy"]["rules"] if "onExitCodes" in rule]
    actions = {rule["onExitCodes"]["values"][0]: rule["action"] for rule in rules}
    assert actions == {STOPPED: "Ignore", MISTAKE: "FailJob"}
    pod = job["template"]["spec"]
    assert (pod["restartPolicy"], pod["securityContext"]["runAsNonRoot"]) == ("Never", True)
    assert pod["terminationGracePeriodSeconds"] >= 60
    check_training(arguments)


def test_sky_resumes_a_stopped_run():
    task = yaml.safe_load((SCRIPTS / "sky.yaml").read_text())
    assert task["resources"]["job_recovery"] == {"recover_on_exit_codes": [STOPPED]}
    command = task["run"].split("-m app ")[1].replace("\\\n", " ")
    check_training(shlex.split(re.sub(r"\$\([^)]*\)", "10.0.0.1", command)))


def test_the_image_is_built_from_files_that_exist_and_not_run_as_root():
    text = (PROJECT / "Dockerfile").read_text()
    sources = [source for line in re.findall(r"^COPY ((?!--).*) \S+$", text, re.M) for source in line.split()]
    assert "app" in sources
    assert all((PROJECT / source).exists() for source in sources)
    assert "\nUSER samebits\n" in text.rpartition("\nFROM ")[2]
