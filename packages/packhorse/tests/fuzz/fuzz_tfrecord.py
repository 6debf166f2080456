"""Fuzz the reader of TFRecords: any bytes become sequences that hold together, or an InputError.

    python tests/fuzz/fuzz_tfrecord.py -max_total_time=60

Needs atheris. By its first byte an input is a file as it is; a record without its checksums, which
are put right so that the mutations reach the Example; or the words of Graphcore's files. Seeds are
records of every form (tests/data/record_files.py); other arguments are libFuzzer's, a folder that
is named keeps the inputs it found.
"""

from __future__ import annotations

import importlib.util
import sys
import tempfile
from pathlib import Path
from types import ModuleType

import atheris

with atheris.instrument_imports(include=["packhorse"]):
    from packhorse.data.packed.masking import Specials
    from packhorse.data.packed.packs import RowLayout, Rows, row_problems
    from packhorse.data.records import prepared, tfrecord
    from packhorse.data.records.graphcore import RecordSizes
    from packhorse.data.sources.files import SourceFile
    from packhorse.errors import InputError

CASES = Path(__file__).resolve().parents[1] / "data" / "record_files.py"
WIDTH, MASKS, MOST, VOCAB = 12, 3, 2, 40
AS_IT_IS, FRAMED, WORDS = range(3)
SPECIALS = Specials(2, 3, 4, 0, VOCAB)


def cases() -> ModuleType:
    spec = importlib.util.spec_from_file_location("record_files", CASES)
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module
    spec.loader.exec_module(module)
    return module


def seeds(known: ModuleType) -> list[bytes]:
    import numpy as np

    rng = np.random.default_rng(0)
    built = [known.draw(rng, 6, VOCAB) for _ in range(4)]
    forms = [known.unpacked(built[0], WIDTH, MASKS)]
    forms += [form(built[:2], WIDTH, MASKS, MOST) for form in (known.ten_arrays, known.cls_last)]
    result = [bytes([FRAMED]) + known.example(form, packed) for form in forms for packed in (1, 0)]
    for compress in known.COMPRESSIONS.values():
        content = b"".join(known.frame(known.example(form)) for form in forms[:1] * 2)
        result.append(bytes([AS_IT_IS]) + compress(content))
    return result + [bytes([WORDS]) + known.words(form) for form in forms[:2]]


def main() -> None:
    # libFuzzer ends the process by itself, so a folder of its own would never be removed.
    folder = Path(tempfile.gettempdir()) / "packhorse-fuzz-tfrecord"
    path, corpus = folder / "records", folder / "seeds"
    corpus.mkdir(parents=True, exist_ok=True)
    known, layout = cases(), RowLayout(WIDTH, VOCAB, static_masks=True)
    for number, content in enumerate(seeds(known)):
        (corpus / str(number)).write_bytes(content)

    def once(content: bytes) -> None:
        kind, content = content[:1], content[1:]
        if kind == bytes([FRAMED]):
            content = known.frame(content) * 2
        path.write_bytes(content)
        tfrecord.sniff(path)
        source = SourceFile(
            path, "graphcore" if kind == bytes([WORDS]) else "tfrecord", len(content)
        )
        try:
            for batch in prepared.read(source, RecordSizes(WIDTH, MASKS, MOST), SPECIALS):
                if len(batch.unpacked.records) and batch.width == WIDTH:
                    rows = Rows.of(batch.unpacked.sequences, batch.unpacked.offsets)
                    assert not list(row_problems(rows, layout))
        except InputError as error:
            assert str(path) in str(error)

    atheris.Setup([*sys.argv, str(corpus)], once)
    atheris.Fuzz()


if __name__ == "__main__":
    main()
