"""`packhorse port`: run, check or translate scripts written for PopTorch or TensorFlow's IPU.

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
    from packhorse_port.project import Project

SWITCH = Parameter(negative="", show_default=False)
NOT_RUNNING = ("--check", "--patch")  # the script is not run, so flags after it are ours too


class WillFail(PackhorseError):
    """A checked script cannot run as it is."""

    exit_code = 1


def port(
    script: Annotated[
        str,
        Parameter(help="The script; - is standard input. With --check or --patch also a folder."),
    ],
    /,
    *arguments: Annotated[str, Parameter(help="The script's own arguments.")],
    check: Annotated[
        bool, SWITCH, Parameter(help="Report what would happen, line by line.")
    ] = False,
    patch: Annotated[
        Path | None, Parameter(help="Write an equivalent plain script, for PyTorch or TensorFlow.")
    ] = None,
    prove: Annotated[
        bool, SWITCH, Parameter(help="Run script and translation, and compare a few steps.")
    ] = False,
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
    ignored and what will fail (then the exit code is 1), in the script and in
    the modules of yours that it imports, or in all scripts of a folder.
    --patch writes a script that needs neither PopTorch nor Packhorse; of one
    for TensorFlow it writes plain TensorFlow; of a folder a copy of it.
    --prove runs a PopTorch script and its translation side by side on the CPU
    and compares losses and weights of their first optimizer steps (exit code 1
    if they differ).

    Try:
      packhorse port train.py --epochs 3
      packhorse port --check train.py
      packhorse port --check my_project --json
      packhorse port --patch plain.py train.py
      packhorse port --prove train.py --epochs 1
    """
    if patch is not None:
        _check_output(patch, script, overwrite)
    elif overwrite:
        raise InputError("--overwrite is for --patch only; leave it out")
    if prove:
        if check or patch is not None:
            raise InputError("--prove is a command of its own; leave out --check and --patch")
        return _prove(_open(script), list(arguments), json)
    if not check and patch is None:
        from packhorse_port.script import run

        run([script, *arguments], summary="quiet" if quiet else "json" if json else "text")
    if arguments:
        raise InputError(
            f"the script is not run, so it takes no arguments; leave out {' '.join(arguments)}"
        )
    project = _open(script)
    document: dict[str, object] = {"script": script}
    report = None
    if check:
        from packhorse_port.check import examine_project, together

        reports = examine_project(project)
        report = together(reports.values())
        _show(reports, report, script)
        document |= report.document() | {"files": [str(file) for file in project.files]}
    if patch is not None:
        document |= _patch(project, patch)
    emit(document, json)
    if report and (fails := report.count("fails")):
        raise WillFail(f"{script}: {fails} {'thing' if fails == 1 else 'things'} will fail")


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


def _open(script: str) -> "Project":
    from packhorse_port.project import Project

    path = Path(script)
    if not path.is_dir():
        try:
            path.read_bytes()
        except OSError as error:
            raise InputError(f"{script} cannot be read: {error.strerror or error}") from error
    return Project.of(path)


def _show(reports: "dict[Path, CheckReport]", report: "CheckReport", script: str) -> None:
    """Every finding of a single file; of several their counts, and what will fail."""
    findings = report.findings
    columns = ["line", "", "name", "how it is handled", "source"]
    if len(reports) > 1:
        kinds = ("as is", "emulated", "ignored", "fails")
        counts = [[of_file.count(kind) for kind in kinds] for of_file in reports.values()]
        rows = [
            [file, of_file.lines, *numbers]
            for (file, of_file), numbers in zip(reports.items(), counts, strict=True)
        ]
        table(script, ["file", "lines", *kinds], rows)
        findings = tuple(finding for finding in findings if finding.kind == "fails")
        columns[0] = "file and line"
    rows = [
        [
            f"{finding.file}:{finding.line}" if len(reports) > 1 else finding.line,
            finding.kind,
            finding.name,
            finding.meaning,
            short(finding.source, 40),
        ]
        for finding in findings
    ]
    if rows or len(reports) == 1:
        table(script, columns, rows)
    note(report.last_line())


def _prove(project: "Project", arguments: list[str], json: bool) -> None:
    from packhorse_port.prove import ProofFailed, prove
    from packhorse_port.tensorflow import patch as tensorflow

    if project.path.is_dir() or tensorflow.uses_ipu(project.path.read_bytes()):
        raise InputError(f"--prove runs one script for PopTorch; {project.path} is none")
    proof = prove(project, arguments)
    columns = ["step", "loss", "plain loss", "largest difference of weights"]
    rows = [
        [number, f"{step.loss:.6f}", f"{step.plain_loss:.6f}", f"{step.weights:.1e}"]
        for number, step in enumerate(proof.steps, 1)
    ]
    table(str(project.path), columns, rows)
    steps = [step._asdict() for step in proof.steps]
    emit({"script": str(project.path), "steps": steps, "equal": proof.holds}, json)
    if not proof.holds:
        raise ProofFailed(f"{project.path} and its translation differ")
    note(f"the plain script takes the same {len(rows)} steps")


def _check_output(out: Path, script: str, overwrite: bool) -> None:
    """Raise if `out` is the script itself, or exists and `overwrite` is not set."""
    path = Path(script)
    if out.exists() and path.exists() and out.samefile(path):
        raise InputError(f"--patch {out} would overwrite the script; name another file")
    if path.is_dir() and path.resolve() in out.resolve().parents:
        raise InputError(f"--patch {out} lies inside {script}; name a folder outside of it")
    if out.exists() and path.is_dir():
        raise InputError(f"{out} is there already; name a new folder for the copy of {script}")
    if out.exists() and not overwrite:
        raise InputError(f"{out} is there already; choose another name, or pass --overwrite")


def _patch(project: "Project", out: Path) -> dict[str, object]:
    """Write the plain script, or a copy of the folder with plain scripts."""
    if project.path.is_dir():
        left = _patch_folder(project, out)
    else:
        left = _patch_file(project.path, out)
        others = [file.name for file in project.files[1:] if _needs_patch(file.read_bytes())]
        if others:
            note(f"{', '.join(others)} use an IPU's modules too: --patch the folder")
    for entry in left:
        note(f"{entry['file']}:{entry['line']}: not translated: {entry['what']}")
    note(f"written: {out}")
    return {"patched": str(out), "left": left}


def _patch_folder(project: "Project", out: Path) -> list[dict[str, object]]:
    import shutil

    draft = out.with_name(f".{out.name}.partial")
    shutil.rmtree(draft, ignore_errors=True)
    left = []
    try:
        ignored = shutil.ignore_patterns(".*", "__pycache__")
        shutil.copytree(project.path, draft, symlinks=True, ignore=ignored)
        for file in project.files:
            if _needs_patch(file.read_bytes()):
                left += _patch_file(file, draft / file.relative_to(project.path))
        draft.replace(out)
    except shutil.Error as error:  # of several files
        raise InputError(f"{project.path} cannot be copied: {error.args[0][0][2]}") from error
    except OSError as error:
        raise InputError(f"{out} cannot be written: {error.strerror or error}") from error
    finally:
        shutil.rmtree(draft, ignore_errors=True)
    return left


def _needs_patch(source: bytes) -> bool:
    from packhorse_port.tensorflow import patch as tensorflow

    return b"poptorch" in source or tensorflow.uses_ipu(source)


def _patch_file(file: Path, out: Path) -> list[dict[str, object]]:
    """Write one plain script; returns what could not be translated."""
    from packhorse.atomic import new_file
    from packhorse_port.patch import translate
    from packhorse_port.tensorflow import patch as tensorflow

    source = file.read_bytes()
    if tensorflow.uses_ipu(source):
        patched = tensorflow.translate(source)
    else:
        patched = translate(source, file.name)
    with new_file(out) as target:
        target.write(patched.encode())
    if b"torchvision" in source and find_spec("torchvision") is None:
        note(f"{file}: the plain script needs torchvision itself, which is not installed here")
    return [
        {"file": str(file), "line": line, "what": reason} for line, reason in patched.untranslated
    ]
