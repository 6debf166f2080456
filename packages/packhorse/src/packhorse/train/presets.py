"""The JSON presets of Graphcore's MLPerf BERT (v1.0 and v1.1), as settings of ours.

    bert.py --config configs/mk2/pod16-closed.json      becomes      packhorse train --config …

Keys that say what is learned are translated; keys that only place work on IPUs are named once and
left out; a key whose value would train another model than ours is refused, and so is one that is
not known. Batches are packs there and sequences here, so their product is multiplied with
`avg_seq_per_pack`. What the program filled in by itself is filled in here: loss and accuracy by
sequence unless `*_averaging_basis` says "pertoken", the target of 0.720, and MLPerf's interval
between evaluations. `split_qkv` was off unless set: query, key and value were then one tensor, and
LAMB had one trust ratio for the three. That trains other weights, so it is kept, and told.

Follows `utils/__init__.py` of the v1.0 submission and MLPerf's training rules 1.0, section 4.4.
"""

from __future__ import annotations

import difflib
from collections.abc import Callable, Collection, Mapping
from pathlib import PurePosixPath
from typing import Any

from packhorse.errors import InputError

TARGET = 0.720

Said = Mapping[str, Any]

# Ours under another name, value for value.
RENAMED = {
    "num_layers": "layers",
    "hidden_size": "hidden_size",
    "attention_heads": "heads",
    "ff_size": "intermediate_size",
    "layer_norm_eps": "norm_eps",
    "mask_tokens": "max_predictions",
    "beta1": "beta1",
    "beta2": "beta2",
    "weight_decay": "weight_decay",
    "max_weight_norm": "max_weight_norm",
    "gradient_clipping_norm": "clip",
    "learning_rate": "learning_rate",
    "max_training_sequences": "max_sequences",
    "tf_checkpoint": "model",
    "checkpoint_dir": "out",
    "vocab_file": "tokenizer",
    "epochs": "epochs",
    "seed": "seed",
    "steps_per_log": "log_every",
    "steps_per_save": "save_every",
    "enable_tensorboard": "tensorboard",
    "submission_division": "division",
    "submission_platform": "platform",
}
# Anything else would train another model.
MUST_BE: dict[str, Any] = {
    "projection_bias": True,
    "no_cls_layer": False,
    "no_mask": False,
    "inference": False,
    "no_training": False,
    "update_embedding_dict": True,
    "gradient_reduction_type": "Mean",
    "shuffle": True,
    "generated_data": False,
    "synthetic_data": False,
    "continue_training_from_epoch": 0,
    "scale_loaded_optimizer_state": 1.0,
}
# Where work is placed on IPUs, how memory is shared there, how their run is watched.
IPU = frozenset(
    {
        *("activation_io_schedule", "activations_on_chip", "aggregate_metrics_over_steps"),
        *("att_ffn_placement", "available_memory_proportion", "batch_serialize"),
        *("batches_per_step", "device_connection_type", "device_id", "device_ondemand_timeout"),
        *("device_tiles", "device_version", "disable_fully_connected_pass"),
        *("embedding_serialization_vocab_steps", "enable_half_partials", "encoder_start_ipu"),
        *("encoder_start_pipeline_stage", "engine_cache", "epochs_per_save", "epochs_to_cache"),
        *("execution_mode", "floating_point_exceptions", "group_host_syncs", "host_embedding"),
        *("internal_exchange_optimisation_target", "lamb_m_dtype", "layers_per_ipu"),
        *("layers_per_phase", "log_dir", "log_level", "loss_scaling", "max_copy_merge_size"),
        *("mpi_distributed", "mpi_rank", "mpi_size", "no_drop_remainder", "no_model_save"),
        *("no_outlining", "no_validation", "num_attention_splits", "num_ffwd_splits"),
        *("num_io_tiles", "optimizer_io_schedule", "optimizer_schedule", "optimizer_state_offchip"),
        *("phased_execution", "phased_execution_type", "pipeline", "profile", "profile_dir"),
        *("profile_instrument", "realtime_scheduler", "recompute_checkpoint_every_layer"),
        *("replicated_tensor_sharding", "report_hw_cycle_count", "split_linear_layers"),
        *("split_transformer", "stochastic_rounding", "submission_run_index"),
        *("tensor_storage_onchip", "use_default_available_memory_proportion", "use_ipu_model"),
        *("virtual_graph", "wandb", "weight_io_schedule"),
    }
)
# What the folder of data says itself.
OF_DATA = frozenset(
    {
        *("use_prepacked_pretraining_dataset", "max_sequences_per_pack", "duplication_factor"),
        *("vocab_length", "do_lower_case", "overwrite_cache"),
    }
)
TASKS = {"PRETRAINING": "pretrain", "SQUAD": "answer", "MRPC": "classify"}
OPTIMIZERS: dict[str, dict[str, Any]] = {
    "LAMB": {"optimizer": "lamb"},
    "LAMB_NO_BIAS": {"optimizer": "lamb", "bias_correction": False},
    "ADAM": {"optimizer": "adamw"},
    "ADAM_NO_BIAS": {"optimizer": "adamw", "bias_correction": False},
}


def translate(said: Any, where: str) -> tuple[dict[str, Any], tuple[str, ...]]:
    """Settings by name, and notes of what was left out or is not as MLPerf's reference has it."""
    if not isinstance(said, dict):
        raise InputError(f"{where}: a preset is an object of keys and values")
    for name in said:
        if name not in KNOWN:
            raise InputError(f"{where}: there is no key {name!r} in a preset{nearest(name, KNOWN)}")
    said = {name: value for name, value in said.items() if value not in (None, -1)}  # as left out
    for name, good in MUST_BE.items():
        if said.get(name, good) != good:
            raise InputError(f"{where}: {name} is {said[name]!r}; here it can only be {good!r}")
    # Clipping and decay of the learning rate are there only if the preset says so.
    ours: dict[str, Any] = {"clip": 0.0, "schedule": "constant"}
    ours |= {new: said[old] for old, new in RENAMED.items() if old in said}
    for name, rule in RULES.items():
        try:
            ours |= rule(said)
        except (KeyError, TypeError, ValueError, AttributeError) as error:
            if isinstance(error, InputError):
                raise InputError(f"{where}: {error}") from error
            raise InputError(f"{where}: the {name} cannot be understood ({error!r})") from error
    notes = []
    if left_out := sorted((IPU | OF_DATA) & said.keys()):
        names = ", ".join(left_out)
        notes.append(f"{where}: left out, of IPUs or of how the data was made: {names}")
    if ours["optimizer"] == "lamb" and not ours["split_qkv"]:
        notes.append(
            f"{where}: split_qkv is off, so LAMB has one trust ratio for query, key and value "
            "together, as that program had; MLPerf's reference has three: set split_qkv to true"
        )
    return ours, tuple(notes)


def _task(said: Said) -> dict[str, Any]:
    task = said.get("task", "PRETRAINING")
    if task not in TASKS:
        raise InputError(f"task is {task!r}; there are {', '.join(TASKS)}")
    by_token = said.get("loss_averaging_basis") == "pertoken"
    if task != "PRETRAINING":
        return {"task": TASKS[task], "max_length": said.get("sequence_length", 0)}
    words = "token" if by_token else "sequence"
    follows = not said.get("reduce_nsp_overhead", False)
    return {"task": TASKS[task], "average": words, "next_sentence": follows}


def _dropout(said: Said) -> dict[str, Any]:
    rate = 0.0 if said.get("no_dropout") else said.get("dropout_prob", 0.1)
    return {"dropout": rate, "attention_dropout": 0.0 if said.get("no_attn_dropout") else rate}


def _precision(said: Said) -> dict[str, Any]:
    half = said.get("popart_dtype", "FLOAT16") == "FLOAT16"
    return {"precision": "auto" if half else "fp32"}


def _batch(said: Said) -> dict[str, Any]:
    """Sequences a step; what is said twice must agree."""
    at_once = said.get("batch_size", 1) * said.get("replication_factor", 1)
    packs = said.get("global_batch_size") or at_once * said.get("gradient_accumulation_factor", 1)
    twice = {"global_batch_size", "gradient_accumulation_factor"} <= said.keys()
    if packs % at_once or (twice and packs != at_once * said["gradient_accumulation_factor"]):
        raise InputError(f"global_batch_size {packs} is not what its factors multiply to")
    return {"batch": packs * said.get("avg_seq_per_pack", 1)}


def _optimizer(said: Said) -> dict[str, Any]:
    name = said.get("optimizer", "SGD")
    if name not in OPTIMIZERS:
        raise InputError(f"optimizer is {name!r}; here there are {', '.join(OPTIMIZERS)}")
    found = dict(OPTIMIZERS[name])
    found["split_qkv"] = said.get("split_qkv", False)  # theirs is off unless set
    if betas := said.get("beta1_schedule"):
        found |= {"beta1": betas["init"], "beta1_end": betas["final"]}
        found["beta1_steps"] = betas["num_transition_steps"]
    return found


def _schedule(said: Said) -> dict[str, Any]:
    """Linear to zero, counted from the first step even behind a warm-up; not below 1e-7."""
    if not (told := said.get("lr_bert_schedule")):
        return {}
    peak = told["init_lr"]
    return {
        "schedule": "polynomial",
        "learning_rate": peak,
        "decay_steps": told["num_training_steps"],
        "warmup": told.get("num_warmup_steps", 0),
        "decay_from_zero": True,
        "end": 1e-7 / peak,
    }


def _data(said: Said) -> dict[str, Any]:
    """The folders of their files: `packhorse data import` makes ours of them."""
    keys = {"input_files": "train", "on_the_spot_validation_files": "eval"}
    return {ours: _folder(said[theirs]) for theirs, ours in keys.items() if said.get(theirs)}


def _folder(patterns: list[str]) -> str:
    folders = {str(PurePosixPath(p).parent if "*" in p else PurePosixPath(p)) for p in patterns}
    if len(folders) > 1:
        raise InputError(f"files in several folders ({', '.join(sorted(folders))}): import them")
    return folders.pop()


def _evaluation(said: Said) -> dict[str, Any]:
    if not said.get("on_the_spot_validation_files"):
        return {}
    by_token = said.get("accuracy_averaging_basis") == "pertoken"
    return {
        "eval_every_sequences": _interval(said),
        "measure": "mlm_accuracy" if by_token else "mlm_sequence_accuracy",
        "target": TARGET,
    }


def _interval(said: Said) -> int:
    """MLPerf's, unless the preset lists after how many sequences it evaluates."""
    at = said.get("on_the_spot_validation_triggers")
    if not at:
        return evaluation_interval(_batch(said)["batch"])
    if at != [at[0] * (number + 1) for number in range(len(at))]:
        raise InputError(f"on_the_spot_validation_triggers is {at}; it must rise by its first")
    return at[0]


def evaluation_interval(batch: int) -> int:
    """MLPerf's: the sequences between two evaluations, for a global batch of so many."""
    return int(0.05 * (230.23 * batch + 3_000_000) / 25_000) * 25_000


def nearest(name: str, known: Collection[str]) -> str:
    """The end of a message about a name that is not known."""
    near = difflib.get_close_matches(name, known, 1, 0.5)
    return f"; did you mean {near[0]!r}?" if near else ""


RULES: dict[str, Callable[[Said], dict[str, Any]]] = {
    "task": _task,
    "dropout": _dropout,
    "precision": _precision,
    "batch": _batch,
    "optimizer": _optimizer,
    "schedule": _schedule,
    "data": _data,
    "evaluation": _evaluation,
}
KNOWN = frozenset(
    {
        *RENAMED,
        *MUST_BE,
        *IPU,
        *OF_DATA,
        *(
            "task",
            "sequence_length",
            "loss_averaging_basis",
            "accuracy_averaging_basis",
            "reduce_nsp_overhead",
        ),
        *("no_dropout", "dropout_prob", "no_attn_dropout", "popart_dtype"),
        *("batch_size", "global_batch_size", "gradient_accumulation_factor"),
        *("replication_factor", "avg_seq_per_pack", "optimizer", "beta1_schedule", "split_qkv"),
        *("lr_bert_schedule", "input_files"),
        *("on_the_spot_validation_files", "on_the_spot_validation_triggers"),
    }
)
