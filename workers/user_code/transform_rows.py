"""A process in which a user's function makes rows of rows: row -> row, or None to leave it out.

    python -m corral.workers.user_code.transform_rows SOURCE OUTPUT

SOURCE is a `SourceConfig` as JSON, whose files, rows and function are read. It ends with 1 and the reason if the
function fails, or returns what is no row.
"""

import os
import sys
from pathlib import Path
from typing import Any

import msgspec

from corral.experiments.config.data import SourceConfig
from corral.experiments.datasets.formats import open_rows
from corral.experiments.inputs.users_process import check_not_hidden
from corral.workers.user_code.blame import describe_error
from corral.workers.user_code.loading import load_callable


def transform_rows(function: Any, files: tuple[Path, ...], wanted: slice, output: Path) -> None:
    """
    Raises:
        ValueError: naming the row that the function makes no row of.
    """
    rows, encode = open_rows(files), msgspec.json.Encoder().encode
    with output.open("wb") as stream:
        for number in range(len(rows))[wanted]:
            if (row := rows[number]) is None:
                continue
            try:
                made = function(row)
            except Exception as error:
                raise ValueError(f"{rows.place(number)}: {describe_error(error)}") from error
            if made is None:
                continue
            if not isinstance(made, dict):
                raise ValueError(
                    f"{rows.place(number)}: it returned {type(made).__name__}, and a row is a dict or None"
                )
            stream.write(encode(made) + b"\n")


def main(source: str, output: str) -> int:
    """The exit status."""
    asked = SourceConfig.model_validate_json(source)
    sys.path.append(os.getcwd())
    try:
        check_not_hidden(str(asked.transform), Path.cwd())
        function = load_callable(str(asked.transform))
        transform_rows(function, asked.files, asked.first_and_last, Path(output))
    except Exception as error:  # whatever a user's module raises when it is imported
        print(error if isinstance(error, ValueError) else describe_error(error))
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main(*sys.argv[1:]))
