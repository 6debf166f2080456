"""`packhorse prove`: the invariant, on the user's model and the user's machine."""

from dataclasses import asdict
from typing import TYPE_CHECKING, Annotated, Any

from cyclopts import Parameter

from packhorse.cli.console import JsonFlag, emit, note, progress, table
from packhorse.cli.flags import Beside
from packhorse.errors import InputError, KernelError, PackhorseError

if TYPE_CHECKING:
    import torch

    from packhorse.runtime.proof import Proof

MEANING = {
    "neighbour": "other tokens next door, same shapes: bit-equal",
    "poison": "NaN next door: bit-equal",
    "alone": "alone and in a pack: relative difference",
    "reference": "one call a sequence: relative difference",
    "control": "isolation broken on purpose: must be seen",
}


class Unproven(PackhorseError):
    """A check failed: results depend on neighbours."""

    exit_code = 1


def prove(
    model: Annotated[str, Parameter(help="A folder, a file, a TensorFlow prefix or a hub id.")],
    *,
    beside: Beside = Beside(),  # noqa: B008 (frozen)
    device: Annotated[str | None, Parameter(help="Default the accelerator, else cpu.")] = None,
    dtype: Annotated[
        str | None, Parameter(help="fp32, bf16, fp16, fp64, several with commas; default all fit.")
    ] = None,
    kernel: Annotated[
        str | None, Parameter(help="One or several with commas; default all that can run.")
    ] = None,
    packs: Annotated[int, Parameter(help="Random packs for each check.")] = 20,
    seed: Annotated[int, Parameter(help="Of the random packs.")] = 0,
    json: JsonFlag = False,
) -> None:
    """Test on your model and machine that no result depends on its neighbours.

    Every head, under every kernel and number format that can run here, is put
    through five checks on random packs; the last is a control that must fail.
    The table shows the largest difference each check found.

    Try:
      packhorse prove sentence-transformers/all-MiniLM-L6-v2
      packhorse prove ./my-model --dtype fp32,bf16 --packs 200 --json
    """
    from packhorse.device import DTYPES, choose_device, describe, fast_bf16, parse_dtype

    if packs < 1:
        raise InputError("--packs must be at least 1")
    where = choose_device(device)
    fitting = ["fp32", *(["bf16"] if where.type != "cpu" or fast_bf16(where) else [])]
    fitting += ["fp16"] if where.type == "cuda" else []
    names = [name.strip() for name in dtype.split(",")] if dtype else fitting
    for name in () if dtype else [name for name in DTYPES if name not in fitting]:
        note(f"left out: {name} is not computed in hardware here; --dtype {name} proves it too")
    proofs: list[Proof] = []
    for name in names:
        proofs += _prove_one(model, beside, where, parse_dtype(name), kernel, packs, seed)
    rows = _summary(proofs)
    title = f"{model} on {describe(where)}: {packs} packs a check, the worst over all heads"
    table(title, ["dtype", "kernel", "check", "largest", "allowed", "verdict"], rows)
    failed = [proof for proof in proofs if not proof.passed]
    emit({"proofs": [asdict(p) | {"passed": p.passed} for p in proofs], "ok": not failed}, json)
    if failed:
        worst = failed[0]
        raise Unproven(
            f"{len(failed)} of {len(proofs)} checks failed, first {worst.check} of {worst.head} "
            f"under {worst.kernel} in {worst.dtype}: please report this"
        )
    note(f"passed: {len(proofs)} checks")


def _prove_one(
    model: str,
    beside: Beside,
    device: "torch.device",
    dtype: "torch.dtype",
    kernel: str | None,
    packs: int,
    seed: int,
) -> "list[Proof]":
    from packhorse import checkpoint
    from packhorse.device import dtype_name
    from packhorse.runtime.proof import CHECKS
    from packhorse.runtime.proof import prove as run

    loaded = checkpoint.load(model, **beside.given(), device=device, dtype=dtype).model
    kernels = _kernels(kernel, device, dtype, loaded.bert.config.needs)
    total = len(kernels) * len(CHECKS) * (len(loaded.heads) + 1)
    proofs = []
    with progress(f"proving {dtype_name(dtype)}") as advance:
        for proof in run(loaded, device, kernels, packs, seed):
            proofs.append(proof)
            advance(len(proofs), total)
    return proofs


def _kernels(
    asked: str | None, device: "torch.device", dtype: "torch.dtype", needs: dict[str, Any]
) -> list[str]:
    """Those asked for, each of which must run; else all that can."""
    from packhorse.attention import KERNELS, pick

    if asked:
        return [pick(device, dtype, name=name.strip(), **needs).name for name in asked.split(",")]
    can = []
    for name in KERNELS:
        try:
            can.append(pick(device, dtype, name=name, **needs).name)
        except KernelError as error:
            note(f"left out: {error}")
    return can


def _summary(proofs: "list[Proof]") -> list[list[object]]:
    """The worst head of each kernel, dtype and check: of the control, the least visible."""
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
