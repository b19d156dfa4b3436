"""Files: the events of an epoch as one file, which appears whole or not at all."""

import csv
import io
from collections.abc import Sequence

import msgspec
import pyarrow as pa
import pyarrow.parquet as pq

from penstock.errors import CorruptionError, InvalidError
from penstock.events import Event
from penstock.sources import FileFormat
from penstock.storage import Storage, settle


def write_epoch(folder: Storage, name: str, file_format: FileFormat, events: Sequence[Event]) -> None:
    """Write the events of an epoch as one file; writing the same again changes nothing."""
    data = _ENCODERS[file_format]([event.value for event in events])
    full = f"{name}.{file_format}"
    if settle(folder, full, data) != data:
        raise CorruptionError(full, "it was written with another content before")


def _json(values: Sequence[object]) -> bytes:
    return b"".join(msgspec.json.encode(value) + b"\n" for value in values)


def _csv(values: Sequence[object]) -> bytes:
    out = io.StringIO()
    columns = list(dict.fromkeys(name for value in values for name in _fields(value, "csv")))
    writer = csv.DictWriter(out, columns, lineterminator="\n")
    writer.writeheader()
    writer.writerows(values)  # type: ignore[arg-type]
    return out.getvalue().encode()


def _parquet(values: Sequence[object]) -> bytes:
    columns = list(dict.fromkeys(name for value in values for name in _fields(value, "parquet")))
    table = pa.table({name: [value.get(name) for value in values] for name in columns})  # type: ignore[attr-defined]
    out = pa.BufferOutputStream()
    pq.write_table(table, out)
    data: bytes = out.getvalue().to_pybytes()
    return data


def _fields(value: object, file_format: str) -> list[str]:
    if not isinstance(value, dict):
        raise InvalidError(
            f"a {file_format} file has columns, so values are dicts; {value!r:.80} is not: make one before files()"
        )
    return list(value)


_ENCODERS = {"json": _json, "csv": _csv, "parquet": _parquet}
