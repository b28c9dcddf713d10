"""Parse a CSV file strictly, with the line of the first problem.

`pandas.read_csv` silently accepts several kinds of malformed files: text after a closing quote, rows with too few
fields, rows with one field too many (their first field becomes an index), and lines that end in a bare carriage return
(some of them are lost).
"""

from __future__ import annotations

import codecs
import csv
import hashlib
import json
import re
from collections.abc import Iterable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

from ..common.errors import UserError, shorten

CHUNK = 1 << 20  # bytes or characters that are read at once: a file may be larger than the memory

# RFC 4180: a field is either quoted as a whole, with quotes inside it doubled, or contains no quote.
_QUOTED = r'"[^"]*(?:""[^"]*)*"'
_FIELD = rf'(?:{_QUOTED}|[^",\r\n]*)'
_RECORD = re.compile(rf"{_FIELD}(?:,{_FIELD})*[\r\n]*")
_LEADING_FIELDS = re.compile(rf"(?:{_FIELD},)*")
_CLOSED_QUOTE = re.compile(rf'{_QUOTED}(?!")')
_LINE_END = re.compile(r"\r\n|\r|\n")


def quote_name(name: str) -> str:
    """Quote a column or class name, which is untrusted and may be long, for an error message."""
    return repr(shorten(name, 40))


def list_names(names: list[str]) -> str:
    """List the first 20 names for an error message."""
    return ", ".join(map(quote_name, names[:20])) + (f" and {len(names) - 20} more" if len(names) > 20 else "")


# --- bytes and encoding ----------------------------------------------------------------------------------------------


@contextmanager
def readable(path: Path) -> Iterator[None]:
    """Turn an `OSError` inside the block, which reads a file, into a `UserError`."""
    try:
        yield
    except OSError as error:
        raise UserError(f"{path}: cannot be read: {error.strerror or error}") from error


def hash_file(path: Path) -> str:
    """Return the SHA-256 of a regular file.

    Raises:
        UserError: There is none, or it cannot be read.
    """
    with readable(path):
        check_file(path)
        with path.open("rb") as file:
            return hashlib.file_digest(file, "sha256").hexdigest()


def hash_json(content: object) -> str:
    """Return the SHA-256 of the JSON of a value."""
    return hashlib.sha256(json.dumps(content).encode()).hexdigest()


def find_encoding(path: Path) -> str:
    """Return the encoding of a text file: UTF-8, with or without BOM, or GB18030.

    UTF-8 is tried first: Chinese text in GB18030 is hardly ever valid UTF-8, but many byte sequences are valid GB18030.

    Raises:
        UserError: It is empty, contains a NUL byte, is in neither encoding, or looks like a single-byte encoding.
        OSError: It cannot be read.
    """
    with path.open("rb") as file:
        start = file.read(4)
    if not start:
        raise UserError(f"{path}: is empty; it needs a header and rows")
    if start.startswith((codecs.BOM_UTF16_LE, codecs.BOM_UTF16_BE)):
        raise UserError(f"{path}: is UTF-16 or UTF-32; save it as UTF-8 (or GB18030)")
    before = 0
    for chunk in _chunks(path):
        if (nul := chunk.find(b"\0")) >= 0:
            raise UserError(f"{path}: is a binary file, not a CSV (NUL byte at {_position(path, before + nul)})")
        before += len(chunk)
    if (error := _find_undecodable(path, "utf-8")) is None:
        return "utf-8-sig"
    position = _position(path, error)
    if start.startswith(codecs.BOM_UTF8):
        raise UserError(f"{path}: starts with a UTF-8 BOM but is not valid UTF-8 at {position}; save it as UTF-8")
    if (error := _find_undecodable(path, "gb18030")) is not None:
        raise UserError(
            f"{path}: is neither UTF-8 ({position}) nor GB18030 ({_position(path, error)}); save it as UTF-8"
        )
    if _looks_like_latin_1(path):
        raise UserError(
            f"{path}: is not UTF-8 ({position}) and looks like Latin-1 or a similar encoding; save it as UTF-8"
        )
    return "gb18030"


def check_file(path: Path) -> None:
    """Check that there is a regular file, without reading it.

    Raises:
        UserError: There is none.
        OSError: Its folder cannot be read.
    """
    if not path.exists():
        raise UserError(f"{path}: no such file")
    if not path.is_file():
        kind = "a folder" if path.is_dir() else "not a regular file"
        raise UserError(f"{path}: is {kind}; give the path of a CSV file")


def check_exists(path: Path) -> None:
    """Like `check_file`, except that an `OSError` is left to the program that reads the file."""
    with suppress(OSError):
        check_file(path)


def _chunks(path: Path) -> Iterator[bytes]:
    with path.open("rb") as file:
        while chunk := file.read(CHUNK):
            yield chunk


def _find_undecodable(path: Path, encoding: str) -> int | None:
    """Return the byte offset of the first character that is not valid in an encoding; None if all are."""
    decoder, before = codecs.getincrementaldecoder(encoding)(), 0
    try:
        for chunk in _chunks(path):
            before += len(chunk)
            decoder.decode(chunk)
        decoder.decode(b"", final=True)
    except UnicodeDecodeError as error:
        # The decoder keeps the beginning of a character that continues in the next chunk.
        return before - len(error.object) + error.start
    return None


def _looks_like_latin_1(path: Path) -> bool:
    """Tell whether text that is valid GB18030 is probably in a single-byte encoding.

    Its accented letters look like a high byte followed by an ASCII byte, because a plain letter follows each one ("été"
    becomes one hanzi). In simplified Chinese almost every second byte is 0xA1 or above, in traditional Chinese most.
    """
    n_characters = n_ascii_second_bytes = 0
    with path.open(encoding="gb18030", newline="") as file:
        while text := file.read(CHUNK):
            non_ascii = re.sub(r"[\x00-\x7f]+", "", text)
            encoded = non_ascii.encode("gb18030")
            n_characters += len(non_ascii)
            n_ascii_second_bytes += len(encoded) - len(encoded.translate(None, delete=bytes(range(0x40, 0x7F))))
    return 2 * n_ascii_second_bytes > n_characters


def _position(path: Path, offset: int) -> str:
    """Describe a byte offset, with its 1-based line number."""
    line, before = 1, 0
    for chunk in _chunks(path):
        line += chunk.count(b"\n", 0, max(0, offset - before))
        before += len(chunk)
    return f"line {line}, byte offset {offset}"


# --- records ---------------------------------------------------------------------------------------------------------


def read_columns(path: Path, *, text_column: str, label_column: str | None) -> Iterator[tuple[str, str]]:
    """Yield the fields of two columns of a CSV file, without blank lines, which pandas skips too.

    Only the current record is in memory. Without a label column, all labels are empty.

    Raises:
        UserError: As for `find_encoding`; or the file cannot be read, a quote is broken, a row has too many or too few
            fields, a line ends in a bare carriage return, a column is missing or duplicated, or there are no rows.
    """
    header: list[str] = []
    lines: list[str] = []  # of the current record
    n_lines = n_rows = 0  # before the current record
    default_limit = csv.field_size_limit(2**31 - 1)  # the default rejects reviews longer than 128 KiB
    try:
        with readable(path), path.open(encoding=find_encoding(path), newline="") as file:
            reader = csv.reader(_keep_lines(file, lines), strict=True)
            for fields in reader:
                record = "".join(lines)
                if '"' in record and not _RECORD.fullmatch(record):
                    raise _broken_quote(path, header, first_line=n_lines + 1, record=record)
                if record.endswith("\r"):
                    raise UserError(
                        f"{path}: line {reader.line_num}: ends with a bare carriage return; "
                        "save the file with LF or CRLF line endings"
                    )
                if not record.strip(" \t\r\n"):
                    pass
                elif not header:
                    header = fields
                    check_columns(path, header, text_column=text_column, label_column=label_column)
                    text_position = header.index(text_column)
                    label_position = None if label_column is None else header.index(label_column)
                elif len(fields) != len(header):
                    raise UserError(
                        f"{path}: line {n_lines + 1}: {len(fields)} field{'s' * (len(fields) != 1)}, but the header "
                        f"has {len(header)} ({list_names(header)}); check for an unquoted comma or a missing field"
                    )
                else:
                    yield fields[text_position], "" if label_position is None else fields[label_position]
                    n_rows += 1
                n_lines = reader.line_num
                lines.clear()
    except csv.Error:
        raise _broken_quote(path, header, first_line=n_lines + 1, record="".join(lines)) from None
    finally:
        csv.field_size_limit(default_limit)
    if not header:
        raise UserError(f"{path}: is empty except for blank lines; it needs a header and rows")
    if not n_rows:
        raise UserError(f"{path}: has a header ({list_names(header)}) but no rows")


def _keep_lines(file: Iterable[str], lines: list[str]) -> Iterator[str]:
    """Yield lines, and append each to a list, because `csv.reader` does not return what it has parsed."""
    for line in file:
        lines.append(line)
        yield line


def read_header(path: Path) -> list[str]:
    """Return the first row of a CSV file that is not blank; an empty list if there is none or it is malformed.

    Raises:
        UserError: As for `find_encoding`; or there is no such file, or it cannot be read.
    """
    with readable(path):
        check_file(path)
        with path.open(encoding=find_encoding(path), newline="") as file, suppress(csv.Error):
            return next((fields for fields in csv.reader(file) if any(field.strip() for field in fields)), [])
    return []


def check_columns(path: Path, header: list[str], *, text_column: str, label_column: str | None) -> None:
    for flag, column in (("--text_column", text_column), ("--label_column", label_column)):
        if column is None:
            continue
        if column not in header:
            raise UserError(
                f"{path}: no column {column!r}; the file has {list_names(header)} (choose a column with {flag})"
            )
        if header.count(column) > 1:
            raise UserError(f"{path}: column {column!r} appears {header.count(column)} times; rename all but one")


def _broken_quote(path: Path, header: list[str], *, first_line: int, record: str) -> UserError:
    """Locate and describe the first field of a record whose quoting is broken."""
    leading = _LEADING_FIELDS.match(record)
    assert leading is not None, "the pattern also matches the empty string"
    broken = record[leading.end() :]
    line = first_line + _count_line_ends(leading.group())
    position = len(next(csv.reader([leading.group() + "broken"]))) - 1
    column = f"column {header[position]!r}" if position < len(header) else f"field {position + 1}"
    if closed := _CLOSED_QUOTE.match(broken):
        closing_line = line + _count_line_ends(closed.group())
        problem = f"text follows the closing quote (on line {closing_line}) of the quoted field that starts here"
    elif broken.startswith('"'):
        problem = "the quoted field that starts here has no closing quote"
    else:
        problem = "an unquoted field contains a quote"
    return UserError(
        f'{path}: line {line}, {column}: {problem}; quote the whole field and write each quote in it as ""'
    )


def _count_line_ends(text: str) -> int:
    return len(_LINE_END.findall(text))
