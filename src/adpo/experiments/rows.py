"""A table of runs as a list of rows: what was set and what was measured in each, by the name of the field."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

Row = Mapping[str, Any]
Rows = list[dict[str, Any]]


def where(rows: Iterable[dict[str, Any]], **fields: Any) -> Rows:
    """The rows with these values.

    >>> where([{"method": "ADPO", "seed": 0}, {"method": "GRPO", "seed": 0}], method="ADPO")
    [{'method': 'ADPO', 'seed': 0}]
    """
    return [row for row in rows if all(row[name] == value for name, value in fields.items())]


def column(rows: Iterable[Row], field: str) -> list[Any]:
    return [row[field] for row in rows]


def distinct(rows: Iterable[Row], field: str) -> list[Any]:
    """Every value of a field once, in the order of the rows."""
    return list(dict.fromkeys(column(rows, field)))


def grouped(rows: Iterable[dict[str, Any]], *fields: str) -> dict[Any, Rows]:
    """The rows that share the values of some fields, by these values (of one field: by its value).

    >>> grouped([{"method": "ADPO", "seed": 0}, {"method": "ADPO", "seed": 1}], "method", "seed").keys()
    dict_keys([('ADPO', 0), ('ADPO', 1)])
    """
    groups: dict[Any, Rows] = {}
    for row in rows:
        key = row[fields[0]] if len(fields) == 1 else tuple(row[field] for field in fields)
        groups.setdefault(key, []).append(row)
    return groups
