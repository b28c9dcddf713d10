"""What is wrong with a file of reviews is one line."""

from __future__ import annotations

import os

import pandas as pd
import pytest
from helpers.reviews import read_reviews

from app.common.errors import UserError
from app.data.reviews import clean
from app.data.sources import open_sources
from app.settings import Settings

GOOD = "label,review\n1,很好\n0,很差\n"
LINE = '{"review": "a", "label": 1}\n'
PARQUET = pd.DataFrame({"label": [0, 1], "review": ["a", "b"]}).to_parquet()
# Valid GB18030 as well, which would be other characters.
OTHER = {
    "cp949": "label,review\n" + "1,방이 깨끗하고 직원이 친절했어요\n0,시끄러워서 잠을 못 잤습니다\n",
    "big5": "label,review\n" + "1,房間很乾淨服務很好\n0,隔音太差前臺態度惡劣\n" * 9,
    "cp932": "label,review\n" + "1,部屋が清潔でスタッフも親切でした\n0,うるさくて眠れませんでした\n" * 9,
    "euc_jp": "label,review\n" + "1,部屋が清潔でスタッフも親切でした\n0,うるさくて眠れませんでした\n" * 9,
}
# tests/launched/test_user_mistakes.py has the plainest ones: files that are missing, empty, cut off or binary.
MISTAKES = [
    ("rows.csv", "label,review\r\n\r\n \n", "has no rows"),
    ("rows.csv", "label,review\n1,\n,好\n0, \n", "('review') and a label ('label'): 2 with no review, 1"),
    ("rows.csv", 'label,"a\nb"\n1,x\n', r"no column 'review'; the file has 'label', 'a\nb' "),
    ("rows.csv", "review,stars\na,1\nb,0\n", "no column 'label'; the file has 'review', 'stars' "),
    ("rows.csv", "label,review\n1,a\n1.0,b\n", "column 'label' has only one class, '1'"),
    ("rows.csv", 'label,review\n1,a\n0,"b\n1,c\n', "line 4, or a quote before it"),
    ("rows.csv", "label,review\n1,a,b\n0,b,c\n", "line 2, or a quote before it: has 3 fields, but the header has 2"),
    ("rows.csv", "label,review\n1,a,\n0,b,\n", "line 2, "),
    ("rows.csv", 'label,review\n1,"a\nb"\n\n0,b,c\n', "line 5, "),
    ("rows.csv", "label,review\n" + "1,a\n0,b\n" * 10_000 + "0,b,c\n", "line 20002"),
    ("rows.csv", GOOD.encode("utf-16"), "or name its encoding with --encoding, such as gb18030, cp1252 or"),
    ("rows.csv", "label,review\n1,a\n".encode("utf-16-le"), "is not UTF-8, nor Chinese"),
    ("rows.csv", "label,review\n1,部屋\n0,夜\n".encode("iso2022_jp"), "is not UTF-8, nor Chinese"),
    ("rows.csv", GOOD.encode("gb18030") + "1,好".encode("gb18030")[:-1], "is not UTF-8, nor Chinese"),
    *(("rows.csv", OTHER[name].encode(name), "is not UTF-8, nor Chinese") for name in OTHER),
    ("rows.csv", "label,review\n1,¡Hola a\n0,¡Me b\n".encode("cp1252"), "is not UTF-8, nor Chinese"),
    # Too few Chinese characters to tell: these are 주문 and 반품 in CP949. And UTF-8 below GB18030.
    (
        "rows.csv",
        "label,review\n林巩,a\n馆前,b\n".encode("gb18030"),
        "with --encoding, such as gb18030, cp1252 or utf-16",
    ),
    ("rows.csv", (GOOD + "1,我们都说不好\n" * 9).encode("gb18030") + "1,服务态度很好\n".encode(), "is not UTF-8, nor"),
    # Of many rows, only a few have characters that tell.
    ("rows.csv", ("label,review\n" + "1,a\n0,b\n" * 1_500 + "1,it’s\n").encode("cp1252"), "is not UTF-8, nor Chinese"),
    ("rows.csv", ("label,review\n" + "1,a\n0,b\n" * 1_500 + "1,部屋\n").encode("iso2022_jp"), "is not UTF-8, nor"),
    ("rows.csv", "label,review,label\n1,a,2\n0,b,3\n", "has two columns 'label'"),
    ("rows.csv", GOOD * 2 + "\ufeffLabel,review \n", "line 4, or a quote before it: repeats the header: remove it"),
    ("rows.csv", 'label,review\n1,"很好" a\n0,b\n', "line 2, or a quote before it"),
    ("rows.csv", 'label,review\n1,"a\n0,b\n1,"c\n', "line 4, or a quote"),  # three rows that pandas would join
    ("rows.csv", "label,review\n0,thé\n1,café\n1,".encode() + b"caf\xe9\n", "line 4 is not UTF-8, but most lines are"),
    ("$HOME.csv", GOOD, "rename the file"),  # `datasets` would read root.csv
    ("rows.jsonl", '{"review": ["a"], "label": 1}\n' * 2, "column 'review': has lists, objects, or texts and numbers"),
    ("rows.jsonl", LINE + "[" * 100_000, "rows.jsonl: row 1: maximum recursion depth"),
    ("rows.json", "[" * 100_000, "rows.json: maximum recursion depth"),
    ("rows.json", "[" + LINE + ', {"review": "\\ud800", "label": 0}]', "row 1: 'utf-8' codec can't encode"),
    ("rows.json", ("[" + LINE.replace("a", "방") + "]").encode("cp949"), "is not UTF-8: save it as a text file"),
    ("rows.jsonl", LINE + '{"review": "b", label: 0}\n', "row 1"),
    ("rows.jsonl", LINE + "\n[1]\n", "row 1"),
    ("rows.jsonl", LINE.encode() + b'{"review": "\xff", "label": 0}\n', "is not UTF-8: save it as a text file"),
    ("rows.jsonl", LINE + '{"review": "\\ud800", "label": 0}\n', "row 1: 'utf-8' codec can't encode"),
    ("rows.jsonl", "", "has no rows"),
    ("rows.jsonl", "{}\n{}\n", "has no rows"),
    ("rows.json", "[" + LINE, "rows.json: Expecting ',' delimiter: line 2"),
    ("rows.json", "[" + LINE + ", 5]", "row 1: "),
    ("rows.json", '{"data": [' + LINE + "]}", "a JSON file has one object per line, or an array of objects"),
    ("rows.json", "[]\n", "has no rows"),
    ("rows.parquet", PARQUET[:-20], "parquet file"),  # cut off
    ("rows.parquet", pd.DataFrame({"label": [], "review": []}).to_parquet(), "has no rows"),
    # The test rows of good training rows.
    ("test.csv", "label,review\n0,a\n7,b\n", "row 1: label '7' is not a class of"),
    ("test.csv", "stars,review\n0,a\n", "no column 'label'; the file has 'stars', 'review'"),
    ("test.csv", "label,review\n", "has no rows"),
    ("test.csv", "label,review\n1,\n", "no row has both a review ('review') and a label"),
]


@pytest.mark.parametrize(("name", "content", "message"), MISTAKES)
def test_what_is_wrong_with_a_file_is_one_line(tmp_path, name, content, message):
    path, good = tmp_path / name, tmp_path / "good.csv"
    good.write_text(GOOD, "utf-8")
    path.write_bytes(content if isinstance(content, bytes) else content.encode())
    flags = {"csv": str(good), "test_file": str(path)} if path.stem == "test" else {"csv": str(path)}
    with pytest.raises(UserError) as caught:
        clean(open_sources(Settings(**flags), tmp_path / "cache"))
    assert str(caught.value).startswith(f"{path}: ")
    assert message in str(caught.value)
    assert len(str(caught.value).splitlines()) == 1


def test_a_pipe_is_rejected_because_opening_it_would_wait_forever(tmp_path):
    os.mkfifo(tmp_path / "pipe")
    with pytest.raises(UserError, match="pipe: is not a regular file"):
        read_reviews(tmp_path / "pipe")
