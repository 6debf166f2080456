"""`packhorse port`: run, check or translate a script written for PopTorch or TensorFlow's IPU.

A script runs as `python SCRIPT` would run it, so stdout is the script's: the command's own output
goes to stderr, including that of --json. Arguments before SCRIPT are the command's, those after it
the script's.
"""

from collections.abc import Sequence
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

from cyclopts import Parameter

from packhorse.cli.console import JsonFlag, emit, note, short, table
from packhorse.errors import InputError, PackhorseError

if TYPE_CHECKING:
    from packhorse_port.check import CheckReport

SWITCH = Parameter(negative="", show_default=False)
NOT_RUNNING = ("--check", "--patch")  # the script is not run, so flags after it are ours too


class WillFail(PackhorseError):
    """A checked script cannot run as it is."""

    exit_code = 1


def port(
    script: Annotated[str, Parameter(help="The script; - is standard input.")],
    /,
    *arguments: Annotated[str, Parameter(help="The script's own arguments.")],
    check: Annotated[
        bool, SWITCH, Parameter(help="Report what would happen, line by line.")
    ] = False,
    patch: Annotated[
        Path | None, Parameter(help="Write an equivalent plain script, for PyTorch or TensorFlow.")
    ] = None,
    overwrite: Annotated[bool, SWITCH, Parameter(help="Replace an existing file.")] = False,
    quiet: Annotated[bool, SWITCH, Parameter(help="No notices, no summary at the end.")] = False,
    json: JsonFlag = False,
) -> None:
    """Run a script written for PopTorch or TensorFlow's IPU, unchanged.

    The script runs as `python SCRIPT` would run it; `import poptorch` works,
    and so do torchvision's datasets and transforms where it is not installed.
    At the end a summary on stderr lists what differed from an IPU; with --json
    it is one line of JSON, also on stderr, because stdout is the script's.
    It runs on the GPU if there is one, unless PACKHORSE_DEVICE=cpu is set.
    Steps run as Python; PACKHORSE_PORT_STEPS=traced or compiled is faster and
    freezes what forward does besides torch. Weights changed on the host take
    effect when PopTorch would copy them, or with PACKHORSE_PORT_WEIGHTS=shared
    immediately.

    --check runs nothing and lists what runs as is, what is emulated, what is
    ignored and what will fail (then the exit code is 1). --patch writes a
    script that needs neither PopTorch nor Packhorse; of one for TensorFlow it
    writes plain TensorFlow.

    Try:
      packhorse port train.py --epochs 3
      packhorse port --check train.py
      packhorse port --patch plain.py train.py
    """
    if patch is not None:
        _check_output(patch, script, overwrite)
    elif overwrite:
        raise InputError("--overwrite is for --patch only; leave it out")
    if not check and patch is None:
        from packhorse_port.script import run

        run([script, *arguments], summary="quiet" if quiet else "json" if json else "text")
    if arguments:
        raise InputError(
            f"the script is not run, so it takes no arguments; leave out {' '.join(arguments)}"
        )
    source = _read(script)
    document: dict[str, object] = {"script": script}
    report = None
    if check:
        from packhorse_port.check import examine

        report = examine(source, Path(script))
        _show(report, script)
        document |= report.document()
    if patch is not None:
        document |= _patch(source, script, patch)
    emit(document, json)
    if report and report.count("fails"):
        raise WillFail(f"{script}: {report.count('fails')} things will fail")


def prepare_tokens(tokens: Sequence[str]) -> list[str]:
    """Insert `--` before the script: all tokens after it are the script's, including flags."""
    numbered = iter(enumerate(tokens))
    next((token for _, token in numbered if token == "port"), None)  # skip up to the command
    for position, token in numbered:
        if token in ("--", *NOT_RUNNING) or token.startswith("--patch="):
            break
        if token == "-" or not token.startswith("-"):
            return [*tokens[:position], "--", *tokens[position:]]
    return list(tokens)


def _read(script: str) -> bytes:
    try:
        return Path(script).read_bytes()
    except OSError as error:
        raise InputError(f"{script} cannot be read: {error.strerror or error}") from error


def _show(report: "CheckReport", script: str) -> None:
    rows = [
        [finding.line, finding.kind, finding.name, finding.meaning, short(finding.source, 40)]
        for finding in report.findings
    ]
    table(script, ["line", "", "name", "how it is handled", "source"], rows)
    note(report.last_line())


def _check_output(out: Path, script: str, overwrite: bool) -> None:
    """Raise if `out` is the script itself, or exists and `overwrite` is not set."""
    if out.exists() and Path(script).exists() and out.samefile(script):
        raise InputError(f"--patch {out} would overwrite the script; name another file")
    if out.exists() and not overwrite:
        raise InputError(f"{out} is there already; choose another name, or pass --overwrite")


def _patch(source: bytes, script: str, out: Path) -> dict[str, object]:
    from packhorse.atomic import new_file
    from packhorse_port.patch import translate
    from packhorse_port.tensorflow import patch as tensorflow

    if tensorflow.uses_ipu(source):
        patched = tensorflow.translate(source)
    else:
        patched = translate(source, Path(script).name)
    with new_file(out) as file:
        file.write(patched.text.encode("utf-8"))
    for line, reason in patched.untranslated:
        note(f"{script}:{line}: not translated: {reason}")
    if b"torchvision" in source and find_spec("torchvision") is None:
        note("the plain script needs torchvision itself, which is not installed here")
    note(f"written: {out}")
    untranslated = [{"line": line, "what": reason} for line, reason in patched.untranslated]
    return {"patched": str(out), "left": untranslated}
