"""Reading reviews: files of every format, what is missing, the classes, and the cache."""

from __future__ import annotations

import csv
import hashlib
import io
import json
import os
import socket
from dataclasses import replace
from pathlib import Path
from unittest.mock import Mock

import datasets
import numpy as np
import pandas as pd
import pyarrow as pa
import pyarrow.parquet
import pytest
from helpers.reviews import read_reviews
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from app.common.errors import UserError
from app.data import reviews as reviews_module
from app.data.reviews import ReviewTable, clean
from app.data.sources import open_sources
from app.settings import Settings


def rows_of(table: ReviewTable) -> list[tuple[str, str] | str]:
    """Return the class and the text of each row of the file, or why it was dropped."""
    rows = {}
    for row, class_id, text in zip(table.rows.tolist(), table.labels, table.texts, strict=True):
        rows[row] = (table.class_names[class_id], text)
    for reason, dropped in table.dropped.items():
        assert not rows.keys() & dropped, "a row is counted twice"
        rows |= dict.fromkeys(dropped, reason)
    return [rows.pop(i) for i in range(table.rows_read)]


def parquet(labels: list[object]) -> bytes:
    file = io.BytesIO()  # pandas would write NaN as a missing value
    pyarrow.parquet.write_table(pa.table({"review": ["好"] * len(labels), "label": labels}), file)
    return file.getvalue()


WORDS = ["NA", "null", "None", "nan", "N/A", "-", "0", "=1+1"]  # pandas treats some of them as missing
LONG = "一个人的𠮷😀" * csv.field_size_limit()  # longer than the module csv allows
TRADITIONAL = "這間飯店的服務態度極為親切，環境乾淨"
# Files that people have: a name, the content, and the rows. Add a row for another encoding, separator or program.
FILES = {
    "other columns": (
        *("rows.csv", "id,label,note,review\n7,1,,很好\n8,0,x,\n9,,y,没有标签\n10,0,z,很差\n"),
        [("1", "很好"), "no review", "no label", ("0", "很差")],
    ),
    "equal names": ("rows.csv", "review,,,x,x,label\n好,a,b,c,d,5\n差,a,b,c,d,1\n", [("5", "好"), ("1", "差")]),
    "whitespace": (
        *("rows.csv", 'label,review,note\n1,a,x\n,\n0,"  \u3000\n"\n" ",b\n0\n"  "\n0,b\n,b\n'),
        [("1", "a"), "no review", "no review", "no label", "no review", "no review", ("0", "b"), "no label"],
    ),
    "quotes": (
        *("rows.csv", 'label,review\r\n"a,b","say ""x"""\r\n"1\n2"," 好\r差\t"\r\n'),
        [("a,b", 'say "x"'), ("1\n2", " 好\r差\t")],
    ),
    "words": (
        *("rows.csv", "label,review\n" + "".join(f"{word},{word}\n" for word in WORDS)),
        list(zip(WORDS, WORDS, strict=True)),
    ),
    **{
        encoding: (
            *("rows.csv", f"label,review\n1,{TRADITIONAL}\n0,{LONG}\n".encode(encoding)),
            [("1", TRADITIONAL), ("0", LONG)],
        )
        for encoding in ("utf-8", "utf-8-sig", "gb18030")
    },
    **{
        f"separated by {mark!r}": (
            "rows.csv",
            f"{first}label{mark}review\n1{mark}好，a, b\n0{mark}差\n",
            [("1", "好，a, b"), ("0", "差")],
        )
        for first, mark in (("", ";"), ("", "\t"), ("", "|"), ("sep=;\n", ";"), ("sep=\t\n", "\t"))
    },
    "numbers": ("rows.parquet", parquet([0.0, 1.0, float("nan")]), [("0", "好"), ("1", "好"), "no label"]),
    "short numbers": (  # as the double that is nearest, 0.10000000149011612
        "rows.parquet",
        parquet(pa.array([0.1, None, 1], pa.float32())),
        [("0.1", "好"), "no label", ("1", "好")],
    ),
    "texts": ("rows.parquet", parquet(["x", None, "1"]), [("x", "好"), "no label", ("1", "好")]),
    "booleans": ("rows.parquet", parquet([True, False]), [("True", "好"), ("False", "好")]),
}


@pytest.mark.parametrize(("name", "content", "rows"), FILES.values(), ids=FILES)
def test_the_rows_of_a_file_and_which_of_them_are_dropped(tmp_path, name, content, rows):
    path = tmp_path / name
    path.write_bytes(content if isinstance(content, bytes) else content.encode())
    assert rows_of(read_reviews(path)) == rows


def test_an_encoding_may_be_named(tmp_path):
    lines = '{"label": 1, "review": "방"}\n{"label": 0, "review": "요"}'
    for name, content in (("rows.csv", "label,review\n1,방\n0,요\n"), ("rows.ndjson", lines)):
        settings = Settings(csv=str(tmp_path / name), encoding="cp949")
        (tmp_path / name).write_bytes(content.encode("cp949"))
        assert rows_of(clean(open_sources(settings))) == [("1", "방"), ("0", "요")]
        with pytest.raises(UserError, match="is not utf-32: save it as a text file in UTF-8, or name its encoding"):
            open_sources(replace(settings, encoding="utf-32"))
        (tmp_path / name).write_bytes(content.encode())  # one of several files, which are not all in that encoding
        assert rows_of(clean(open_sources(settings))) == [("1", "방"), ("0", "요")]
    (tmp_path / "hz.csv").write_bytes("label,review\n1,好\n0,差\n".encode("hz"))  # ASCII, and so UTF-8
    assert clean(open_sources(Settings(csv=str(tmp_path / "hz.csv"), encoding="hz"))).texts.tolist() == ["好", "差"]
    (tmp_path / "test.csv").write_bytes("label,review\n1,我们都说好\n".encode("gb18030"))
    write(ROWS[:6], tmp_path / "utf-8.csv")
    files = {"csv": str(tmp_path / "utf-8.csv"), "test_file": str(tmp_path / "test.csv")}
    assert clean(open_sources(Settings(**files))).notes == ("utf-8-sig", "test: gb18030")
    (tmp_path / "mixed").mkdir()  # in CP1252, the UTF-8 file would be valid, too
    for part, encoding in (("train", "cp1252"), ("test", "utf-8")):
        (tmp_path / "mixed" / f"{part}.csv").write_bytes("label,review\n1,thé\n0,café\n".encode(encoding))
    with pytest.raises(UserError, match=r"train\.csv is not UTF-8, but test\.csv is: save all files in UTF-8"):
        open_sources(Settings(dataset_name=str(tmp_path / "mixed"), encoding="cp1252"))
    (tmp_path / "rows.parquet").write_bytes(parquet([0, 1]))
    with pytest.raises(UserError, match=r"rows\.parquet: --encoding is for CSV and JSON files"):
        open_sources(replace(settings, csv=str(tmp_path / "rows.parquet")))


# pandas infers the types of 10,000 rows at once, and labels may look like numbers in some of them only.
ROWS = pd.DataFrame(
    {
        "label": ["007", "1"] * 5_000 + ["good"] * 8,
        "review": ["000", "NA", "null", "1e5", "2024-01-01", "", None, '好 "a", 很好\nb', "c"] * 1_112,
    }
)


def write(frame: pd.DataFrame, path: Path) -> None:
    path.parent.mkdir(exist_ok=True)
    if path.suffix.lower() == ".parquet":
        frame.to_parquet(path)
    elif path.suffix in (".json", ".jsonl"):
        frame.to_json(path, orient="records", lines=path.suffix == ".jsonl", force_ascii=False)
    else:
        frame.to_csv(path, index=False, sep="\t" if path.suffix == ".tsv" else ",")
    os.utime(path, ns=(0, 0))  # always the same time, as `cp -p` may leave it


@pytest.mark.parametrize("is_array", [False, True])
def test_the_values_of_json_are_texts_whatever_the_other_rows_of_the_files_have(tmp_path, is_array):
    """Each value as `json.loads` returns it. The first file has more than one block of 10 MiB."""
    values = ["2024-01-01", "2024-01-01T00:00:00Z", "01", 1, 10**30, -0.5, True, "true", "1e5", "\u2028b", " a"]
    rows = [
        {"review": value, "label": i % 2, "tags": [value]} for i, value in enumerate(["x" * 1_500] * 8_000 + values)
    ]
    rows[4], rows[-2]["label"] = {"label": None, "review": "b", "more": {}}, float("nan")
    for i, part in enumerate((rows[: -len(values)], rows[-len(values) :])):
        lines = [json.dumps(part)] if is_array else map(json.dumps, part)
        (tmp_path / f"train-{i}.jsonl").write_text("\n\n".join(lines))
    table = clean(open_sources(Settings(dataset_name=str(tmp_path))))
    expected = [(str(row["label"]), str(row.get("review"))) for row in rows]
    expected[4] = expected[-2] = "no label"
    assert rows_of(table) == expected


FORMATS = ["rows.csv", "rows.jsonl", "rows.json", "rows.parquet", "ROWS.Parquet", "[ab]*.jsonl"]
FORMATS += [f"data/train-{{}}.{ending}" for ending in ("csv", "csv.gz", "tsv", "jsonl", "parquet")]


@pytest.mark.parametrize("name", FORMATS)
def test_the_same_rows_are_the_same_table_in_any_format_and_changed_ones_are_read_again(tmp_path, monkeypatch, name):
    path = tmp_path / name
    flags = {"dataset_name": str(path.parent)} if "/" in name else {"csv": str(path)}
    lookup = Mock(side_effect=OSError("no network"))
    monkeypatch.setattr(socket, "getaddrinfo", lookup)  # of another machine, whatever this environment sets
    monkeypatch.setattr(datasets.config, "HF_HUB_OFFLINE", False)
    monkeypatch.setattr(datasets.config, "HF_UPDATE_DOWNLOAD_COUNTS", True)
    cache, changed = tmp_path / "cache", ROWS.replace({"review": {"NA": "zw"}})
    for frame, caches in ((ROWS, (None, cache, cache)), (changed, (cache,))):
        for i, part in enumerate((frame[:6], frame[6:]) if "{}" in name else (frame,)):
            write(part, path.with_name(path.name.format(i)))
        expected = [(label, text) if text else "no review" for label, text in frame.fillna("").itertuples(index=False)]
        for folder in caches:
            table = clean(open_sources(Settings(**flags), folder))
            assert rows_of(table) == expected
            assert table.class_names == ("007", "1", "good")
            assert any(note.startswith("train rows from 2 files: 'train-0.") for note in table.notes) == ("{}" in name)
            assert table.sha256 == hashlib.sha256(frame.to_csv(index=False).encode()).hexdigest()
    lookup.assert_not_called()


# ---- any content -----------------------------------------------------------------------------------------------------

PIECES = st.sampled_from(["1", "0", ",", ",", '"', '"', "\n", "\r\n", "\r", " ", "好", "x"])
# Any character that a text in a CSV may have.
TEXTS = st.text(st.sampled_from(',"\r\n \t') | st.characters(exclude_categories=["Cs"], exclude_characters="\0"))
QUOTED_ROWS = TEXTS.map(lambda text: '\n1,"{}"\n'.format(text.replace('"', '""')))


@settings(suppress_health_check=[HealthCheck.function_scoped_fixture], max_examples=60)
@given(start=st.sampled_from(["", "\n"]), body=st.lists(PIECES | QUOTED_ROWS, max_size=25) | st.lists(QUOTED_ROWS))
def test_any_accepted_file_has_the_row_numbers_and_texts_of_pandas(tmp_path, start, body):
    """Arbitrary content is either rejected in one line or read exactly as `pandas.read_csv` reads it as texts."""
    path = tmp_path / "reviews.csv"
    path.write_bytes((start + "label,review\n1,好\n0,差\n" + "".join(body)).encode())
    try:
        table = read_reviews(path)
    except UserError as error:
        assert len(str(error).splitlines()) == 1  # noqa: PT017
        return
    plain = pd.read_csv(io.BytesIO(path.read_bytes()), dtype=str, keep_default_na=False)
    assert plain["review"].loc[table.rows].tolist() == table.texts.tolist()
    assert len(rows_of(table)) == len(plain)
    assert table.sha256 == hashlib.sha256(path.read_bytes()).hexdigest()


@pytest.mark.parametrize("encoding", ["utf-8", "gb18030"])
def test_the_real_file_is_that_of_pandas_in_every_encoding(real_csv, tmp_path, encoding):
    path = tmp_path / "real.csv"
    path.write_bytes(real_csv.read_bytes().decode("utf-8").encode(encoding))
    table = read_reviews(path)
    assert (table.rows_read, len(table), table.dropped) == (7766, 7765, {"no review": [6374]})
    plain = pd.read_csv(io.BytesIO(real_csv.read_bytes())).loc[table.rows]
    assert plain["review"].tolist() == table.texts.tolist()
    assert plain["label"].tolist() == table.labels.tolist()


# ---- classes ---------------------------------------------------------------------------------------------------------


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
def test_class_names_are_sorted_and_integers_normalized(tmp_path, labels, names, ids):
    path = tmp_path / "rows.csv"
    path.write_text("label,review\n" + "".join(f"{label},评\n" for label in labels), "utf-8")
    table = read_reviews(path)
    assert (table.class_names, table.labels.tolist()) == (names, ids)


def test_classes_get_other_names_in_the_order_of_the_labels(tmp_path):
    path = tmp_path / "rows.csv"
    path.write_text("stars,text\n1,很好\n0,很差\n1.0,好\n", "utf-8")
    table = read_reviews(path, "text", "stars", label_names="1=positive, 0 = negative")
    assert (table.class_names, table.labels.tolist()) == (("negative", "positive"), [1, 0, 1])
    assert read_reviews(path, "text", "stars", label_names="1=positive").class_names == ("0", "positive")
    path.write_text("stars,text\n-1,很差\n", "utf-8")  # a label with a name, so it does not mean that there is none
    trained = {"class_names": ("negative", "positive"), "label_names": "-1=negative,1=positive"}
    assert clean(open_sources(Settings(csv=str(path))), ("text", "stars"), **trained).labels.tolist() == [0]
    path.write_text("stars,text\n1,很好\n0,很差\n", "utf-8")
    for names in ("2=a", "0=a,1=a", "0=1"):  # of other classes, or equal ones
        with pytest.raises(UserError, match="--label_names: must give different names to classes of"):
            read_reviews(path, "text", "stars", label_names=names)
    for names in ("0", "=a", "0=", "0=a,0=b", "0=a,", ","):
        with pytest.raises(UserError, match="--label_names"):
            Settings(label_names=names)


@pytest.mark.parametrize(
    "text",
    [
        'review\tlabel\n"it was\tgood\nfine\tbad\nquiet"\tgood\nloud\tbad\n',
        'source\tlabel\treview\nx\tgood\t"it was\nx\tbad\tfine\nx\tgood\tquiet"\nx\tbad\tloud\n',
        'note\tlabel\treview\n"x\tgood\tit was\nx\tbad\tfine\nx"\tgood\tquiet\nx\tbad\tloud\n',
    ],
)
def test_rows_between_the_quotes_of_two_reviews_are_doubted(tmp_path, text):
    path = tmp_path / "train.tsv"
    path.write_text(text)
    assert len(pd.read_csv(path, sep="\t", quoting=csv.QUOTE_NONE)) == 4
    for table in (read_reviews(path), clean(open_sources(Settings(dataset_name=str(tmp_path))))):
        assert len(table) == 2
        assert table.notes[0] == "utf-8-sig, 1 row with line breaks within quotes"
    path.write_text(text.replace('"', "“"))
    assert read_reviews(path).notes == ("utf-8-sig",)


# ---- tables larger than the memory -----------------------------------------------------------------------------------


@given(rows=st.sets(st.integers(0, 49)), at_most=st.integers(1, 60))
@settings(suppress_health_check=[HealthCheck.function_scoped_fixture], max_examples=20)
def test_reviews_of_some_positions_and_a_sample_of_them_at_equal_distances(tmp_path, rows, at_most):
    path = tmp_path / "rows.csv"  # in which every other row is dropped
    path.write_text("label,review\n" + "".join(f"{i % 2},\n{i % 2},评{i}\n" for i in range(50)), "utf-8")
    table, positions = read_reviews(path), np.array(sorted(rows), dtype=np.int64)
    assert table.texts_of(positions).tolist() == [f"评{i}" for i in positions]
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(reviews_module, "MAX_SAMPLE", at_most)
        sample = [positions.tolist().index(int(text[1:])) for text in table.sample_texts(positions)]
    assert min(at_most, len(rows)) / 2 <= len(sample) <= at_most
    assert len(set(np.diff(sample))) <= 1


def test_a_vocabulary_is_learned_from_the_beginning_of_a_long_review(tmp_path):
    path = tmp_path / "rows.csv"
    path.write_text(f"label,review\n1,{'好' * 200_000}\n0,差\n", "utf-8")
    assert read_reviews(path).sample_texts(np.arange(2)).tolist() == ["好" * reviews_module.MAX_CHARACTERS, "差"]


def test_cached_reviews_are_mapped_not_copied(review_csv, tmp_path):
    path, cache = review_csv(2_000), tmp_path / "cache"
    path.write_text(path.read_text("utf-8").replace("\n", "\n1,\n", 1), "utf-8")  # a row that is dropped
    read_reviews(path, cache_dir=cache)
    before = pa.total_allocated_bytes()
    table = read_reviews(path, cache_dir=cache)
    assert (len(table), table.dropped) == (2_000, {"no review": [0]})
    assert table.texts_of(np.arange(0, 2_000, 100)).tolist() == table.texts.tolist()[::100]
    assert pa.total_allocated_bytes() - before < len("".join(table.texts)) / 2
    with pytest.raises(UserError, match=f"--cache_dir {path}/datasets/.*: cannot be written: Not a directory"):
        read_reviews(path, cache_dir=path)
