"""Small corpora in every format, of made-up words that tell their document."""

from __future__ import annotations

import bz2
import hashlib
import json
import random
from collections import Counter
from collections.abc import Callable, Sequence
from pathlib import Path

import numpy as np

from packhorse.data.packed import shards

Documents = list[list[str]]  # of sentences

SPECIAL = ["[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]"]
WORDS = [first + second for first in "bcdfgklmn" for second in ("ab", "eld", "ist", "orn", "un")]


def own_word(number: int) -> str:
    """A word that no other document has."""
    return f"own{number}"


def write_vocabulary(path: Path, documents: int = 400) -> Path:
    unique_words = [own_word(number) for number in range(documents)]
    letters = [".", *"abcdefghijklmnopqrstuvwxyz0123456789"]
    pieces = [f"##{letter}" for letter in letters]
    path.write_text("\n".join([*SPECIAL, *letters, *pieces, *WORDS, *unique_words]) + "\n")
    return path


def documents(number: int, seed: int = 0, most: int = 12) -> Documents:
    """Each sentence of a document holds its own word."""
    rng = random.Random(seed)
    return [
        [
            " ".join([*rng.choices(WORDS, k=rng.randint(2, most)), own_word(i), "."]).capitalize()
            for _ in range(rng.randint(2, most))
        ]
        for i in range(number)
    ]


def md5(document: Sequence[str]) -> str:
    return hashlib.md5("\n".join(document).encode()).hexdigest()


def _mediawiki(corpus: Documents) -> bytes:
    pages = "".join(
        f"<page><title>Page {number}</title><ns>0</ns><id>{number + 1}</id><revision><id>1</id>"
        f'<text xml:space="preserve">{" ".join(document)}</text></revision></page>\n'
        for number, document in enumerate(corpus)
    )
    names = '<namespaces><namespace key="0" case="first-letter" /></namespaces>'
    site = f"<siteinfo><sitename>Test</sitename>{names}</siteinfo>"
    return bz2.compress(f"<mediawiki>\n{site}\n{pages}</mediawiki>\n".encode())


def _wikiextractor(corpus: Documents) -> bytes:
    docs = (
        f'<doc id="{number}" url="u" title="Page {number}">\nPage {number}\n\n'
        f"{' '.join(document)}\n</doc>\n"
        for number, document in enumerate(corpus)
    )
    return "".join(docs).encode()


def _sentences(corpus: Documents) -> bytes:
    return "\n\n".join("\n".join(document) for document in corpus).encode() + b"\n"


def _text(corpus: Documents) -> bytes:
    parts = (f" = Page {i} = \n\n{' '.join(document)}\n\n" for i, document in enumerate(corpus))
    return "".join(parts).encode()


def _jsonl(corpus: Documents) -> bytes:
    return "".join(json.dumps({"text": " ".join(document)}) + "\n" for document in corpus).encode()


def _parquet(corpus: Documents) -> bytes:
    import pyarrow as pa
    from pyarrow import parquet

    sink = pa.BufferOutputStream()
    parquet.write_table(pa.table({"body": [" ".join(document) for document in corpus]}), sink)
    return sink.getvalue().to_pybytes()


FORMATS: dict[str, tuple[str, Callable[[Documents], bytes]]] = {
    "mediawiki": ("dump.xml.bz2", _mediawiki),
    "wikiextractor": ("wiki_00", _wikiextractor),
    "sentences": ("part-00000-of-00001", _sentences),
    "text": ("texts.txt", _text),
    "jsonl": ("texts.jsonl", _jsonl),
    "parquet": ("texts.parquet", _parquet),
}


def write_source(folder: Path, corpus: Documents, kind: str = "sentences") -> Path:
    name, form = FORMATS[kind]
    folder.mkdir(exist_ok=True)
    (folder / name).write_bytes(form(corpus))
    return folder / name


def tree(folder: Path) -> dict[str, bytes]:
    """Every file below a folder, hidden ones among them."""
    files = (path for path in sorted(folder.rglob("*")) if path.is_file())
    return {path.relative_to(folder).as_posix(): path.read_bytes() for path in files}


Known = tuple[tuple[int, ...], int, int]  # a sequence: its tokens, those of A, random next or not


def sequences_of(folder: Path) -> Counter[Known]:
    """All sequences of a dataset, however they are packed."""
    result: Counter[Known] = Counter()
    dataset = shards.open_dataset(folder)
    for number in range(len(dataset)):
        row = dataset.row(number)
        ends = np.cumsum(row.lengths, dtype=np.int64)
        for begin, end, first, label in zip(
            ends - row.lengths, ends, row.first, row.random_next, strict=True
        ):
            result[tuple(row.ids[begin:end].tolist()), int(first), int(label)] += 1
    return result
