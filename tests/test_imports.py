"""The layers of app/: imports point downward, and no packages import each other in a circle."""

from __future__ import annotations

import re
import sys
import tomllib
from importlib.metadata import packages_distributions

import grimp
import pytest
from helpers.jobs import PROJECT

# From top to bottom. The packages and modules of one layer do not import each other, so there can't be a circle.
LAYERS = (
    {"compare", "deepspeed_run", "check", "predict", "pytest_plugin", "__main__"},
    {"experiments"},
    {"bench"},
    {"ddp_loop", "trainer_run", "minimal"},  # below bench, which times ddp_loop.train_step
    {"report", "plan"},
    {"diff"},
    {"equality"},
    {"trainer", "fixed_tree_trainer"},
    {"record"},
    {"training", "profiling", "fixed_tree"},
    {"checkpoint", "tracing"},
    {"runs", "strategies"},
    {"model", "data", "metrics"},
    {"program", "jobs"},
    {"cli"},
    {"distributed"},
    {"settings"},
    {"setting_groups"},
    {"common"},
)


@pytest.fixture(scope="module")
def graph() -> grimp.ImportGraph:
    return grimp.build_graph("app", cache_dir=None)


def chains(dependencies: set[grimp.PackageDependency]) -> list[str]:
    """Describe each import that is not allowed by the modules that it leads through."""
    return sorted(
        " > ".join([*sorted(route.heads), *route.middle, *sorted(route.tails)])
        for dependency in dependencies
        for route in dependency.routes
    )


def test_imports_point_downward(graph):
    names = {module.removeprefix("app.") for module in graph.find_children("app")}
    assert names - set().union(*LAYERS) == set(), "each has a layer"
    assert chains(graph.find_illegal_dependencies_for_layers(LAYERS, containers={"app"})) == []


def test_the_hand_written_loop_imports_nothing_of_trainer(graph):
    assert graph.find_shortest_chains("app.ddp_loop", "app.trainer", as_packages=True) == set()
    assert graph.find_shortest_chains("app.trainer_run", "app.trainer", as_packages=True), "trainer_run does"


def test_the_run_folders_format_imports_only_what_is_common(graph):
    imported = graph.find_upstream_modules("app.runs", as_package=True) - {"app"}
    assert {module.split(".")[1] for module in imported} == {"common"}


def test_every_imported_package_is_declared():
    graph = grimp.build_graph("app", include_external_packages=True, cache_dir=None)
    imported = {name for name in graph.modules if graph.is_module_squashed(name)} - sys.stdlib_module_names
    project = tomllib.loads((PROJECT / "pyproject.toml").read_text("utf-8"))["project"]
    extras = project["optional-dependencies"]
    declared = [*project["dependencies"], *extras["deepspeed"], *extras["tensorboard"], "pytest"]  # it loads its plugin
    names = {re.split("[<>= ]", requirement)[0] for requirement in declared}
    distributions = packages_distributions()  # PyYAML contains yaml
    assert {distributions.get(name, [name])[0].lower().replace("_", "-") for name in imported} == names


def test_no_file_has_more_than_300_lines_and_the_page_not_more_than_120():
    lines = {path: len(path.read_text("utf-8").splitlines()) for path in (PROJECT / "app").rglob("*.py")}
    assert {str(path): n for path, n in lines.items() if n > (120 if path.name == "minimal.py" else 300)} == {}
