"""A checkpoint of another version, or with a damaged run_state.json, is rejected with one line."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from helpers.run_records import add_steps, begin

from app.checkpoint.find import read_run_state
from app.checkpoint.resume import Resume, check_compatible
from app.common.errors import UserError
from app.record.best import Best
from app.record.steps import Totals
from app.runs.schema import CHECKPOINTS, RUN_STATE, RUN_STATE_VERSION
from app.settings import Settings

JUNK = (None, "x", -1, 1.5, True, [], [[]], {}, {"x": 1}, 10**400)


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


def test_a_checkpoint_from_before_the_version_was_recorded_is_read(checkpoint):
    state = read_run_state(checkpoint)
    assert state["format_version"] == RUN_STATE_VERSION
    for name in ("format_version", "arithmetic", "transformers", "model_config", "tokens_sha256", "model_code_sha256"):
        del state[name]
    del state["settings"]["ddp_comm_hook"], state["totals"]["skipped"]
    assert read(checkpoint, state) == state


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
