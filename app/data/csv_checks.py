"""Strict checks of a CSV file before pandas parses it.

`pandas.read_csv` silently accepts several kinds of malformed files: text after a closing quote, rows with too few
fields, rows with one field too many (their first field becomes an index), and lines that end in a bare carriage return
(some of them are lost). The checks report such files with the line of the first problem.
"""

from __future__ import annotations

import codecs
import csv
import hashlib
import re
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from ..common.errors import UserError, shorten

CHUNK_BYTES = 1 << 20

# RFC 4180: a field is either quoted as a whole, with quotes inside it doubled, or contains no quote.
_QUOTED = r'"[^"]*(?:""[^"]*)*"'
_FIELD = rf'(?:{_QUOTED}|[^",\r\n]*)'
_RECORD = re.compile(rf"{_FIELD}(?:,{_FIELD})*[\r\n]*")
_LEADING_FIELDS = re.compile(rf"(?:{_FIELD},)*")
_CLOSED_QUOTE = re.compile(rf'{_QUOTED}(?!")')
_LINE_END = re.compile(r"\r\n|\r|\n")


@dataclass(frozen=True)
class CsvFormat:
    """What the checks found out about a well-formed CSV file.

    Attributes:
        sha256: Hash of the file's bytes.
        encoding: Python codec that decodes the whole file, `utf-8-sig` or `gb18030`.
        header: Column names in file order.
        n_rows: Number of data rows. As in pandas, blank lines do not count.
    """

    sha256: str
    encoding: str
    header: list[str]
    n_rows: int


def check_csv(path: Path, text_column: str, label_column: str) -> CsvFormat:
    """Check a CSV file's bytes, encoding, quotes, columns and number of fields per row.

    Raises:
        UserError: The file is missing, binary, empty, in another encoding or malformed, or a column is missing or
            duplicated.
        OSError: The file cannot be read.
    """
    sha256 = hash_text_file(path)
    encoding = detect_encoding(path)
    header, n_rows = check_records(path, encoding=encoding, text_column=text_column, label_column=label_column)
    return CsvFormat(sha256, encoding, header, n_rows)


def quote_name(name: str) -> str:
    """Quote a column or class name, which is untrusted and may be long, for an error message."""
    return repr(shorten(name, 40))


def list_names(names: list[str]) -> str:
    """List the first 20 names for an error message."""
    return ", ".join(map(quote_name, names[:20])) + (f" and {len(names) - 20} more" if len(names) > 20 else "")


# --- bytes and encoding ----------------------------------------------------------------------------------------------


def hash_text_file(path: Path) -> str:
    """Return the SHA-256 of a text file.

    Raises:
        UserError: There is no such file, it is not a regular file, it is empty, or it contains a NUL byte.
    """
    if not path.exists():
        raise UserError(f"{path}: no such file")
    if not path.is_file():
        kind = "a folder" if path.is_dir() else "not a regular file"
        raise UserError(f"{path}: is {kind}; give the path of a CSV file")
    digest = hashlib.sha256()
    size = 0
    for chunk in _read_chunks(path):
        if not size and chunk.startswith((codecs.BOM_UTF16_LE, codecs.BOM_UTF16_BE)):
            raise UserError(f"{path}: is UTF-16 or UTF-32; save it as UTF-8 (or GB18030)")
        if (nul := chunk.find(b"\0")) >= 0:
            raise UserError(f"{path}: is a binary file, not a CSV (NUL byte at {_position(path, size + nul)})")
        digest.update(chunk)
        size += len(chunk)
    if not size:
        raise UserError(f"{path}: is empty; it needs a header and rows")
    return digest.hexdigest()


def detect_encoding(path: Path) -> str:
    """Return `utf-8-sig` or `gb18030`, whichever decodes the whole file.

    UTF-8 is tried first: Chinese text in GB18030 is hardly ever valid UTF-8, but many byte sequences are valid GB18030.

    Raises:
        UserError: Neither decodes the file, or the file looks like a single-byte encoding.
    """
    invalid_utf8 = first_undecodable_byte(path, "utf-8")
    if invalid_utf8 is None:
        return "utf-8-sig"
    position = _position(path, invalid_utf8)
    if next(_read_chunks(path)).startswith(codecs.BOM_UTF8):
        raise UserError(f"{path}: starts with a UTF-8 BOM but is not valid UTF-8 at {position}; save it as UTF-8")
    invalid_gb18030 = first_undecodable_byte(path, "gb18030")
    if invalid_gb18030 is not None:
        gb18030_position = _position(path, invalid_gb18030)
        raise UserError(f"{path}: is neither UTF-8 ({position}) nor GB18030 ({gb18030_position}); save it as UTF-8")
    if _looks_single_byte(path):
        raise UserError(
            f"{path}: is not UTF-8 ({position}) and looks like Latin-1 or a similar encoding; save it as UTF-8"
        )
    return "gb18030"


def first_undecodable_byte(path: Path, encoding: str) -> int | None:
    """Return the offset of the first byte that is invalid in the encoding, or None if the whole file decodes."""
    decoder = codecs.getincrementaldecoder(encoding)()
    n_read = 0
    try:
        for chunk in _read_chunks(path):
            n_read += len(chunk)
            decoder.decode(chunk)
        decoder.decode(b"", final=True)
    except UnicodeDecodeError as error:
        # error.object holds the incomplete character kept from the previous chunk, followed by this chunk.
        return n_read - len(error.object) + error.start
    return None


def _looks_single_byte(path: Path) -> bool:
    """Tell whether most non-ASCII characters consist of a high byte followed by an ASCII byte when read as GB18030.

    Accented letters in a single-byte encoding look like this, because a plain letter follows each one ("été" becomes
    one hanzi). In simplified Chinese almost every second byte is 0xA1 or above; in traditional Chinese most are.
    """
    n_characters = n_ascii_second_bytes = 0
    with path.open(encoding="gb18030", newline="") as file:
        while text := file.read(CHUNK_BYTES):
            non_ascii = re.sub(r"[\x00-\x7f]+", "", text)
            encoded = non_ascii.encode("gb18030")
            n_characters += len(non_ascii)
            n_ascii_second_bytes += len(encoded) - len(encoded.translate(None, delete=bytes(range(0x40, 0x7F))))
    return 2 * n_ascii_second_bytes > n_characters


def _read_chunks(path: Path) -> Iterator[bytes]:
    with path.open("rb") as file:
        while chunk := file.read(CHUNK_BYTES):
            yield chunk


def _position(path: Path, offset: int) -> str:
    """Describe a byte offset, with its 1-based line number."""
    with path.open("rb") as file:
        line = file.read(offset).count(b"\n") + 1
    return f"line {line}, byte offset {offset}"


# --- records ---------------------------------------------------------------------------------------------------------


def check_records(path: Path, *, encoding: str, text_column: str, label_column: str) -> tuple[list[str], int]:
    """Check every record and return the header and the number of data rows.

    Raises:
        UserError: A quote is broken, a row has too many or too few fields, a line ends in a bare carriage return, a
            column is missing or duplicated, or there are no rows.
    """
    header: list[str] = []
    n_rows = 0
    first_line = 1  # of the current record
    raw_lines: list[str] = []  # of the current record
    default_limit = csv.field_size_limit(2**31 - 1)  # the default rejects reviews longer than 128 KiB
    try:
        with path.open(encoding=encoding, newline="") as file:

            def record_lines() -> Iterator[str]:
                for line in file:
                    raw_lines.append(line)
                    yield line

            reader = csv.reader(record_lines(), strict=True)
            for fields in reader:
                record = "".join(raw_lines)
                if '"' in record and not _RECORD.fullmatch(record):
                    raise _broken_quote(path, header, first_line=first_line, record=record)
                if record.endswith("\r"):
                    raise UserError(
                        f"{path}: line {reader.line_num}: ends with a bare carriage return; "
                        "save the file with LF or CRLF line endings"
                    )
                if not record.strip(" \t\r\n"):
                    pass  # pandas skips blank lines too
                elif not header:
                    header = fields
                    _check_columns(path, header, text_column=text_column, label_column=label_column)
                elif len(fields) != len(header):
                    raise UserError(
                        f"{path}: line {first_line}: {len(fields)} field{'s' * (len(fields) != 1)}, but the header has "
                        f"{len(header)} ({list_names(header)}); check for an unquoted comma or a missing field"
                    )
                else:
                    n_rows += 1
                raw_lines.clear()
                first_line = reader.line_num + 1
    except csv.Error:
        raise _broken_quote(path, header, first_line=first_line, record="".join(raw_lines)) from None
    finally:
        csv.field_size_limit(default_limit)
    if not header:
        raise UserError(f"{path}: is empty except for blank lines; it needs a header and rows")
    if not n_rows:
        raise UserError(f"{path}: has a header ({list_names(header)}) but no rows")
    return header, n_rows


def _check_columns(path: Path, header: list[str], *, text_column: str, label_column: str) -> None:
    for flag, column in (("--text_column", text_column), ("--label_column", label_column)):
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
