"""Texts of very uneven length that are on every machine: docstrings of Python's own library.

python docstrings.py          # writes train.csv and dev.csv: a text, and what it documents
"""

import csv
import importlib
import inspect
import random

MODULES = (
    "argparse asyncio collections concurrent.futures configparser csv datetime decimal difflib"
    " email.message fractions functools heapq http.client inspect json logging pathlib random"
    " sched shutil sqlite3 statistics string subprocess tarfile tempfile threading unittest zipfile"
)


def docstrings():
    """(text, "class" or "function") of what the modules offer, each text once."""
    found = {}
    for name in MODULES.split():
        for member in vars(importlib.import_module(name)).values():
            text = None
            if inspect.isclass(member) or inspect.isroutine(member):
                text = inspect.getdoc(member)
            if text and 20 < len(text) < 900:
                found.setdefault(text, "class" if inspect.isclass(member) else "function")
    return list(found.items())


def write_tables(held_out=60):
    """train.csv and dev.csv, with a header, for `packhorse train --config recipe.toml`."""
    rows = docstrings()
    random.Random(0).shuffle(rows)
    for name, part in (("dev.csv", rows[:held_out]), ("train.csv", rows[held_out:])):
        with open(name, "w", encoding="utf-8", newline="") as file:
            csv.writer(file).writerows([("text", "label"), *part])
        print(f"{name}: {len(part)} texts")


if __name__ == "__main__":
    write_tables()
