"""`packhorse prove`: test on the user's model and machine that neighbors change no result."""

from dataclasses import asdict
from typing import TYPE_CHECKING, Annotated, Any

from cyclopts import Parameter

from packhorse.cli.console import JsonFlag, emit, note, progress, table
from packhorse.cli.flags import ModelFlags
from packhorse.errors import InputError, KernelError, PackhorseError

if TYPE_CHECKING:
    import torch

    from packhorse.runtime.proof import Proof

MEANING = {
    "neighbour": "other tokens in the neighbors, same shapes: bit-equal",
    "poison": "NaN in the neighbors: bit-equal",
    "alone": "alone and in a pack: relative difference",
    "reference": "one call per sequence: relative difference",
    "control": "isolation broken on purpose: must be detected",
}


class Unproven(PackhorseError):
    """A check failed: results depend on neighbors."""

    exit_code = 1


def prove(
    model: Annotated[str, Parameter(help="A folder, a file, a TensorFlow prefix or a hub id.")],
    *,
    model_flags: ModelFlags = ModelFlags(),  # noqa: B008 (frozen)
    device: Annotated[
        str | None, Parameter(help="cpu, cuda or cuda:1; default the accelerator, else cpu.")
    ] = None,
    dtype: Annotated[
        str | None,
        Parameter(
            help="fp32, bf16, fp16, fp64, int8 or float8, several separated by commas; default all "
            "floats that the hardware computes."
        ),
    ] = None,
    kernel: Annotated[
        str | None,
        Parameter(help="One or several, separated by commas; default all that can run."),
    ] = None,
    packs: Annotated[int, Parameter(help="Number of random packs per check.")] = 20,
    seed: Annotated[int, Parameter(help="Seed of the random packs.")] = 0,
    json: JsonFlag = False,
) -> None:
    """Test on your model and machine that no result depends on its neighbors.

    Each head, under each kernel and number format that can run here, goes through
    five checks on random packs; the last is a control that must fail. The table
    shows the largest difference that each check found.

    Try:
      packhorse prove sentence-transformers/all-MiniLM-L6-v2
      packhorse prove ./my-model --dtype fp32,bf16 --packs 200 --json
    """
    from packhorse.device import DTYPES, choose_device, describe, parse_dtype

    if packs < 1:
        raise InputError(f"--packs is {packs}; it must be 1 or more")
    target = choose_device(device)
    if dtype:
        names = [name.strip() for name in dtype.split(",")]
    else:
        names = _hardware_dtypes(target)
        for name in DTYPES:
            if name not in (*names, "int8", "float8"):
                note(f"skipped: no hardware for {name} here; --dtype {name} tests it anyway")
    proofs: list[Proof] = []
    for name in names:
        proofs += _prove_dtype(model, model_flags, target, parse_dtype(name), kernel, packs, seed)
    title = f"{model} on {describe(target)}: {packs} packs per check, the worst over all heads"
    columns = ["dtype", "kernel", "check", "largest", "allowed", "verdict"]
    table(title, columns, _summary(proofs))
    failed = [proof for proof in proofs if not proof.passed]
    document = {
        "proofs": [asdict(proof) | {"passed": proof.passed} for proof in proofs],
        "ok": not failed,
    }
    emit(document, json)
    if failed:
        first = failed[0]
        raise Unproven(
            f"{len(failed)} of {len(proofs)} checks failed, first {first.check} of {first.head} "
            f"under {first.kernel} in {first.dtype}: please report this"
        )
    note(f"passed: {len(proofs)} checks")


def _hardware_dtypes(device: "torch.device") -> list[str]:
    from packhorse.device import fast_bf16

    names = ["fp32"]
    if device.type != "cpu" or fast_bf16(device):
        names.append("bf16")
    if device.type == "cuda":
        names.append("fp16")
    return names


def _prove_dtype(
    model: str,
    model_flags: ModelFlags,
    device: "torch.device",
    dtype: "torch.dtype",
    kernel: str | None,
    packs: int,
    seed: int,
) -> "list[Proof]":
    import torch

    from packhorse import checkpoint
    from packhorse.device import FLOAT8, dtype_name, float_dtype, is_rounded
    from packhorse.runtime import proof as checks
    from packhorse.runtime.calibration import input_scales
    from packhorse.runtime.loading import check_int8

    options = model_flags.load_options()
    if dtype == torch.int8:
        check_int8(device)
    floats = float_dtype(dtype, device)
    stored = torch.float32 if dtype == FLOAT8 else floats  # float8 is rounded from fp32
    source = checkpoint.load(model, **options, device=device, dtype=stored)
    loaded = source.model
    kernels = _kernels(kernel, device, floats, loaded.bert.config.needs)
    products = dtype if is_rounded(dtype) else None
    scales = {}
    if dtype == FLOAT8:
        scales = input_scales(source, checkpoint.tokenizer(source), device)
    total = len(kernels) * len(checks.CHECKS) * (len(loaded.heads) + 1)
    proofs = []
    with progress(f"proving {dtype_name(dtype)}") as advance:
        for proof in checks.prove(
            loaded, device, kernels, packs, seed, products, scales, source.kept
        ):
            proofs.append(proof)
            advance(len(proofs), total)
    return proofs


def _kernels(
    names: str | None, device: "torch.device", dtype: "torch.dtype", needs: dict[str, Any]
) -> list[str]:
    """Return the named kernels, all of which must run; without names, all that can run."""
    from packhorse.attention import KERNELS, pick

    if names:
        return [pick(device, dtype, name=name.strip(), **needs).name for name in names.split(",")]
    runnable = []
    for name in KERNELS:
        try:
            runnable.append(pick(device, dtype, name=name, **needs).name)
        except KernelError as error:
            note(f"skipped: {error}")
    return runnable


def _summary(proofs: "list[Proof]") -> list[list[object]]:
    """Return a row per dtype, kernel and check, with the worst head.

    A check is worst at its largest difference; the control, which must be detected, at its
    smallest.
    """
    groups: dict[tuple[str, str, str], list[Proof]] = {}
    for proof in proofs:
        groups.setdefault((proof.dtype, proof.kernel, proof.check), []).append(proof)
    rows: list[list[object]] = []
    for (dtype, kernel, check), group in groups.items():
        worst = (min if check == "control" else max)(group, key=lambda proof: proof.largest)
        verdict = "ok" if all(proof.passed for proof in group) else "FAILED"
        allowed = "> 0" if check == "control" else worst.allowed
        rows.append([dtype, kernel, MEANING[check], f"{worst.largest:.2g}", allowed, verdict])
    return rows
