"""What each tracker's library is given, with libraries that stand for the real ones."""

from __future__ import annotations

import sys
from pathlib import Path
from types import ModuleType, SimpleNamespace

import pytest

from app.record import trackers


@pytest.mark.parametrize("environment", [{}, {trackers.TENSORBOARD_LOGGING_DIR: ""}])  # as an unset shell variable
def test_tensorboard_writes_to_the_folder_of_the_run(tmp_path, monkeypatch, environment):
    monkeypatch.delenv(trackers.TENSORBOARD_LOGGING_DIR, raising=False)
    for name, value in environment.items():
        monkeypatch.setenv(name, value)
    assert trackers.tensorboard_folder(tmp_path, None, project="p", run_name="r") == ("tensorboard", tmp_path)
    assert trackers.run_id_of("tensorboard", SimpleNamespace(tracker=None, logging_dir="x")) is None


def test_each_run_has_a_folder_of_its_own_in_the_folder_that_the_user_names(tmp_path, monkeypatch):
    monkeypatch.setenv(trackers.TENSORBOARD_LOGGING_DIR, str(tmp_path))
    places = [trackers.tensorboard_folder(Path("run"), None, project="../a b", run_name="x/y") for _ in range(2)]
    assert places[0] != places[1]
    for name, folder in places:
        assert folder == tmp_path / "___a_b"
        assert name.startswith("x_y-")
    name, folder = places[0]
    run_id = trackers.run_id_of("tensorboard", SimpleNamespace(tracker=None, logging_dir=str(folder / name)))
    monkeypatch.delenv(trackers.TENSORBOARD_LOGGING_DIR)
    assert trackers.tensorboard_folder(Path("run"), run_id, project="other", run_name="other") == places[0]


@pytest.fixture
def mlflow(monkeypatch, tmp_path) -> ModuleType:
    """An MLflow whose database is `x.db`."""
    module = ModuleType("mlflow")

    def client(tracking_uri: str) -> SimpleNamespace:
        file = Path(tracking_uri.removeprefix("sqlite:///"))

        def search_experiments(max_results: int) -> None:
            file.write_text("incomplete")
            assert not (tmp_path / "x.db").exists()
            module.before_it_is_complete()
            file.write_text("complete")

        return SimpleNamespace(search_experiments=search_experiments)

    module.get_tracking_uri = lambda: f"sqlite:///{tmp_path / 'x.db'}"
    module.MlflowClient = client
    module.before_it_is_complete = lambda: None
    monkeypatch.setitem(sys.modules, "mlflow", module)
    return module


def test_a_new_database_of_mlflow_is_complete_or_absent(mlflow, tmp_path):
    def stop() -> None:
        raise KeyboardInterrupt

    mlflow.before_it_is_complete = stop
    with pytest.raises(KeyboardInterrupt):
        trackers.create_mlflow_database()
    assert not (tmp_path / "x.db").exists()
    for file in tmp_path.iterdir():
        file.unlink()
    mlflow.before_it_is_complete = lambda: None
    trackers.create_mlflow_database()
    assert {path.name: path.read_text() for path in tmp_path.iterdir()} == {"x.db": "complete"}


def test_a_database_that_another_process_creates_meanwhile_is_kept(mlflow, tmp_path):
    mlflow.before_it_is_complete = lambda: (tmp_path / "x.db").write_text("of another process")
    trackers.create_mlflow_database()
    trackers.create_mlflow_database()
    assert {path.name: path.read_text() for path in tmp_path.iterdir()} == {"x.db": "of another process"}


@pytest.mark.parametrize("uri", ["http://localhost:5000", "file:///tmp/mlruns", "databricks", "sqlite:///:memory:"])
def test_other_stores_of_mlflow_are_not_created(mlflow, uri, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    mlflow.get_tracking_uri = lambda: uri
    trackers.create_mlflow_database()
    assert [*tmp_path.iterdir()] == []
