"""The model card is valid for the Hub, and untrusted text in it stays text."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace

import numpy as np
from huggingface_hub import ModelCard
from hypothesis import given
from hypothesis import strategies as st

from app.common.errors import escape_control_characters, shorten
from app.common.paths import DOWNLOADED_CSV
from app.record.results import model_card
from app.settings import Settings

METRICS = {"accuracy": 0.875, "f1": 0.5, "precision": 0.25, "recall": 0.75, "loss": 0.4, "hash": "d" * 64}
METRICS |= {"positive_class": 1}


def card(csv: str = "reviews.csv", classes=("bad", "good"), commit: str | None = None, **settings) -> str:
    table = SimpleNamespace(path=Path(csv), sha256="f" * 64, rows_read=9, dropped={}, class_names=tuple(classes))
    split = SimpleNamespace(train=np.arange(6), validation=np.arange(0), test=np.arange(6, 9), fingerprint="e" * 64)
    run = SimpleNamespace(
        path_name="ddp_loop",
        settings=Settings(learning_rate=1e-3, **settings),
        data=SimpleNamespace(table=table, split=split, duplicates={}),
        identity={"model_commit": commit},
    )
    return model_card(run, METRICS)


def test_the_front_matter_names_model_data_and_results_and_leaves_out_what_is_unknown():
    text = card(DOWNLOADED_CSV.name, model="google-bert/bert-base-chinese", commit="a" * 40)
    data = ModelCard(text).data
    assert (data.base_model, data.license) == ("google-bert/bert-base-chinese", "unknown")
    assert (data.library_name, data.pipeline_tag) == ("transformers", "text-classification")
    results = {result.metric_type: (result.metric_value, result.dataset_split) for result in data.eval_results}
    assert results == {"accuracy": (0.875, "test"), "f1": (0.5, "test")}
    assert f"at commit `{'a' * 40}`" in text
    assert "| 0.8750 | 0.5000 | 0.2500 | 0.7500 | 0.4000 |" in text
    assert not {"base_model", "language", "datasets"} & ModelCard(card("my reviews.csv")).data.to_dict().keys()


def test_a_local_model_is_not_a_model_on_the_hub(tmp_path):
    text = card(model=str(tmp_path))
    assert "base_model" not in ModelCard(text).data.to_dict()
    assert f"# Text classifier fine-tuned from {tmp_path.name}\n" in text
    assert str(tmp_path) not in text


HOSTILE = ["---", "\n---\n", "a: [", "'", '"', "*", "&x", "<script>alert(1)</script>", "\x1b[2J", "| x |", "`", "…"]


@given(
    classes=st.lists(st.sampled_from(HOSTILE) | st.text(max_size=9), min_size=2, max_size=4),
    name=st.sampled_from([*(text.replace("/", "") for text in HOSTILE), "\udcff", "-x", "a--b"]),
)
def test_the_card_is_valid_for_any_name_of_a_class_or_file(classes, name):
    file, model = f"{name}.csv", "models/" + name.replace("\udcff", "")
    text = card(file, classes, model=model)
    text.encode()
    data = ModelCard(text).data
    accuracy, f1 = data.eval_results
    shown = escape_control_characters(shorten(classes[1], 40))
    assert (accuracy.metric_value, f1.metric_name) == (0.875, f"F1 (class {shown})")
    f1.metric_name = "F1 (class good)"
    assert data.to_dict() == ModelCard(card(file, model=model)).data.to_dict()
    assert "<script>" not in ModelCard(text).text
    (line,) = (line for line in text.split("\n") if line.startswith("Classes: "))
    assert line.replace("\\", "").isprintable()
    assert "<" not in line
