"""Reading, checking and cleaning CSV files."""

from __future__ import annotations

import csv
import dataclasses
import hashlib
import io
import os
import stat
from pathlib import Path

import numpy as np
import pandas as pd
import pytest
from helpers.reviews import read_reviews
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from app.common.errors import UserError
from app.data import reviews as reviews_module
from app.data.reviews import describe_dropped, sample_rows
from app.settings import Settings

GOOD = "label,review\n1,很好\n0,很差\n"


@pytest.fixture
def csv_file(tmp_path):
    def write(content: str | bytes, encoding: str = "utf-8") -> Path:
        path = tmp_path / "reviews.csv"
        path.write_bytes(content if isinstance(content, bytes) else content.encode(encoding))
        return path

    return write


def one_line_error(path, **columns) -> str:
    """Return the message of the UserError that `read_reviews` raises, without the file name that starts it."""
    with pytest.raises(UserError) as caught:
        read_reviews(path, **columns)
    message = str(caught.value)
    assert message.startswith(f"{path}: ")
    assert len(message.splitlines()) == 1
    return message.removeprefix(f"{path}: ")


# --- names of classes ---


def test_classes_get_other_names_in_the_order_of_the_labels(csv_file):
    path = csv_file("label,review\n1,很好\n0,很差\n1.0,好\n")
    table = read_reviews(path, label_names="1=positive, 0 = negative")
    assert (table.class_names, table.labels.tolist()) == (("negative", "positive"), [1, 0, 1])
    assert read_reviews(path, label_names="1=positive").class_names == ("0", "positive")


@pytest.mark.parametrize("names", ["2=a", "0=a,1=a", "0=1"])
def test_names_of_other_classes_and_equal_names_are_rejected(csv_file, names):
    path = csv_file(GOOD)
    with pytest.raises(UserError) as caught:
        read_reviews(path, label_names=names)
    assert str(caught.value) == (f"--label_names: must give different names to classes of {path}, which has '0', '1'")


@pytest.mark.parametrize("names", ["0", "=a", "0=", "0=a,0=b", "0=a,", ","])
def test_names_of_another_form_are_rejected(names):
    with pytest.raises(UserError, match="must name each label once"):
        Settings(label_names=names)


# --- reading ---


def test_reading_returns_texts_classes_rows_and_the_file_hash(csv_file):
    path = csv_file("id,label,note,review\n7,1,,很好\n8,0,x,\n9,,y,没有标签\n10,0,z,很差\n")
    reviews = read_reviews(path)
    assert reviews.path == path
    assert reviews.sha256 == hashlib.sha256(path.read_bytes()).hexdigest()
    assert reviews.rows_read == 4
    assert reviews.dropped == {"no review": [1], "no label": [2]}
    assert reviews.class_names == ("0", "1")
    assert reviews.rows.tolist() == [0, 3]
    assert reviews.rows.dtype == np.int64
    assert reviews.labels.tolist() == [1, 0]
    assert reviews.labels.dtype == np.int64
    assert reviews.texts.tolist() == ["很好", "很差"]
    assert reviews.texts.index.equals(pd.RangeIndex(2))
    assert len(reviews) == 2
    with pytest.raises(dataclasses.FrozenInstanceError):
        reviews.rows_read = 0


@pytest.mark.parametrize("encoding", ["utf-8", "utf-8-sig", "gb18030"])
@pytest.mark.parametrize("line_end", ["\n", "\r\n"])
def test_encodings_and_line_ends(csv_file, encoding, line_end):
    path = csv_file('label,review\n1,"好,""大""\n床"\n0,差评𠮷😀\n'.replace("\n", line_end), encoding)
    reviews = read_reviews(path)
    assert reviews.texts.tolist() == [f'好,"大"{line_end}床', "差评𠮷😀"]
    assert reviews.labels.tolist() == [1, 0]


def test_traditional_chinese_in_gb18030(csv_file):
    texts = ["這間飯店的服務態度極為親切，環境乾淨", "價錢貴，櫃檯應對冷淡，設備陳舊"]
    path = csv_file(f"label,review\n1,{texts[0]}\n0,{texts[1]}\n", "gb18030")
    assert read_reviews(path).texts.tolist() == texts


def test_other_column_names_in_any_order(csv_file):
    path = csv_file("text,extra,stars\n好,a,5\n差,b,1\n")
    reviews = read_reviews(path, text_column="text", label_column="stars")
    assert reviews.texts.tolist() == ["好", "差"]
    assert reviews.class_names == ("1", "5")
    assert reviews.labels.tolist() == [1, 0]


def test_only_the_columns_in_use_need_unique_names(csv_file):
    reviews = read_reviews(csv_file("label,,,review,x,x\n1,a,b,好,c,d\n0,a,b,差,c,d\n"))
    assert reviews.texts.tolist() == ["好", "差"]


@pytest.mark.parametrize("word", ["NA", "null", "None", "nan", "N/A", "-", "0", "=1+1"])
def test_strings_that_pandas_treats_as_missing_are_reviews_and_labels(csv_file, word):
    reviews = read_reviews(csv_file(f"label,review\n{word},{word}\nother,差\n"))
    assert reviews.dropped == {}
    assert reviews.texts.tolist() == [word, "差"]
    assert reviews.class_names[reviews.labels[0]] == word


def test_a_row_that_lacks_both_is_counted_once_and_whitespace_counts_as_missing(csv_file):
    reviews = read_reviews(csv_file('label,review\n1,好\n,\n0,"  \u3000\n"\n" ",评\n0,""\n0,差\n,评\n'))
    assert reviews.dropped == {"no review": [1, 2, 4], "no label": [3, 6]}
    assert reviews.rows.tolist() == [0, 5]


def test_reviews_keep_leading_and_trailing_whitespace(csv_file):
    reviews = read_reviews(csv_file("review,label\n  好 ,1\n\t差,0\n"))
    assert reviews.texts.tolist() == ["  好 ", "\t差"]


def test_row_numbers_match_the_pandas_index_despite_blank_lines_and_multiline_reviews(csv_file):
    path = csv_file('\nlabel,review\n1,"第一\n\n行"\n\n  \n0,差\n\t\n,无\n1,"好\r\n"\n\n')
    reviews = read_reviews(path)
    plain = pd.read_csv(path)
    assert reviews.rows_read == len(plain) == 4
    assert reviews.rows.tolist() == [0, 1, 3]
    with path.open(newline="") as file:
        plain = pd.read_csv(file)
    assert plain["review"].loc[reviews.rows].tolist() == reviews.texts.tolist()


def test_a_review_longer_than_128_kib_is_read(csv_file):
    long = "很" * (csv.field_size_limit() + 1)
    assert read_reviews(csv_file(f'label,review\n1,"{long}"\n0,差\n')).texts[0] == long


# --- labels ---


@pytest.mark.parametrize(
    ("labels", "names", "ids"),
    [
        (["10", "-1", "1", "0", "10"], ("-1", "0", "1", "10"), [3, 0, 2, 1, 3]),
        (["1.0", "1", "0.0", "+1"], ("0", "1"), [1, 1, 0, 1]),
        ([" pos", "neg", "pos ", "neutral"], ("neg", "neutral", "pos"), [2, 0, 2, 1]),
        (["好", "差", "好"], ("好", "差"), [0, 1, 0]),
        (["1.0", "1", "pos"], ("1", "pos"), [0, 0, 1]),
        (["007", "7", "10"], ("007", "10", "7"), [0, 2, 1]),
        (["0.5", "1.5", "1"], ("0.5", "1", "1.5"), [0, 2, 1]),
        (["-0", "0", "1"], ("0", "1"), [0, 0, 1]),
        (["9" * 5000, "1"], ("1", "9" * 5000), [1, 0]),
    ],
)
def test_class_names_are_sorted_and_integers_normalized(csv_file, labels, names, ids):
    reviews = read_reviews(csv_file("label,review\n" + "".join(f"{label},评\n" for label in labels)))
    assert reviews.class_names == names
    assert reviews.labels.tolist() == ids


# --- properties ---

# Any character that a text in a CSV may have.
CHARACTERS = st.characters(exclude_categories=["Cs"], exclude_characters="\0")
TEXTS = st.text(st.sampled_from(',"\r\n \t') | CHARACTERS, min_size=1, max_size=30).filter(lambda text: text.strip())


@settings(suppress_health_check=[HealthCheck.function_scoped_fixture], deadline=None)
@given(
    data=st.lists(st.tuples(st.sampled_from(["好", "a,b", 'say "x"', "1\n2"]), TEXTS), min_size=2, max_size=20).filter(
        lambda data: len({label for label, _ in data}) > 1
    ),
    line_end=st.sampled_from(["\r\n", "\n"]),
    text_first=st.booleans(),
    bom=st.booleans(),
)
def test_files_written_by_csv_writer_are_read_back(tmp_path, data, line_end, text_first, bom):
    path = tmp_path / "reviews.csv"
    order = slice(None, None, -1 if text_first else 1)
    with path.open("w", encoding="utf-8-sig" if bom else "utf-8", newline="") as file:
        # with "\n" as the line end, the writer leaves a bare "\r" unquoted
        quoting = csv.QUOTE_MINIMAL if line_end == "\r\n" else csv.QUOTE_ALL
        csv.writer(file, lineterminator=line_end, quoting=quoting).writerows([("label", "review")[order]])
        csv.writer(file, lineterminator=line_end, quoting=quoting).writerows(row[order] for row in data)
    reviews = read_reviews(path)
    assert reviews.dropped == {}
    assert reviews.rows.tolist() == list(range(len(data)))
    assert reviews.texts.tolist() == [text for _, text in data]
    assert [reviews.class_names[label] for label in reviews.labels] == [label for label, _ in data]


@settings(suppress_health_check=[HealthCheck.function_scoped_fixture], deadline=None, max_examples=500)
@given(body=st.lists(st.sampled_from(["1", "0", ",", ",", '"', '"', "\n", "\r\n", "\r", " ", "好", "x"]), max_size=25))
def test_any_accepted_file_has_the_row_numbers_and_texts_of_pandas(tmp_path, body):
    """Arbitrary content is either rejected in one line or read exactly as plain `pandas.read_csv` reads it."""
    path = tmp_path / "reviews.csv"
    path.write_bytes(("label,review\n1,好\n0,差\n" + "".join(body)).encode())
    rejection = ""
    try:
        reviews = read_reviews(path)
    except UserError as error:
        rejection = str(error)
    if rejection:
        assert len(rejection.splitlines()) == 1
        return
    with path.open(encoding="utf-8", newline="") as file:
        plain = pd.read_csv(file, dtype=str)
    assert reviews.rows_read == len(plain)
    assert plain["review"].loc[reviews.rows].tolist() == reviews.texts.tolist()
    kept_and_dropped = sorted([*reviews.rows.tolist(), *(row for rows in reviews.dropped.values() for row in rows)])
    assert kept_and_dropped == list(range(len(plain)))


# --- rejected files ---


def test_what_is_no_file_is_rejected(tmp_path):
    os.mkfifo(tmp_path / "pipe")
    assert one_line_error(tmp_path / "none.csv") == "no such file"
    assert "is not a regular file" in one_line_error(tmp_path)
    assert "is not a regular file" in one_line_error(tmp_path / "pipe")


def test_an_unreadable_file_is_reported(csv_file, monkeypatch):
    path = csv_file(GOOD)
    path.chmod(0)
    if os.access(path, os.R_OK):  # root reads everything

        def refuse(self, *_, **__):
            raise PermissionError(13, "Permission denied", str(self))

        monkeypatch.setattr(Path, "open", refuse)
    assert "Permission denied" in one_line_error(path)
    path.chmod(stat.S_IRUSR | stat.S_IWUSR)


@pytest.mark.parametrize(
    ("content", "message"),
    [
        ("", "No columns to parse from file"),
        ("\n\n", "No columns to parse from file"),
        ("label,review", "has no rows"),
        ("label,review\r\n\r\n \n", "has no rows"),
        ('label,"a\nb"\n1,x\n', r"no column 'review'; the file has 'label', 'a\nb'"),
        ('label,review\n1,a\n0,"b\n1,c\n', "EOF inside string starting at row 2"),
        ("label,review\n1,a\n0,b,c\n", "Expected 2 fields in line 3, saw 3"),
        ("label,review\n1,a,b\n0,b,c\n", "Length of header or names does not match length of data"),
        ("label,review\n1,a,\n0,b,\n", "Length of header or names does not match length of data"),
        ('label,review\n1,"a\nb"\n\n0,b,c\n', "Expected 2 fields in line 4, saw 3"),
        ("label,review\n" + "1,a\n0,b\n" * 10_000 + "0,b,c\n", "Expected 2 fields in line 20002, saw 3"),
        (GOOD.encode("utf-16"), "is neither UTF-8 nor GB18030; save it as UTF-8"),
        ("label,review\n1,好\n".encode() + b"0,\xff\n", "is neither UTF-8 nor GB18030; save it as UTF-8"),
        (GOOD.encode("gb18030") + "1,好".encode("gb18030")[:-1], "is neither UTF-8 nor GB18030; save it as UTF-8"),
    ],
)
def test_a_malformed_file_is_one_line(csv_file, tmp_path, content, message):
    path = csv_file(content)
    assert message in one_line_error(path)
    assert message in one_line_error(path, cache_dir=tmp_path / "cache")


def test_rows_with_too_few_fields_count_as_missing_and_are_reported(csv_file):
    reviews = read_reviews(csv_file('label,review,note\n1,a,x\n0\n0,b\n1,a\n"  "\n""\n'))
    assert reviews.dropped == {"no review": [1, 4, 5]}
    assert reviews.texts.tolist() == ["a", "b", "a"]


def test_a_file_without_usable_rows_is_rejected(csv_file):
    message = one_line_error(csv_file("label,review\n1,\n,好\n0, \n"))
    assert "no row has both" in message
    assert "2 with no review, 1 with no label" in message


def test_a_missing_column_error_lists_the_existing_columns(csv_file):
    path = csv_file("label,text\n1,a\n0,b\n")
    assert (
        one_line_error(path) == "no column 'review'; the file has 'label', 'text' (choose a column with --text_column)"
    )
    assert "no column 'x'" in one_line_error(path, text_column="text", label_column="x")


def test_a_single_class_is_rejected(csv_file):
    assert "has only one class, '1'" in one_line_error(csv_file("label,review\n1,a\n1.0,b\n"))
    assert "has only one class, '1'" in one_line_error(csv_file("label,review\n1,a\n0,\n"))


# --- dropped rows ---


def test_describe_dropped_lists_counts_and_the_first_rows(csv_file):
    path = csv_file("label,review\n1,好\n" + "0,\n" * 1234 + ",评\n0,差\n")
    lines = describe_dropped(read_reviews(path))
    assert [line.removeprefix(f"{path}: ").partition(" (")[0] for line in lines] == [
        "dropped 1,234 of 1,237 rows with no review: rows 1, 2, 3, 4, 5, …",
        "dropped 1 of 1,237 rows with no label: row 1235",
    ]
    assert all("counted from 0" in line and len(line.splitlines()) == 1 for line in lines)


def test_describe_dropped_is_empty_if_no_rows_were_dropped(csv_file):
    assert describe_dropped(read_reviews(csv_file(GOOD))) == []


# --- some of the reviews ---


@pytest.mark.parametrize(("n", "at_most", "expected"), [(5, 5, 5), (5, 9, 5), (6, 5, 3), (100, 7, 7), (0, 5, 0)])
def test_sampled_rows_are_at_equal_distances(monkeypatch, n, at_most, expected):
    monkeypatch.setattr(reviews_module, "MAX_SAMPLE", at_most)
    rows = sample_rows(np.arange(10, 10 + n))
    assert len(rows) == expected
    assert len(set(np.diff(rows).tolist())) <= 1


@given(rows=st.sets(st.integers(0, 49)))
@settings(suppress_health_check=[HealthCheck.function_scoped_fixture], deadline=None, max_examples=20)
def test_reviews_of_some_positions(csv_file, rows):
    path = csv_file(
        "label,review\n" + "".join(f"{i % 2},\n{i % 2},评{i}\n" for i in range(50))
    )  # every other is dropped
    table = read_reviews(path)
    positions = np.array(sorted(rows), dtype=np.int64)
    assert table.texts_of(positions).tolist() == [f"评{i}" for i in positions]
    assert table.sample_texts(positions).tolist() == [f"评{i}" for i in positions]


# --- the real file ---


@pytest.mark.parametrize("encoding", ["utf-8", "utf-8-sig", "gb18030"])
def test_the_real_file_reads_the_same_in_every_encoding(real_csv, tmp_path, encoding):
    path = tmp_path / "real.csv"
    path.write_bytes(real_csv.read_bytes().decode("utf-8").encode(encoding))
    reviews = read_reviews(path)
    assert (reviews.rows_read, len(reviews)) == (7766, 7765)
    assert reviews.dropped == {"no review": [6374]}
    assert reviews.class_names == ("0", "1")
    assert np.bincount(reviews.labels).tolist() == [2443, 5322]
    plain = pd.read_csv(io.BytesIO(real_csv.read_bytes()))
    assert plain["review"].loc[reviews.rows].tolist() == reviews.texts.tolist()
    assert plain["label"].loc[reviews.rows].tolist() == reviews.labels.tolist()
