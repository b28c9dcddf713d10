"""Which checkpoint a run resumes from; one of another version, or a damaged one, is rejected with one line."""

from __future__ import annotations

import json
import os
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from helpers.killed_run import RECORDED, make_run
from helpers.run_records import add_steps, begin

from app.checkpoint import find as search_module
from app.checkpoint.find import find_checkpoint, folder_of_this_job, read_run_state
from app.checkpoint.resume import Resume, check_compatible
from app.common.errors import UserError
from app.record.best import Best
from app.record.steps import Totals
from app.runs.folder import lock
from app.runs.schema import CHECKPOINTS, METRICS, RUN_STATE, RUN_STATE_VERSION, SETTINGS
from app.settings import Settings

JUNK = (None, "x", -1, 1.5, True, [], [[]], {}, {"x": 1}, 10**400)


def ignore(warning: str) -> None:
    pass


@pytest.fixture
def search():
    """Call `find_checkpoint` and release its lock, as the end of the process would."""
    locks = []

    def call(settings: Settings, own: Path | None = None):
        found = find_checkpoint("ddp_loop", settings, own=own, warn=ignore)
        locks.append(found.lock)
        if found.lock is not None:
            with pytest.raises(UserError, match="has not ended"):
                lock(found.folder)
            os.close(found.lock)
        return found.folder, found.checkpoint, found.finished

    return call


def test_auto_resumes_in_the_requested_folder_or_starts_there(folder, tmp_path, search):
    settings = Settings(output_dir=str(folder), resume_from_checkpoint="auto")
    assert search(settings) == (folder, folder / CHECKPOINTS / "checkpoint-4", False)
    settings = Settings(output_dir=str(tmp_path / "new"), resume_from_checkpoint="auto")
    assert search(settings) == (None, None, False)


@pytest.mark.parametrize(
    "content", ['{"path": "/usr/bin", "editor.fontSize": 12}', json.dumps(RECORDED | {"world_size": "1"})]
)
def test_auto_leaves_the_folder_of_another_program_alone(tmp_path, search, content):
    (tmp_path / SETTINGS.name).write_text(content)
    assert search(Settings(output_dir=str(tmp_path), resume_from_checkpoint="auto")) == (None, None, False)
    assert [path.name for path in tmp_path.iterdir()] == [SETTINGS.name]


@pytest.mark.parametrize("content", [None, "", '{"path": "ddp', "[]"])
def test_auto_does_not_start_again_beside_checkpoints_whose_settings_are_lost(folder, monkeypatch, content):
    (folder / SETTINGS.name).unlink()
    if content is not None:
        (folder / SETTINGS.name).write_text(content)
    monkeypatch.setattr(search_module, "RUNS", folder.parent)
    monkeypatch.setattr(search_module, "LATEST", folder.name)
    (folder.parent / "ddp_loop").symlink_to(".")
    for settings in ({"output_dir": str(folder)}, {}):
        with pytest.raises(
            UserError, match=r"run: has checkpoints, but its settings\.json is missing or cannot be read"
        ):
            find_checkpoint("ddp_loop", Settings(resume_from_checkpoint="auto", **settings), own=None, warn=ignore)


def test_auto_does_not_take_a_run_that_is_gone_for_none(tmp_path, monkeypatch, search):
    monkeypatch.chdir(tmp_path)
    Path("runs/ddp_loop").mkdir(parents=True)
    assert search(Settings(resume_from_checkpoint="auto")) == (None, None, False)
    Path("runs/ddp_loop/latest").symlink_to("2026")
    with pytest.raises(UserError, match="runs/ddp_loop/latest: links to 2026, which does not exist: name the run"):
        search(Settings(resume_from_checkpoint="auto"))


def test_auto_refuses_the_folder_of_the_other_training_path(folder, search):
    with pytest.raises(UserError, match="holds a run of ddp_loop: name another folder"):
        find_checkpoint(
            "trainer_run", Settings(output_dir=str(folder), resume_from_checkpoint="auto"), own=None, warn=ignore
        )


@pytest.mark.parametrize("place", [{}, {"output_dir": "new"}])
def test_a_run_of_the_other_training_path_is_refused_whatever_else_differs(folder, place):
    settings = Settings(resume_from_checkpoint=str(folder), seed=7, **place)
    with pytest.raises(UserError, match=r"only ddp_loop, which wrote it, can resume it$"):
        find_checkpoint("trainer_run", settings, own=None, warn=ignore)


def test_a_run_folder_may_be_named_like_a_checkpoint(folder, search):
    renamed = folder.rename(folder.with_name("checkpoint-old"))
    checkpoint = renamed / CHECKPOINTS / "checkpoint-4"
    assert search(Settings(resume_from_checkpoint=str(renamed))) == (renamed, checkpoint, False)


@pytest.mark.parametrize("is_restart", [False, True])
def test_a_run_whose_checkpoints_are_all_damaged_is_not_started_again(folder, is_restart):
    """Starting again would remove them, and the cause may be temporary, such as a disk that fails for a moment."""
    weights = folder / CHECKPOINTS / "checkpoint-4" / "weights"
    weights.write_text("2")
    settings = Settings(output_dir=str(folder), resume_from_checkpoint="auto")
    with pytest.raises(UserError, match="none of its checkpoints can be read"):
        find_checkpoint("ddp_loop", settings, own=folder if is_restart else None, warn=ignore)
    assert weights.read_text() == "2"


@pytest.mark.parametrize("marker", [None, "", "5d41"])
def test_a_run_that_was_killed_before_its_first_checkpoint_was_complete_starts_again(folder, search, marker):
    path = folder / CHECKPOINTS / "checkpoint-4" / "COMPLETE"
    if marker is None:
        path.unlink()
    else:
        path.write_text(marker)
    settings = Settings(output_dir=str(folder), resume_from_checkpoint="auto")
    assert search(settings) == (folder, None, False)


def test_a_run_that_starts_again_says_so(folder):
    (folder / CHECKPOINTS / "checkpoint-4" / "COMPLETE").write_text("")
    settings, lines = Settings(output_dir=str(folder), resume_from_checkpoint="auto"), []
    os.close(find_checkpoint("ddp_loop", settings, own=None, warn=lines.append).lock)
    assert "checkpoint-4 is skipped: COMPLETE has 0 bytes, not 64" in lines[0]
    assert lines[1:] == [f"{folder} has no complete checkpoint, so training starts from the beginning"]


@pytest.mark.parametrize("is_restart", [False, True])
def test_a_kill_leaves_at_most_one_checkpoint_without_a_marker(folder, is_restart):
    """Several have been damaged otherwise, and their other files may be intact."""
    shutil.copytree(folder / CHECKPOINTS / "checkpoint-4", folder / CHECKPOINTS / "checkpoint-8")
    for name in ("checkpoint-4", "checkpoint-8"):
        (folder / CHECKPOINTS / name / "COMPLETE").write_text("")
    before = sorted((folder / CHECKPOINTS).rglob("*"))
    settings = Settings(output_dir=str(folder), resume_from_checkpoint="auto")
    with pytest.raises(UserError, match="none of its checkpoints can be read"):
        find_checkpoint("ddp_loop", settings, own=folder if is_restart else None, warn=ignore)
    assert sorted((folder / CHECKPOINTS).rglob("*")) == before


@pytest.mark.parametrize(
    "settings",
    [
        {"output_dir": "run", "resume_from_checkpoint": "auto"},
        *({"resume_from_checkpoint": path} for path in ("run", "run/checkpoints/checkpoint-4", "disk/checkpoint-4")),
    ],
)
def test_the_checkpoints_may_be_on_another_disk(folder, tmp_path, monkeypatch, search, settings):
    monkeypatch.chdir(tmp_path)
    (folder / CHECKPOINTS).rename(tmp_path / "disk")
    (folder / CHECKPOINTS).symlink_to(tmp_path / "disk")
    if settings["resume_from_checkpoint"].startswith("disk"):
        with pytest.raises(UserError, match="disk/checkpoint-4: is not inside a run folder"):
            search(Settings(**settings))
        return
    run, checkpoint, _ = search(Settings(**settings))
    assert (run, checkpoint.absolute()) == (folder, folder / CHECKPOINTS / "checkpoint-4")
    (tmp_path / "disk").rename(tmp_path / "unmounted")
    with pytest.raises(UserError, match="checkpoint"):
        search(Settings(**settings))


def test_a_link_to_a_checkpoint_or_to_a_run_is_followed(folder, tmp_path, search):
    (tmp_path / "latest").symlink_to(folder)
    (tmp_path / "checkpoint-good").symlink_to(folder / CHECKPOINTS / "checkpoint-4")
    for name in ("latest", "latest/checkpoints/checkpoint-4", "checkpoint-good"):
        found = search(Settings(resume_from_checkpoint=str(tmp_path / name)))
        assert found == (folder, folder / CHECKPOINTS / "checkpoint-4", False)


def test_auto_does_not_overwrite_a_finished_run(folder, search):
    (folder / METRICS.name).write_text("{}")
    (folder / CHECKPOINTS / "checkpoint-4" / "COMPLETE").unlink()
    settings = Settings(output_dir=str(folder), resume_from_checkpoint="auto")
    with pytest.raises(UserError, match="holds a finished run"):
        search(settings)


def test_a_checkpoint_outside_a_run_folder_is_refused(folder, tmp_path, search):
    (tmp_path / "other").mkdir()
    alone = (folder / CHECKPOINTS / "checkpoint-4").rename(tmp_path / "other" / "checkpoint-4")
    with pytest.raises(UserError, match="is not inside a run folder"):
        search(Settings(resume_from_checkpoint=str(alone)))
    with pytest.raises(UserError, match="no such folder"):
        search(Settings(resume_from_checkpoint=str(tmp_path / "nowhere" / "checkpoint-4")))
    with pytest.raises(UserError, match="other: is a folder of checkpoints: name one of them, or the run's folder"):
        search(Settings(resume_from_checkpoint=str(tmp_path / "other")))


@pytest.mark.parametrize("place", ["", "checkpoints/checkpoint-4"])
def test_a_run_is_resumed_in_its_own_folder_unless_another_is_named(folder, tmp_path, search, place):
    checkpoint = folder / CHECKPOINTS / "checkpoint-4"
    settings = Settings(resume_from_checkpoint=str(folder / place))
    assert search(settings) == (folder, checkpoint, False)
    settings = Settings(resume_from_checkpoint=str(folder / place), output_dir=str(tmp_path / "new"))
    assert search(settings) == (None, checkpoint, False)


def test_a_restarted_job_resumes_from_the_requested_checkpoint_until_it_has_its_own(folder, tmp_path, search):
    requested = folder / CHECKPOINTS / "checkpoint-4"
    settings = Settings(output_dir=str(tmp_path / "new"), resume_from_checkpoint=str(requested))
    own = tmp_path / "new"
    own.mkdir()
    assert search(settings, own) == (own, requested, False)
    make_run(own)
    assert search(settings, own) == (own, own / CHECKPOINTS / "checkpoint-4", False)


def test_a_restarted_job_whose_run_is_complete_has_nothing_left_to_do(folder, search):
    (folder / METRICS.name).write_text("{}")
    assert search(Settings(output_dir=str(folder)), folder) == (folder, None, True)


def test_checkpoints_are_looked_up_only_while_the_folder_is_locked(folder, monkeypatch):
    """Otherwise another job could write or remove checkpoints after they were found."""
    unlocked = []

    def record_if_unlocked(checkpoints, warn):
        try:
            os.close(lock(checkpoints.parent))
            unlocked.append(checkpoints)
        except UserError:
            pass
        return checkpoints / "checkpoint-4"

    monkeypatch.setattr(search_module, "latest_valid_checkpoint", record_if_unlocked)
    for settings, own in (
        (Settings(output_dir=str(folder), resume_from_checkpoint="auto"), None),
        (Settings(resume_from_checkpoint=str(folder)), None),
        (Settings(output_dir=str(folder)), folder),
    ):
        found = find_checkpoint("ddp_loop", settings, own=own, warn=ignore)
        os.close(found.lock)
    assert unlocked == []
    held = lock(folder)
    for settings, own in (
        (Settings(output_dir=str(folder), resume_from_checkpoint="auto"), None),
        (Settings(resume_from_checkpoint=str(folder / CHECKPOINTS / "checkpoint-4")), None),
    ):
        with pytest.raises(UserError, match="has not ended"):
            find_checkpoint("ddp_loop", settings, own=own, warn=ignore)
    os.close(held)


@pytest.mark.parametrize(
    ("content", "is_own"),
    [
        ('{"launchers": ["a:1:2.00", "b:7:3.00"]}', True),
        ('{"launchers": ["c:1:2.00"]}', False),
        ('{"launchers": []}', False),
        ("{}", False),
        ("[]", False),
        ('{"launchers": "b:7:3.00"}', False),
        ('{"launchers": [["b:7:3.00"], null]}', False),
        ("not JSON", False),
        pytest.param("[" * 100_000, False, id="nested too deeply"),
    ],
)
def test_a_restarted_job_recognizes_its_folder_by_its_launchers(tmp_path, monkeypatch, content, is_own):
    monkeypatch.chdir(tmp_path)
    run = tmp_path / "runs" / "ddp_loop" / "2026-01-01_00-00-00"
    run.mkdir(parents=True)
    (run.parent / "latest").symlink_to("somewhere-else")
    (run / SETTINGS.name).write_text(content.replace("{", json.dumps(RECORDED)[:-1] + ", ", 1).replace(", }", "}"))
    launchers = ["b:7:3.00", "d:1:1.00"]
    elsewhere = run.rename(tmp_path / "elsewhere")
    assert folder_of_this_job("ddp_loop", Settings(), launchers) is None
    for place in ("", "checkpoints/checkpoint-10"):  # which may have been removed meanwhile
        resumed = Settings(resume_from_checkpoint=str(elsewhere / place))
        assert folder_of_this_job("ddp_loop", resumed, launchers) == (elsewhere if is_own else None)
        new = Settings(resume_from_checkpoint=str(elsewhere / place), output_dir=str(tmp_path / "missing"))
        assert folder_of_this_job("ddp_loop", new, launchers) is None
    elsewhere.rename(run)
    for settings in (Settings(), Settings(resume_from_checkpoint="auto"), Settings(output_dir=str(run))):
        assert folder_of_this_job("ddp_loop", settings, launchers) == (run if is_own else None)
    assert folder_of_this_job("ddp_loop", Settings(output_dir=str(tmp_path / "missing")), launchers) is None
    assert folder_of_this_job("ddp_loop", Settings(output_dir=str(run)), []) is None


def test_a_folder_is_locked_until_its_job_has_ended(tmp_path):
    held = lock(tmp_path)
    with pytest.raises(UserError, match="has not ended"):
        lock(tmp_path)
    os.close(held)
    os.close(lock(tmp_path))


# ---- run_state.json --------------------------------------------------------------------------------------------------


@pytest.fixture
def checkpoint(new_record, fill) -> Path:
    """The checkpoint of a run that has recorded two steps."""
    record, plan = new_record()
    begin(record, plan)
    add_steps(record, 1, 2)
    record.save_checkpoint(2, fill)
    return Path(record.folder, CHECKPOINTS, "checkpoint-2")


def read(checkpoint: Path, state: Any) -> dict[str, Any]:
    (checkpoint / RUN_STATE).write_text(json.dumps(state))
    return read_run_state(checkpoint)


@pytest.mark.parametrize(
    "addition",
    [
        {"format_version": RUN_STATE_VERSION + 1},
        {"format_version": RUN_STATE_VERSION + 1, "world_size": None, "settings": []},
        {"settings": {"label_smoothing": 0.1}},
        {"totals": {"restarts": 1}},
        {"best": {"epoch": 1}},
    ],
)
def test_a_newer_version_is_named_as_the_cause(checkpoint, addition):
    state = read_run_state(checkpoint)
    for name, value in addition.items():
        state[name] = state[name] | value if isinstance(value, dict) else value
    with pytest.raises(UserError, match=r"a newer version of this program wrote it .*: resume with that version"):
        read(checkpoint, state)


@pytest.mark.parametrize("name", ["checkpoint-20", "checkpoint-02", "checkpoint-good"])
def test_a_copy_under_another_name_is_not_taken_for_a_later_checkpoint(checkpoint, name):
    copy = checkpoint.rename(checkpoint.with_name(name))
    with pytest.raises(UserError, match=f"{name}: holds step 2, so it was renamed or copied: name it checkpoint-2$"):
        read_run_state(copy)


@pytest.mark.parametrize("version", [None, 1])
def test_a_checkpoint_of_an_earlier_version_is_refused_in_one_line(checkpoint, version):
    state = read_run_state(checkpoint)
    assert state["format_version"] == RUN_STATE_VERSION
    state["format_version"] = version
    if version is None:
        del state["format_version"]
    with pytest.raises(UserError, match=r"checkpoint-\d+: an earlier version .* other dropout masks") as caught:
        read(checkpoint, state)
    assert len(str(caught.value).splitlines()) == 1


def places(content: dict[str, Any]) -> Iterator[tuple[dict[str, Any], str]]:
    """Yield every key of an object and of the objects in it."""
    for name, value in content.items():
        yield content, name
        if isinstance(value, dict):
            yield from places(value)


@pytest.mark.parametrize("junk", [*JUNK, "missing"])
def test_no_damage_ends_in_a_traceback(checkpoint, junk):
    text = (checkpoint / RUN_STATE).read_text()
    n = len(list(places(json.loads(text))))
    assert n > 60
    rejected = 0
    for i in range(n):
        state = json.loads(text)
        content, name = list(places(state))[i]
        if junk == "missing":
            del content[name]
        else:
            content[name] = junk
        try:
            state = read(checkpoint, state)
            Totals(**state["totals"]), Best(**state["best"])
            resume = Resume(checkpoint.parents[1], checkpoint, state)
            check_compatible(resume, path_name="ddp_loop", settings=Settings(), fingerprint="f" * 64, total_steps=9)
        except UserError:
            rejected += 1
    assert rejected > n // 2


@pytest.mark.parametrize("text", ["", "[]", "[" * 100_000, '{"step": NaN}', "\0", '"x"'])
def test_what_is_not_json_is_rejected(checkpoint, text):
    (checkpoint / RUN_STATE).write_text(text)
    with pytest.raises(UserError, match=RUN_STATE):
        read_run_state(checkpoint)
