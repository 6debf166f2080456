"""Tables of Hugging Face's `datasets`: a `Dataset`, a stream of one, a folder that it was saved to.

A saved folder is told by its `state.json`. One with splits (a `DatasetDict`) has a folder for each,
so a split is named by its path, FOLDER/train: nothing new to learn, and it works wherever a path
does. Where there is one split only, it is meant. The library is slow to import and an extra, so it
is asked for only when such a folder is opened; a `Dataset` is known by what it offers, not by its
class. Arrow's own checks find a file that was cut, but no letter that was changed.

Follows the layout of `Dataset.save_to_disk`: Arrow streams, named in order by `state.json`.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from packhorse.errors import InputError, MissingExtra

STATE, SPLITS = "state.json", "dataset_dict.json"
ROWS_A_READ = 1024
TEXT_KINDS = ("string", "large_string")
BAD_FOLDER = (ValueError, TypeError, LookupError)  # as Arrow and `datasets` raise


def folder_of_rows(path: Path) -> Path | None:
    """The folder with the rows: this one, or that of its only split; None if none was saved."""
    if (path / STATE).is_file():
        return path
    if not (path / SPLITS).is_file():
        return None
    splits = sorted(state.parent for state in path.glob(f"*/{STATE}"))
    if len(splits) == 1:
        return splits[0]
    if not splits:
        raise InputError(f"{path}: {SPLITS} tells of splits, and there is none; save it again")
    raise InputError(f"{path} holds splits; name one of them: {', '.join(map(str, splits))}")


def open_saved(folder: Path) -> Iterable[Any]:
    """The `Dataset` in a folder, mapped, not loaded."""
    try:
        from datasets import Dataset
    except ImportError as error:
        raise MissingExtra("datasets", "hf") from error

    try:
        return Dataset.load_from_disk(str(folder))
    except OSError as error:
        raise InputError(f"{folder} cannot be read: {_one_line(error)}") from error
    except BAD_FOLDER as error:
        raise InputError(f"{folder}: not a dataset that can be read: {_one_line(error)}") from error


def arrow_files(folder: Path) -> list[Path]:
    """The Arrow streams of a saved folder, in the order of their rows; `datasets` is not needed."""
    state = folder / STATE
    try:
        names = [file["filename"] for file in json.loads(state.read_bytes())["_data_files"]]
        inside = all(Path(name).name == name for name in names)
    except OSError as error:
        raise InputError(f"{state} cannot be read: {_one_line(error)}") from error
    except BAD_FOLDER as error:
        raise InputError(f"{state}: not as `datasets` writes it: {_one_line(error)}") from error
    if missing := [name for name in names if not inside or not (folder / name).is_file()]:
        raise InputError(f"{folder}: {missing[0]} is not there, and {STATE} names it")
    return [folder / name for name in names]


def only_split(splits: Mapping[str, Any]) -> Any:
    """The one table of a `DatasetDict`."""
    if len(splits) == 1:
        return next(iter(splits.values()))
    raise InputError(f"these are splits, not rows; pass one of them: {', '.join(map(str, splits))}")


def is_dataset(given: object) -> bool:
    """Has it columns that can be chosen? A `Dataset` has, streaming or not, and no list."""
    return hasattr(given, "select_columns")


def text_columns(dataset: Any) -> list[str]:
    """The columns that hold text, without the id; of a stream that does not tell, by its start."""
    kinds = dataset.features
    if kinds is None:
        first = next(iter(dataset), {})
        found = [name for name, cell in first.items() if isinstance(cell, str)]
    else:
        found = [name for name in kinds if getattr(kinds[name], "dtype", "") in TEXT_KINDS]
    return [name for name in found if name != "id"]


def rows_in(dataset: Any, columns: Sequence[str]) -> Iterator[dict[str, Any]]:
    """In batches, ten times as fast as row by row; as plain values, whatever format was set."""
    for batch in dataset.select_columns(list(columns)).with_format(None).iter(ROWS_A_READ):
        for values in zip(*(batch[name] for name in columns), strict=True):
            yield dict(zip(columns, values, strict=True))


def _one_line(error: Exception) -> str:
    """An error's first line: `datasets` goes on to tell what it can read otherwise."""
    said = getattr(error, "strerror", None) or str(error)
    return said.strip().partition("\n")[0] or type(error).__name__
