"""Cleaning reviews: what is missing, how rows are numbered, and which classes the labels form."""

from __future__ import annotations

import csv
import hashlib
import io
from itertools import cycle, islice
from pathlib import Path

import numpy as np
import pandas as pd
import pytest
from helpers.reviews import read_reviews
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from app.common.errors import UserError
from app.data import reviews as reviews_module
from app.settings import Settings


@pytest.fixture
def csv_file(tmp_path):
    def write(content: str, encoding: str = "utf-8") -> Path:
        path = tmp_path / "reviews.csv"
        path.write_bytes(content.encode(encoding))
        return path

    return write


# --- reading ---


def test_reading_returns_texts_classes_rows_and_the_file_hash(csv_file):
    path = csv_file("id,label,note,review\n7,1,,很好\n8,0,x,\n9,,y,没有标签\n10,0,z,很差\n")
    reviews = read_reviews(path)
    assert (reviews.rows_read, reviews.class_names) == (4, ("0", "1"))
    assert reviews.dropped == {"no review": [1], "no label": [2]}
    assert reviews.texts.to_dict() == {0: "很好", 1: "很差"}
    assert (reviews.rows.tolist(), reviews.labels.tolist()) == ([0, 3], [1, 0])
    assert reviews.sha256 == hashlib.sha256(path.read_bytes()).hexdigest()


@pytest.mark.parametrize("encoding", ["utf-8", "utf-8-sig", "gb18030"])
def test_encodings(csv_file, encoding):
    # The second text is longer than the module csv allows.
    texts = ["這間飯店的服務態度極為親切，環境乾淨", "差评𠮷😀" * csv.field_size_limit()]
    table = read_reviews(csv_file(f"label,review\n1,{texts[0]}\n0,{texts[1]}\n", encoding))
    assert (table.texts.tolist(), table.labels.tolist()) == (texts, [1, 0])


def test_other_columns_are_chosen_by_name_and_only_these_need_unique_names(csv_file):
    path = csv_file("text,,,x,x,stars\n好,a,b,c,d,5\n差,a,b,c,d,1\n")
    table = read_reviews(path, text_column="text", label_column="stars")
    assert (table.texts.tolist(), table.class_names, table.labels.tolist()) == (["好", "差"], ("1", "5"), [1, 0])


def test_strings_that_pandas_treats_as_missing_are_reviews_and_labels(csv_file):
    words = ["NA", "null", "None", "nan", "N/A", "-", "0", "=1+1"]
    table = read_reviews(csv_file("label,review\n" + "".join(f"{word},{word}\n" for word in words)))
    assert table.dropped == {}
    assert [table.class_names[label] for label in table.labels] == table.texts.tolist() == words


def test_whitespace_and_fields_that_are_not_there_count_as_missing_and_a_row_that_lacks_both_is_counted_once(csv_file):
    table = read_reviews(csv_file('label,review,note\n1,a,x\n,\n0,"  \u3000\n"\n" ",b\n0\n"  "\n0,b\n,b\n'))
    assert table.dropped == {"no review": [1, 2, 4, 5], "no label": [3, 7]}
    assert table.rows.tolist() == [0, 6]


# Any character that a text in a CSV may have.
CHARACTERS = st.characters(exclude_categories=["Cs"], exclude_characters="\0")
TEXTS = st.text(st.sampled_from(',"\r\n \t') | CHARACTERS, min_size=1, max_size=30).filter(lambda text: text.strip())


@settings(suppress_health_check=[HealthCheck.function_scoped_fixture], max_examples=40)
@given(texts=st.lists(TEXTS, min_size=2, max_size=20), line_end=st.sampled_from(["\r\n", "\n"]))
def test_files_written_by_csv_writer_are_read_back_to_the_letter(tmp_path, texts, line_end):
    path = tmp_path / "reviews.csv"
    labels = list(islice(cycle(["好", "a,b", 'say "x"', "1\n2"]), len(texts)))
    # With "\n" as the line end, the writer would leave a bare "\r" unquoted.
    quoting = csv.QUOTE_MINIMAL if line_end == "\r\n" else csv.QUOTE_ALL
    with path.open("w", encoding="utf-8", newline="") as file:
        rows = [("label", "review"), *zip(labels, texts, strict=True)]
        csv.writer(file, lineterminator=line_end, quoting=quoting).writerows(rows)
    table = read_reviews(path)
    assert table.texts.tolist() == texts
    assert [table.class_names[label] for label in table.labels] == labels


@settings(suppress_health_check=[HealthCheck.function_scoped_fixture], max_examples=60)
@given(
    start=st.sampled_from(["", "\n"]),
    body=st.lists(st.sampled_from(["1", "0", ",", ",", '"', '"', "\n", "\r\n", "\r", " ", "好", "x"]), max_size=25),
)
def test_any_accepted_file_has_the_row_numbers_and_texts_of_pandas(tmp_path, start, body):
    """Arbitrary content is either rejected in one line or read exactly as plain `pandas.read_csv` reads it."""
    path = tmp_path / "reviews.csv"
    path.write_bytes((start + "label,review\n1,好\n0,差\n" + "".join(body)).encode())
    try:
        table = read_reviews(path)
    except UserError as error:
        assert len(str(error).splitlines()) == 1  # noqa: PT017
        return
    with path.open(encoding="utf-8", newline="") as file:
        plain = pd.read_csv(file, dtype=str)
    assert table.rows_read == len(plain)
    assert plain["review"].loc[table.rows].tolist() == table.texts.tolist()
    assert sorted([*table.rows, *(row for rows in table.dropped.values() for row in rows)]) == list(range(len(plain)))


@pytest.mark.parametrize("encoding", ["utf-8", "gb18030"])
def test_the_real_file_is_that_of_pandas_in_every_encoding(real_csv, tmp_path, encoding):
    path = tmp_path / "real.csv"
    path.write_bytes(real_csv.read_bytes().decode("utf-8").encode(encoding))
    table = read_reviews(path)
    assert (table.rows_read, len(table), table.dropped) == (7766, 7765, {"no review": [6374]})
    plain = pd.read_csv(io.BytesIO(real_csv.read_bytes())).loc[table.rows]
    assert plain["review"].tolist() == table.texts.tolist()
    assert plain["label"].tolist() == table.labels.tolist()


# --- classes ---


@pytest.mark.parametrize(
    ("labels", "names", "ids"),
    [
        (["10", "-1", "1", "0", "10"], ("-1", "0", "1", "10"), [3, 0, 2, 1, 3]),
        (["1.0", "1", "0.0", "+1"], ("0", "1"), [1, 1, 0, 1]),
        ([" pos", "neg", "pos ", "neutral"], ("neg", "neutral", "pos"), [2, 0, 2, 1]),
        (["1.0", "1", "pos"], ("1", "pos"), [0, 0, 1]),
        (["007", "7", "10"], ("007", "10", "7"), [0, 2, 1]),
        (["0.5", "1.5", "1"], ("0.5", "1", "1.5"), [0, 2, 1]),
        (["-0", "0", "1"], ("0", "1"), [0, 0, 1]),
        (["9" * 5000, "1"], ("1", "9" * 5000), [1, 0]),
    ],
)
def test_class_names_are_sorted_and_integers_normalized(csv_file, labels, names, ids):
    table = read_reviews(csv_file("label,review\n" + "".join(f"{label},评\n" for label in labels)))
    assert (table.class_names, table.labels.tolist()) == (names, ids)


def test_classes_get_other_names_in_the_order_of_the_labels(csv_file):
    path = csv_file("label,review\n1,很好\n0,很差\n1.0,好\n")
    table = read_reviews(path, label_names="1=positive, 0 = negative")
    assert (table.class_names, table.labels.tolist()) == (("negative", "positive"), [1, 0, 1])
    assert read_reviews(path, label_names="1=positive").class_names == ("0", "positive")
    for names in ("2=a", "0=a,1=a", "0=1"):  # of other classes, or equal ones
        with pytest.raises(UserError, match="--label_names: must give different names to classes of"):
            read_reviews(path, label_names=names)
    for names in ("0", "=a", "0=", "0=a,0=b", "0=a,", ","):
        with pytest.raises(UserError, match="--label_names"):
            Settings(label_names=names)


# --- some of the rows ---


@given(rows=st.sets(st.integers(0, 49)), at_most=st.integers(1, 60))
@settings(suppress_health_check=[HealthCheck.function_scoped_fixture], max_examples=20)
def test_reviews_of_some_positions_and_a_sample_of_them_at_equal_distances(csv_file, rows, at_most):
    # Every other row is dropped.
    path = csv_file("label,review\n" + "".join(f"{i % 2},\n{i % 2},评{i}\n" for i in range(50)))
    table, positions = read_reviews(path), np.array(sorted(rows), dtype=np.int64)
    assert table.texts_of(positions).tolist() == [f"评{i}" for i in positions]
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(reviews_module, "MAX_SAMPLE", at_most)
        sample = [positions.tolist().index(int(text[1:])) for text in table.sample_texts(positions)]
    assert min(at_most, len(rows)) / 2 <= len(sample) <= at_most
    assert len(set(np.diff(sample))) <= 1
