"""`packhorse port`: a script written for PopTorch or TensorFlow's IPU, run, checked or translated.

A script is run as `python SCRIPT` would run it, so its stdout is its own: what this command has to
say goes to stderr, --json included. What stands before SCRIPT is this command's, what stands behind
it the script's.
"""

from collections.abc import Sequence
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

from cyclopts import Parameter

from packhorse.cli.console import JsonFlag, emit, note, short, table
from packhorse.errors import InputError, PackhorseError

if TYPE_CHECKING:
    from packhorse_port.check import Report

SWITCH = Parameter(negative="", show_default=False)
OUTSIDE = ("--check", "--patch")  # nothing is run: all flags are ours, wherever they stand


class WillFail(PackhorseError):
    """A script that was checked cannot run as it is."""

    exit_code = 1


def port(
    script: Annotated[str, Parameter(help="The script; - is standard input.")],
    /,
    *arguments: Annotated[str, Parameter(help="The script's own arguments.")],
    check: Annotated[bool, SWITCH, Parameter(help="Say what would happen, line by line.")] = False,
    patch: Annotated[
        Path | None, Parameter(help="Write the plain PyTorch script it stands for.")
    ] = None,
    overwrite: Annotated[bool, SWITCH, Parameter(help="Replace a file that is there.")] = False,
    quiet: Annotated[bool, SWITCH, Parameter(help="No notices, no summary at the end.")] = False,
    json: JsonFlag = False,
) -> None:
    """Run a script written for PopTorch or TensorFlow's IPU, unchanged.

    The script runs as `python SCRIPT` would run it; `import poptorch` works,
    and so do torchvision's datasets and transforms where it is not installed.
    At the end a summary on stderr says what was other than on an IPU; with
    --json it is one line of JSON, also on stderr, for stdout is the script's.
    It runs on the GPU if there is one; PACKHORSE_DEVICE=cpu says otherwise.
    Steps run as Python; PACKHORSE_PORT_STEPS=traced or compiled is faster and
    freezes what forward does besides torch. Weights changed on the host act
    when PopTorch would copy them; PACKHORSE_PORT_WEIGHTS=shared: at once.

    --check runs nothing and lists what runs as is, what is emulated, what is
    ignored and what will fail (then the exit code is 1). --patch writes a
    script that needs neither PopTorch nor Packhorse.

    Try:
      packhorse port train.py --epochs 3
      packhorse port --check train.py
      packhorse port --patch plain.py train.py
    """
    if patch is not None:
        _refuse(patch, script, overwrite)
    elif overwrite:
        raise InputError("--overwrite has a meaning with --patch only; leave it out")
    if not check and patch is None:
        from packhorse_port.script import run

        run([script, *arguments], say="quiet" if quiet else "json" if json else "text")
    if arguments:
        raise InputError(f"nothing is run: {' '.join(arguments)} has no meaning here")
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
    """Put `--` before the script: all tokens after it are the script's own, flags included."""
    words = iter(enumerate(tokens))
    next((place for place, token in words if token == "port"), None)
    for place, token in words:
        if token in ("--", *OUTSIDE) or token.startswith("--patch="):
            break
        if token == "-" or not token.startswith("-"):
            return [*tokens[:place], "--", *tokens[place:]]
    return list(tokens)


def _read(script: str) -> bytes:
    try:
        return Path(script).read_bytes()
    except OSError as error:
        raise InputError(f"{script} cannot be read: {error.strerror or error}") from error


def _show(report: "Report", script: str) -> None:
    rows = [
        [each.line, each.kind, each.name, each.meaning, short(each.source, 40)]
        for each in report.findings
    ]
    table(script, ["line", "", "name", "what becomes of it", "source"], rows)
    note(report.last_line())


def _refuse(out: Path, script: str, overwrite: bool) -> None:
    """The script itself is never replaced, another file only where that was asked for."""
    if out.exists() and Path(script).exists() and out.samefile(script):
        raise InputError(f"--patch {out} would overwrite the script; name another file")
    if out.exists() and not overwrite:
        raise InputError(f"{out} is there already; choose another name, or pass --overwrite")


def _patch(source: bytes, script: str, out: Path) -> dict[str, object]:
    from packhorse.atomic import new_file
    from packhorse_port.patch import translate

    done = translate(source, Path(script).name)
    with new_file(out) as file:
        file.write(done.text.encode("utf-8"))
    for line, what in done.left:
        note(f"{script}:{line}: not translated: {what}")
    if b"torchvision" in source and find_spec("torchvision") is None:
        note("the plain script needs torchvision itself, which is not installed here")
    note(f"written: {out}")
    return {"patched": str(out), "left": [{"line": line, "what": what} for line, what in done.left]}
