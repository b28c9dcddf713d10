"""A CSV of labelled reviews, read with pandas, checked strictly and cleaned: the only place that opens the data file.

pandas parses; before it does, one streaming pass looks for what pandas would read without a word: text after a closing
quote, rows with too few fields, rows with one too many (pandas takes their first field for an index), lines that end
with a carriage return alone (pandas loses some of them), another encoding.
"""

import codecs
import csv
import hashlib
import re
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import pandas as pd

from app.errors import UserError

CLEANING_RULES = (
    "rows without a review (empty or only whitespace), then rows without a label (the same), are dropped; "
    "reviews are kept to the letter; labels are stripped, and 1.0 and +1 are the class 1"
)

_CHUNK_BYTES = 1 << 20
_MANY_CLASSES, _FEW_CLASSES = 1000, 20
_FIRST_ROWS = 5

# RFC 4180: a field is quoted as a whole, with its own quotes doubled, or has no quote in it at all.
_QUOTED = r'"[^"]*(?:""[^"]*)*"'
_FIELD = rf'(?:{_QUOTED}|[^",\r\n]*)'
_RECORD = re.compile(rf"{_FIELD}(?:,{_FIELD})*[\r\n]*")
_LEADING_FIELDS = re.compile(rf"(?:{_FIELD},)*")
_CLOSED_QUOTE = re.compile(rf'{_QUOTED}(?!")')
_LINE_END = re.compile(r"\r\n|\r|\n")
# At most 18 digits, so that it fits int64; 007 is a code and no number.
_INTEGER = re.compile(r"([+-]?(?:0|[1-9][0-9]{0,17}))(?:\.0*)?")


@dataclass(frozen=True, eq=False)
class ReviewTable:
    """The usable reviews of one CSV. All row numbers are 0-based data rows, the index of `pandas.read_csv(path)`."""

    path: Path
    sha256: str
    """of the file's bytes"""
    rows_read: int
    """data rows in the file"""
    dropped: dict[str, list[int]]
    """reason ("no review" or "no label") -> data rows, in file order; only reasons that occur"""
    class_names: tuple[str, ...]
    """class id -> the data's label value, as text"""
    rows: np.ndarray
    """int64 (n,): the data row of each kept review"""
    texts: pd.Series
    """str (n,), RangeIndex: the only copy of the text that a process holds"""
    labels: np.ndarray
    """int64 (n,): class ids"""

    def __len__(self) -> int:
        return len(self.texts)


def read_reviews(path: str | Path, text_column: str = "review", label_column: str = "label") -> ReviewTable:
    """Read, check and clean a CSV with a header (UTF-8, with or without BOM, or GB18030; commas; any extra columns).

    Only an empty field is missing: "NA", "null" and "nan" are reviews, or labels, like any other. Classes are ordered
    by number where every label is an integer, else by code point.

    Raises `UserError`, one line that names the file and, where there is one, line and column: the file can't be read or
    is binary, empty or in another encoding; a column is missing or there twice; a quote is broken; a row has too many
    or too few fields; nothing is left after cleaning; the labels are one class only or too many to be classes.
    """
    path = Path(path)
    if text_column == label_column:
        raise UserError(f"{path}: --text_column and --label_column both name {text_column!r}: they must differ")
    try:
        sha256 = _sha256_of_text_file(path)
        encoding = _encoding(path)
        header, rows_read = _check_records(path, encoding, text_column, label_column)
        positions = sorted([header.index(text_column), header.index(label_column)])
        frame = _parsed(path, encoding, positions)
    except OSError as error:
        raise UserError(f"{path}: cannot be read: {error.strerror or error}") from error
    frame.columns = pd.Index([header[position] for position in positions])
    assert len(frame) == rows_read, f"{path}: pandas reads {len(frame)} rows where the csv module reads {rows_read}"

    no_review, no_label = _missing(frame[text_column]), _missing(frame[label_column])
    reasons = {"no review": no_review, "no label": no_label & ~no_review}
    dropped = {reason: np.flatnonzero(rows).tolist() for reason, rows in reasons.items() if rows.any()}
    rows = np.flatnonzero(~(no_review | no_label)).astype(np.int64)
    if not len(rows):
        counts = ", ".join(f"{len(rows_dropped):,} with {reason}" for reason, rows_dropped in dropped.items())
        raise UserError(f"{path}: no row has both a review ({text_column!r}) and a label ({label_column!r}): {counts}")

    class_names, labels = _classes(path, label_column, frame[label_column].iloc[rows])
    texts = frame[text_column].iloc[rows].reset_index(drop=True)
    return ReviewTable(path, sha256, rows_read, dropped, class_names, rows, texts, labels)


def describe_dropped(table: ReviewTable) -> list[str]:
    """One line for each reason that rows were dropped for: how many, and the first row numbers."""
    return [
        f"{table.path}: dropped {len(rows):,} of {table.rows_read:,} rows with {reason}: "
        f"{', '.join(map(str, rows[:_FIRST_ROWS]))}{', …' if len(rows) > _FIRST_ROWS else ''} "
        "(data rows, counted from 0 below the header, as in predictions.csv)"
        for reason, rows in table.dropped.items()
    ]


def _parsed(path: Path, encoding: str, columns: list[int]) -> pd.DataFrame:
    with path.open("rb") as file:  # bytes: over a text file pandas takes quadratic time, and a path may be unpacked
        return pd.read_csv(
            file,
            encoding=encoding,
            usecols=columns,
            index_col=False,
            dtype=str,
            keep_default_na=False,
            na_values=[""],
        )


def _missing(column: pd.Series) -> np.ndarray:
    return (column.isna() | column.str.isspace()).to_numpy(bool)


# --- bytes: is it text, and in which encoding? ---------------------------------------------------------------------


def _sha256_of_text_file(path: Path) -> str:
    """The SHA-256 of a file that exists, is a file, isn't empty and holds no NUL byte."""
    if not path.exists():
        raise UserError(f"{path}: no such file")
    if not path.is_file():
        raise UserError(f"{path}: is {'a folder' if path.is_dir() else 'no regular file'}; give the path of a CSV file")
    digest = hashlib.sha256()
    size = 0
    for chunk in _chunks(path):
        if not size and chunk.startswith((codecs.BOM_UTF16_LE, codecs.BOM_UTF16_BE)):
            raise UserError(f"{path}: is UTF-16 or UTF-32; save it as UTF-8 (or GB18030)")
        if (nul := chunk.find(b"\0")) >= 0:
            where = f"line {_line_at(path, size + nul)}, byte offset {size + nul}"
            raise UserError(f"{path}: is a binary file, not a CSV (a NUL byte at {where})")
        digest.update(chunk)
        size += len(chunk)
    if not size:
        raise UserError(f"{path}: is empty; a header and rows are needed")
    return digest.hexdigest()


def _encoding(path: Path) -> str:
    """`utf-8-sig` or `gb18030`, whichever decodes the whole file; UTF-8 goes first, because Chinese in GB18030 is
    hardly ever valid UTF-8, while much else is valid GB18030."""
    not_utf8 = _undecodable_at(path, "utf-8")
    if not_utf8 is None:
        return "utf-8-sig"
    where = f"line {_line_at(path, not_utf8)}, byte offset {not_utf8}"
    if next(_chunks(path)).startswith(codecs.BOM_UTF8):
        raise UserError(f"{path}: starts as UTF-8 (with BOM) but isn't valid UTF-8 at {where}; save it as UTF-8")
    not_gb18030 = _undecodable_at(path, "gb18030")
    if not_gb18030 is not None:
        also = f"line {_line_at(path, not_gb18030)}, byte offset {not_gb18030}"
        raise UserError(f"{path}: is neither UTF-8 ({where}) nor GB18030 ({also}); save it as UTF-8")
    if _looks_single_byte(path):
        raise UserError(f"{path}: isn't UTF-8 ({where}) and looks like Latin-1 or its kin; save it as UTF-8")
    return "gb18030"


def _undecodable_at(path: Path, encoding: str) -> int | None:
    """The offset of the first byte that isn't valid in the encoding; None where all are."""
    decoder = codecs.getincrementaldecoder(encoding)()
    read = 0
    try:
        for chunk in _chunks(path):
            read += len(chunk)
            decoder.decode(chunk)
        decoder.decode(b"", final=True)
    except UnicodeDecodeError as error:
        return read - len(error.object) + error.start  # error.object: what was kept of the last chunk, and this one
    return None


def _looks_single_byte(path: Path) -> bool:
    """Whether most characters beyond ASCII are a high byte followed by an ASCII letter or sign.

    That is what accented letters inside words look like when they are read as GB18030 ("été" becomes one hanzi). In
    simplified Chinese nearly every second byte is 0xA1 or above, and in traditional Chinese most are.
    """
    characters = ascii_second = 0
    with path.open(encoding="gb18030", newline="") as file:
        while text := file.read(_CHUNK_BYTES):
            beyond_ascii = re.sub(r"[\x00-\x7f]+", "", text)
            encoded = beyond_ascii.encode("gb18030")
            characters += len(beyond_ascii)
            ascii_second += len(encoded) - len(encoded.translate(None, delete=bytes(range(0x40, 0x7F))))
    return 2 * ascii_second > characters


def _chunks(path: Path) -> Iterator[bytes]:
    with path.open("rb") as file:
        while chunk := file.read(_CHUNK_BYTES):
            yield chunk


def _line_at(path: Path, offset: int) -> int:
    """The 1-based line that holds the byte at this offset."""
    with path.open("rb") as file:
        return file.read(offset).count(b"\n") + 1


# --- records: are the quotes and the number of fields right? -------------------------------------------------------


def _check_records(path: Path, encoding: str, text_column: str, label_column: str) -> tuple[list[str], int]:
    """The header and the number of data rows, once every record is known to be well formed.

    Blank lines are no rows, as for pandas.
    """
    header: list[str] = []
    n_rows = 0
    line = 1  # where the record at hand starts
    raw: list[str] = []  # its lines
    limit = csv.field_size_limit(2**31 - 1)  # the default refuses reviews beyond 128 KiB
    try:
        with path.open(encoding=encoding, newline="") as file:

            def remembered_lines() -> Iterator[str]:
                for text in file:
                    raw.append(text)
                    yield text

            reader = csv.reader(remembered_lines(), strict=True)
            for fields in reader:
                record = "".join(raw)
                if '"' in record and not _RECORD.fullmatch(record):
                    raise _broken_quote(path, header, line, record)
                if record.endswith("\r"):
                    raise UserError(
                        f"{path}: line {reader.line_num}: ends with a carriage return alone; "
                        "save the file with LF or CRLF line ends"
                    )
                if not record.strip(" \t\r\n"):
                    pass
                elif not header:
                    header = fields
                    _check_columns(path, header, text_column, label_column)
                elif len(fields) != len(header):
                    raise UserError(
                        f"{path}: line {line}: {len(fields)} field{'s' * (len(fields) != 1)} where the header has "
                        f"{len(header)} ({_listed(header)}); is a comma outside quotes, or a field missing?"
                    )
                else:
                    n_rows += 1
                raw.clear()
                line = reader.line_num + 1
    except csv.Error:
        raise _broken_quote(path, header, line, "".join(raw)) from None
    finally:
        csv.field_size_limit(limit)
    if not header:
        raise UserError(f"{path}: is empty but for blank lines; a header and rows are needed")
    if not n_rows:
        raise UserError(f"{path}: has a header ({_listed(header)}) and no rows")
    return header, n_rows


def _check_columns(path: Path, header: list[str], text_column: str, label_column: str) -> None:
    for flag, column in (("--text_column", text_column), ("--label_column", label_column)):
        if column not in header:
            raise UserError(f"{path}: no column {column!r}; there are {_listed(header)} (choose one with {flag})")
        if header.count(column) > 1:
            raise UserError(f"{path}: column {column!r} is there {header.count(column)} times; rename all but one")


def _broken_quote(path: Path, header: list[str], first_line: int, record: str) -> UserError:
    """Where and how the first field with a broken quote in this record is broken."""
    leading = _LEADING_FIELDS.match(record)
    assert leading is not None, "the pattern matches the empty string too"
    broken = record[leading.end() :]
    line = first_line + _line_ends(leading.group())
    position = len(next(csv.reader([leading.group() + "broken"]))) - 1
    column = f"column {header[position]!r}" if position < len(header) else f"field {position + 1}"
    if closed := _CLOSED_QUOTE.match(broken):
        closing_line = line + _line_ends(closed.group())
        what = f"the quote that opens here closes on line {closing_line} with text after it"
    elif broken.startswith('"'):
        what = "the quote that opens here never closes"
    else:
        what = "a quote inside a field that isn't quoted"
    return UserError(f'{path}: line {line}, {column}: {what}; quote the whole field and write a quote in it as ""')


def _line_ends(text: str) -> int:
    return len(_LINE_END.findall(text))


def _listed(names: list[str]) -> str:
    return ", ".join(map(_short, names[:20])) + (f" and {len(names) - 20} more" if len(names) > 20 else "")


def _short(name: str) -> str:
    """Untrusted text as part of one line."""
    return repr(name if len(name) <= 40 else name[:39] + "…")


# --- labels --------------------------------------------------------------------------------------------------------


def _classes(path: Path, label_column: str, values: pd.Series) -> tuple[tuple[str, ...], np.ndarray]:
    """The classes' names in order and the class id of each value (int64)."""
    values = values.str.strip()
    distinct: list[str] = values.unique().tolist()
    if len(distinct) > _MANY_CLASSES or (len(distinct) > _FEW_CLASSES and 2 * len(distinct) > len(values)):
        raise UserError(
            f"{path}: column {label_column!r} has {len(distinct):,} different values in {len(values):,} rows "
            f"({_listed(distinct[:3])}, …): too many to be classes; choose another with --label_column"
        )
    name_of = {value: _class_name(value) for value in distinct}
    names = sorted(set(name_of.values()))
    if all(_INTEGER.fullmatch(name) for name in names):
        names.sort(key=int)
    if len(names) == 1:
        raise UserError(
            f"{path}: column {label_column!r} has one class only, {_short(names[0])}; two or more are needed"
        )
    ids = {value: names.index(name) for value, name in name_of.items()}
    return tuple(names), values.map(ids).to_numpy(np.int64)


def _class_name(value: str) -> str:
    """A float column, as a missing label makes of integers, writes 1.0 where another writes 1: both are the class 1."""
    integer = _INTEGER.fullmatch(value)
    return str(int(integer[1])) if integer else value
