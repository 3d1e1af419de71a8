"""Tables of results, printed by the scripts and written as CSV and JSON."""

import csv
import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any


def write_csv(rows: Sequence[Mapping[str, Any]], path: Path, columns: Sequence[str] | None = None) -> None:
    """By default with all columns that any row has, apart from those of lists and dictionaries."""
    if columns is None:
        known = (name for row in rows for name, value in row.items() if not isinstance(value, (list, dict)))
        columns = list(dict.fromkeys(known))
    path.parent.mkdir(parents=True, exist_ok=True)
    with open(path, "w", newline="") as file:
        writer = csv.DictWriter(file, columns, extrasaction="ignore")
        writer.writeheader()
        writer.writerows(rows)


def write_table(
    rows: Sequence[Mapping[str, Any]],
    description: Mapping[str, Any],
    folder: Path,
    name: str,
    columns: Sequence[str] | None = None,
) -> None:
    """`name`.csv and `name`.json in `folder`; the latter holds all of `rows`, and the description."""
    write_csv(rows, folder / f"{name}.csv", columns)
    (folder / f"{name}.json").write_text(json.dumps({**description, "rows": rows}, indent=1) + "\n")
