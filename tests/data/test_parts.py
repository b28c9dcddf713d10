"""Published parts: --validation_file, --test_file and --dataset_name."""

from __future__ import annotations

from pathlib import Path
from typing import Any
from unittest.mock import Mock

import datasets
import pandas as pd
import pytest

from app.common.errors import UserError
from app.data.reviews import ReviewTable, clean
from app.data.sources import open_sources
from app.data.split import split_reviews
from app.settings import Settings
from app.training.prepare import prepare

SIZES = {"train": 20, "validation": 6, "test": 8}
FRAMES = {
    part: pd.DataFrame({"label": [str(i % 2) for i in range(n)], "review": [f"{part} {i}" for i in range(n)]})
    for part, n in SIZES.items()
}


def write(folder: Path, *parts: str, **changed: pd.DataFrame) -> Path:
    """Write a CSV of each part."""
    folder.mkdir(exist_ok=True)
    for part in parts:
        changed.get(part, FRAMES[part]).to_csv(folder / f"{part}.csv", index=False)
    return folder


def read(cache_dir: Path | None = None, **flags: str) -> ReviewTable:
    return clean(open_sources(Settings(**flags), cache_dir))


@pytest.mark.parametrize("published", [("train", "validation", "test"), ("train", "validation"), ("train", "test")])
def test_published_parts_stay_as_they_are_and_others_are_held_out(tmp_path, monkeypatch, published):
    frames = FRAMES | {"test": FRAMES["test"].copy()}
    frames["test"].loc[1, "label"], frames["test"].loc[2, "review"] = None, None
    (tmp_path / "lines").mkdir()
    for part in published:
        frames[part].to_json(tmp_path / "lines" / f"{part}.jsonl", orient="records", lines=True)
    monkeypatch.chdir(write(tmp_path, *published, **frames))
    flags = {"train": "csv", "validation": "validation_file", "test": "test_file"}
    tables = [read(tmp_path / "cache", **{flags[part]: f"{part}.csv" for part in published})]
    tables += [read(dataset_name=name) for name in ("lines", f"{tmp_path}/lines/")]
    monkeypatch.chdir("lines")
    tables.append(read(dataset_name="."))
    fingerprints = set()
    for table in tables:
        dropped = {"no review (test file)": [2], "no label (test file)": [1]}
        assert table.dropped == (dropped if "test" in published else {})
        assert table.rows_read == sum(SIZES[part] for part in published)
        assert table.parts.keys() == {*published}
        for part, positions in table.parts.items():
            kept = frames[part].dropna()
            assert table.rows[positions].tolist() == kept.index.tolist()  # in its own file
            assert [table.class_names[i] for i in table.labels[positions]] == kept["label"].tolist()
            assert table.texts[positions].tolist() == kept["review"].tolist()
        split = split_reviews(table, test_size=0.2, validation_size=0.25, seed=42)
        fingerprints.add(split.fingerprint)
        (held_out,) = SIZES.keys() - {*published} or {None}
        for part in published[1:]:
            assert getattr(split, part).tolist() == table.parts[part].tolist()
        rows = [*split.train, *(getattr(split, held_out) if held_out else [])]
        assert sorted(rows) == table.parts["train"].tolist()
        assert len(rows) - len(split.train) == {"test": 4, "validation": 5, None: 0}[held_out]
        other = split_reviews(table, test_size=0.3, validation_size=0.5, seed=42)
        assert (other.fingerprint == split.fingerprint) == (held_out is None), "sizes count only if they have an effect"
    assert len(fingerprints) == 1


@pytest.mark.parametrize("kind", ["ClassLabel", "int64", "float64"])
def test_a_test_split_whose_labels_are_secret_is_left_out_and_class_labels_have_names(tmp_path, kind):
    names = ["差评", "好评", "中评"]  # not sorted, and one without rows
    label = datasets.ClassLabel(names=names) if kind == "ClassLabel" else datasets.Value(kind)
    features = datasets.Features({"label": label, "review": datasets.Value("string")})
    for part in SIZES:
        frame = FRAMES[part].assign(label=-1 if part == "test" else FRAMES[part]["label"].astype(int))
        datasets.Dataset.from_pandas(frame, features).to_parquet(tmp_path / f"{part}.parquet")
    (tmp_path / "TEST.CSV").touch()
    table = read(dataset_name=str(tmp_path))
    assert (table.parts.keys(), table.notes) == ({"train", "validation"}, ("", "without 'TEST.CSV'"))
    assert table.dropped == {"no label (test file)": [*range(SIZES["test"])]}
    assert table.class_names == (tuple(names) if kind == "ClassLabel" else ("0", "1"))
    assert table.labels.tolist() == [int(label) for part in table.parts for label in FRAMES[part]["label"]]
    frame.assign(label="007").to_parquet(tmp_path / "test.parquet")
    with pytest.raises(UserError, match="Field label has incompatible types"):
        read(dataset_name=str(tmp_path))
    features["label"] = datasets.ClassLabel(names=names[::-1])
    datasets.Dataset.from_pandas(frame, features).to_parquet(tmp_path / "test.parquet")
    with pytest.raises(UserError, match="a ClassLabel with other names or in another order"):
        read(dataset_name=str(tmp_path))


@pytest.mark.parametrize("ending", ["csv", "jsonl"])
def test_the_readme_of_a_data_set_names_the_classes_that_its_files_number(tmp_path, ending):
    names = "{class_label: {names: {'0': bad, '1': good}}}"
    features = f"[{{name: label, dtype: {names}}}, {{name: review, dtype: string}}]"
    files = f"[{{config_name: default, data_files: train.{ending}}}]"
    (tmp_path / "README.md").write_text(f"---\nconfigs: {files}\ndataset_info: {{features: {features}}}\n---\n")
    rows = {"csv": "label,review\n1,a\n0,b\n", "jsonl": '{"label": 1, "review": "a"}\n{"label": 0, "review": "b"}\n'}
    (tmp_path / f"train.{ending}").write_text(rows[ending])
    expected = datasets.load_dataset(str(tmp_path), cache_dir=str(tmp_path / "cache"))["train"].features["label"].names
    table = read(dataset_name=str(tmp_path))
    assert (table.class_names, table.labels.tolist()) == (tuple(expected), [1, 0])
    readme = (tmp_path / "README.md").read_text()
    for name in ("''", "' '"):
        (tmp_path / "README.md").write_text(readme.replace("bad", name))
        table = read(dataset_name=str(tmp_path))
        assert (table.class_names, table.labels.tolist()) == (("0", "good"), [1, 0])
    (tmp_path / "README.md").write_text(readme.replace("bad", "no"))  # which YAML reads as False
    with pytest.raises(UserError, match="quote them there"):
        read(dataset_name=str(tmp_path))
    (tmp_path / "README.md").write_text(readme.replace("good", "good, '2': 'good '"))
    with pytest.raises(UserError, match=f"^{tmp_path}: two classes have the same name: 'bad', 'good', 'good'"):
        read(dataset_name=str(tmp_path))
    (tmp_path / "README.md").write_text(readme.replace("bad", "'1'").replace("good", "'2'"))
    with pytest.raises(UserError, match="names classes by numbers, which could be their positions"):
        read(dataset_name=str(tmp_path))


def test_a_folder_of_save_to_disk_is_read_without_the_caches_of_map_and_the_files_of_earlier_calls(tmp_path):
    rows = datasets.Dataset.from_pandas(FRAMES["train"], preserve_index=False)
    datasets.DatasetDict(train=rows, test=rows).save_to_disk(tmp_path, num_shards={"train": 2, "test": 1})
    datasets.DatasetDict(train=rows).save_to_disk(tmp_path)
    datasets.load_from_disk(str(tmp_path)).map(lambda row: {"label": "other"})
    for folder in (tmp_path, tmp_path / "train"):
        table = read(dataset_name=str(folder))
        assert (table.texts.tolist(), [*table.parts]) == (FRAMES["train"]["review"].tolist(), [])
    with pytest.raises(UserError, match="--encoding is for CSV and JSON files"):
        read(dataset_name=str(tmp_path), encoding="utf-8")


def test_a_readme_may_still_have_the_sizes_of_other_splits(tmp_path):
    splits = "[{name: train, num_examples: 1}, {name: test, num_examples: 1}]"
    (tmp_path / "README.md").write_text(f"---\ndataset_info: {{splits: {splits}}}\n---\n")
    FRAMES["train"].to_csv(tmp_path / "train.csv", index=False)
    assert read(dataset_name=str(tmp_path)).rows_read == SIZES["train"]


def test_a_new_class_name_that_is_also_an_original_one_is_the_original_one(tmp_path):
    (tmp_path / "train.csv").write_text("label,review\n0,a\n1,b\n2,c\n")
    (tmp_path / "test.csv").write_text("label,review\n1,a\n2,b\n")
    flags = {"csv": f"{tmp_path}/train.csv", "test_file": f"{tmp_path}/test.csv", "label_names": "0=1,1=2,2=3"}
    settings = Settings(**flags)
    table = clean(open_sources(settings), label_names=settings.label_names)
    assert [table.class_names[i] for i in table.labels] == ["1", "2", "3", "2", "3"]
    (tmp_path / "test.csv").write_text("label,review\n1,a\n3,b\n")
    with pytest.raises(UserError, match=r"row 1: label '3' is not a class of .*train.csv, which has '0', '1', '2';"):
        clean(open_sources(settings), label_names=settings.label_names)


def test_files_have_a_column_without_a_name_as_pandas_writes_its_index(tmp_path):
    for part in ("train", "test"):
        FRAMES[part].to_csv(tmp_path / f"{part}.csv")
    assert read(dataset_name=str(tmp_path)).rows_read == SIZES["train"] + SIZES["test"]


def test_the_options_of_a_data_set_are_not_those_of_its_file(tmp_path):
    (tmp_path / "train.csv").write_text('label,review\n1,"good" room\n0,bad\n')
    options = "[{config_name: default, data_files: train.csv, quoting: 3}]"
    (tmp_path / "README.md").write_text(f"---\nconfigs: {options}\n---\n")
    for _ in range(2):  # the second time from the cache
        assert read(tmp_path / "cache", dataset_name=str(tmp_path)).texts.tolist() == ['"good" room', "bad"]
        with pytest.raises(UserError, match="line 2, or a quote before it"):
            read(tmp_path / "cache", csv=str(tmp_path / "train.csv"))
    (tmp_path / "test.csv").write_text("0,c\n1,d\n1,d\n0,c\n")  # repeats rows, and no header
    (tmp_path / "train.csv").write_text("1,*é, a*\n0,b\n1,a\n", "l1")
    options = "[{config_name: default, data_files: '*.csv', names: [label, review], encoding: l1, quotechar: '*'}]"
    (tmp_path / "README.md").write_text(f"---\nconfigs: {options}\n---\n")
    assert read(dataset_name=str(tmp_path)).texts.tolist() == [*"cddc", "é, a", *"ba"]


def test_the_start_names_similar_classes_and_reviews_with_unknown_tokens(world, tmp_path, capsys):
    similar = pd.DataFrame({"label": ["Good", "ｇｏｏｄ\u200b", "bad"] * 9, "review": ["abc"] * 27})
    unknown = pd.DataFrame({"label": ["bad"] * 9, "review": ["😀"] * 8 + ["abc"]})
    name = str(write(tmp_path, "train", "test", train=similar, test=unknown))
    folders = {"dataset_name": name, "cache_dir": f"{name}/cache", "output_dir": f"{name}/run"}
    prepare("ddp_loop", Settings(model="tiny-bert", max_length=16, train_batch_size=4, **folders), world)
    lines = capsys.readouterr().out
    assert "differ only in case, width or invisible characters: 'Good', 'ｇｏｏｄ\\u200b'" in lines
    assert "left out  3 row(s) of each epoch" in lines
    assert "8 of 36 reviews have a quarter or more unknown tokens" in lines


@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("{folder}/no_train", "no split train"),
        ("{folder}/no_train/config", "'config'"),
        ("{folder}/too_many_fields", "line 10"),
        ("{folder}/booleans", "Unable to merge: Field label has incompatible types: int64 vs bool"),
        (
            "{folder}/other_case",
            "train-2.csv has the columns 'Label', 'review', but another",
        ),
        (
            "{folder}/repeated",
            "has the columns 'label', 'review', but another file 'label', 'review', 'label'",
        ),
        ("{folder}/empty", "test.csv: line 0, or a quote before it: has no header"),
        ("{folder}/data[1]", "rename the folder"),
        ("{folder}/train_dev", "'test.csv', 'train.csv' would be read for several splits"),
        ("/missing/folder/of/data", "/missing/folder/of"),
        ("x" * 300, ""),
    ],
)
def test_a_data_set_that_cannot_be_loaded_is_one_line(tmp_path, name, message):
    write(tmp_path / "no_train", "test")
    FRAMES["train"].to_csv(write(tmp_path / "other_case") / "train-1.csv", index=False)
    (write(tmp_path / "empty", "train") / "test.csv").touch()
    write(write(tmp_path / "train_dev") / "train_test", "train", "test")
    (write(tmp_path / "repeated", "train") / "train-2.csv").write_text("label,review,label\n0,a,1\n")
    write(write(tmp_path / "data[1]", "train").with_name("data1"), "train")  # which the pattern would match
    FRAMES["train"].rename(columns={"label": "Label"}).to_csv(tmp_path / "other_case" / "train-2.csv", index=False)
    (tmp_path / "booleans").mkdir()
    for part, labels in (("train-1", [0, 1]), ("train-2", [False, True])):  # `datasets` would read 0, 1, 0, 1
        pd.DataFrame({"label": labels, "review": ["a", "b"]}).to_parquet(tmp_path / "booleans" / f"{part}.parquet")
    with (write(tmp_path / "too_many_fields", *SIZES) / "test.csv").open("a") as file:
        file.write("1,good, clean\n")
    name = name.format(folder=tmp_path)
    with pytest.raises(UserError) as caught:
        read(dataset_name=name)
    assert str(caught.value).startswith(f"--dataset_name {name}: ")
    assert message in str(caught.value)
    assert len(str(caught.value).splitlines()) == 1


@pytest.mark.parametrize(
    ("name", "arguments"),
    [("owner/name", ("owner/name", None)), ("owner/name/config", ("owner/name", "config")), ("imdb", ("imdb", None))],
)
def test_a_data_set_on_the_hub_may_be_followed_by_a_config(monkeypatch, tmp_path, name, arguments):
    load = Mock(side_effect=ConnectionError("no network"))
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(datasets, "load_dataset", load)
    with pytest.raises(UserError, match=f"--dataset_name {name}: no network"):
        open_sources(Settings(dataset_name=name))
    assert [call.args for call in load.mock_calls] == [arguments]


@pytest.mark.parametrize(
    ("parts", "flags", "message"),
    [
        ((), {"dataset_name": "x", "csv": "a.csv"}, "--dataset_name and --csv"),
        ((), {"dataset_name": "x", "test_file": "a.csv"}, "--dataset_name and --test_file"),
        ((), {"test_file": "a.csv"}, "--test_file needs --csv"),
        ((), {"csv": "a", "test_file": "b", "test_size": 0.2}, "--test_file and --test_size"),
        ((), {"csv": "a", "validation_file": "b", "validation_size": 0.2}, "--validation_file and --validation_size"),
        # Only reading a data set tells which parts it has.
        (("validation",), {"validation_size": 0.25}, "--validation_size 0.25: .* has validation rows: remove the flag"),
        (("test",), {"test_size": 0.25}, "--test_size 0.25: .* has test rows: remove the flag"),
        (("test",), {"load_best_model_at_end": True}, "has no validation rows to choose on: add --validation_size"),
        (("test",), {"on_duplicates_between_parts": "stop"}, "stop: 8 test reviews also occur in train rows"),
    ],
)
def test_settings_that_contradict_each_other_or_the_data_are_rejected(world, tmp_path, parts, flags, message):
    if parts:
        flags |= {"dataset_name": str(write(tmp_path, "train", *parts, test=FRAMES["train"][:8]))}
    with pytest.raises(UserError, match=message):
        prepare("ddp_loop", Settings(max_length=16, train_batch_size=4, cache_dir=str(tmp_path), **flags), world)


def test_published_validation_rows_choose_the_best_weights():
    settings: Any = Settings(csv="a.csv", validation_file="b.csv", load_best_model_at_end=True)
    assert settings.may_validate
