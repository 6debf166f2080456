"""Graphcore's JSON presets for MLPerf BERT (v1.0 and v1.1), translated to our settings.

    bert.py --config configs/mk2/pod16-closed.json      becomes      packhorse train --config …

Keys that decide what is learned are translated. Keys that only place work on IPUs are ignored and
listed in one note. A key whose value would train a different model is refused, as is an unknown
key. Batches count packs there and sequences here, so the product of the batch factors is multiplied
by `avg_seq_per_pack`. Defaults of that program are filled in: loss and accuracy averaged by
sequence unless `*_averaging_basis` is "pertoken", a target of 0.720, and MLPerf's evaluation
interval. `split_qkv` was off unless set: query, key and value were then one tensor with one LAMB
trust ratio. That trains different weights, so the default is kept, with a note.

Follows `utils/__init__.py` of the v1.0 submission and MLPerf's training rules 1.0, section 4.4.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from pathlib import Path, PurePosixPath
from typing import Any

from packhorse.errors import InputError
from packhorse.settings import did_you_mean

TARGET = 0.720  # MLPerf's accuracy of masked words

Preset = Mapping[str, Any]

# The same setting under another name.
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
# Any other value would train a different model.
REQUIRED_VALUES: dict[str, Any] = {
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
# Placement of work and memory on IPUs, and monitoring of that program: ignored here.
IPU_KEYS = frozenset(
    {
        "activation_io_schedule",
        "activations_on_chip",
        "aggregate_metrics_over_steps",
        "att_ffn_placement",
        "available_memory_proportion",
        "batch_serialize",
        "batches_per_step",
        "device_connection_type",
        "device_id",
        "device_ondemand_timeout",
        "device_tiles",
        "device_version",
        "disable_fully_connected_pass",
        "embedding_serialization_vocab_steps",
        "enable_half_partials",
        "encoder_start_ipu",
        "encoder_start_pipeline_stage",
        "engine_cache",
        "epochs_per_save",
        "epochs_to_cache",
        "execution_mode",
        "floating_point_exceptions",
        "group_host_syncs",
        "host_embedding",
        "internal_exchange_optimisation_target",
        "lamb_m_dtype",
        "layers_per_ipu",
        "layers_per_phase",
        "log_dir",
        "log_level",
        "loss_scaling",
        "max_copy_merge_size",
        "mpi_distributed",
        "mpi_rank",
        "mpi_size",
        "no_drop_remainder",
        "no_model_save",
        "no_outlining",
        "no_validation",
        "num_attention_splits",
        "num_ffwd_splits",
        "num_io_tiles",
        "optimizer_io_schedule",
        "optimizer_schedule",
        "optimizer_state_offchip",
        "phased_execution",
        "phased_execution_type",
        "pipeline",
        "profile",
        "profile_dir",
        "profile_instrument",
        "realtime_scheduler",
        "recompute_checkpoint_every_layer",
        "replicated_tensor_sharding",
        "report_hw_cycle_count",
        "split_linear_layers",
        "split_transformer",
        "stochastic_rounding",
        "submission_run_index",
        "tensor_storage_onchip",
        "use_default_available_memory_proportion",
        "use_ipu_model",
        "virtual_graph",
        "wandb",
        "weight_io_schedule",
    }
)
# Known from the manifest of the data folder.
DATA_KEYS = frozenset(
    {
        "use_prepacked_pretraining_dataset",
        "max_sequences_per_pack",
        "duplication_factor",
        "vocab_length",
        "do_lower_case",
        "overwrite_cache",
    }
)
TASKS = {"PRETRAINING": "pretrain", "SQUAD": "answer", "MRPC": "classify"}
OPTIMIZERS: dict[str, dict[str, Any]] = {
    "LAMB": {"optimizer": "lamb"},
    "LAMB_NO_BIAS": {"optimizer": "lamb", "bias_correction": False},
    "ADAM": {"optimizer": "adamw"},
    "ADAM_NO_BIAS": {"optimizer": "adamw", "bias_correction": False},
}


def read(file: Path) -> tuple[dict[str, Any], tuple[str, ...]]:
    """Our settings by name, and notes about ignored keys and departures from the reference."""
    try:
        preset = json.loads(file.read_text("utf-8"))
    except OSError as error:
        raise InputError(f"{file} cannot be read: {error.strerror or error}") from error
    except (ValueError, RecursionError) as error:
        raise InputError(f"{file} is not JSON: {error}") from error
    if not isinstance(preset, dict):
        raise InputError(f"{file}: a preset is an object of keys and values")
    return _translate(preset, str(file))


def _translate(preset: Preset, source: str) -> tuple[dict[str, Any], tuple[str, ...]]:
    for name in preset:
        if name not in KNOWN_KEYS:
            hint = did_you_mean(name, KNOWN_KEYS)
            raise InputError(f"{source}: there is no key {name!r} in a preset{hint}")
    # That program treats None and -1 as "not set".
    preset = {name: value for name, value in preset.items() if value not in (None, -1)}
    for name, required in REQUIRED_VALUES.items():
        if preset.get(name, required) != required:
            raise InputError(
                f"{source}: {name} is {preset[name]!r}; only {required!r} is supported"
            )
    # That program clips gradients and decays the learning rate only if the preset says so.
    settings: dict[str, Any] = {"clip": 0.0, "schedule": "constant"}
    settings |= {new: preset[old] for old, new in RENAMED.items() if old in preset}
    for name, rule in RULES.items():
        try:
            settings |= rule(preset)
        except (KeyError, TypeError, ValueError, AttributeError) as error:
            if isinstance(error, InputError):
                raise InputError(f"{source}: {error}") from error
            raise InputError(f"{source}: the {name} cannot be understood ({error!r})") from error
    notes = []
    if ignored := sorted((IPU_KEYS | DATA_KEYS) & preset.keys()):
        notes.append(
            f"{source}: ignored keys about IPUs or the making of the data: {', '.join(ignored)}"
        )
    if settings["optimizer"] == "lamb" and not settings["split_qkv"]:
        notes.append(
            f"{source}: split_qkv is off, so LAMB has one trust ratio for query, key and value "
            "together, as in that program; MLPerf's reference has three: set split_qkv to true"
        )
    return settings, tuple(notes)


def _task(preset: Preset) -> dict[str, Any]:
    task = preset.get("task", "PRETRAINING")
    if task not in TASKS:
        raise InputError(f"task is {task!r}; it can be {', '.join(TASKS)}")
    if task != "PRETRAINING":
        return {"task": TASKS[task], "max_length": preset.get("sequence_length", 0)}
    by_token = preset.get("loss_averaging_basis") == "pertoken"
    return {
        "task": TASKS[task],
        "average": "token" if by_token else "sequence",
        "next_sentence": not preset.get("reduce_nsp_overhead", False),
    }


def _dropout(preset: Preset) -> dict[str, Any]:
    rate = 0.0 if preset.get("no_dropout") else preset.get("dropout_prob", 0.1)
    return {"dropout": rate, "attention_dropout": 0.0 if preset.get("no_attn_dropout") else rate}


def _precision(preset: Preset) -> dict[str, Any]:
    half = preset.get("popart_dtype", "FLOAT16") == "FLOAT16"
    return {"precision": "auto" if half else "fp32"}


def _batch(preset: Preset) -> dict[str, Any]:
    """Sequences per step; the global batch and its factors must agree where both are set."""
    per_pass = preset.get("batch_size", 1) * preset.get("replication_factor", 1)
    accumulation = preset.get("gradient_accumulation_factor", 1)
    packs = preset.get("global_batch_size") or per_pass * accumulation
    is_set_twice = {"global_batch_size", "gradient_accumulation_factor"} <= preset.keys()
    if packs % per_pass or (is_set_twice and packs != per_pass * accumulation):
        raise InputError(f"global_batch_size {packs} is not the product of its factors")
    return {"batch": packs * preset.get("avg_seq_per_pack", 1)}


def _optimizer(preset: Preset) -> dict[str, Any]:
    name = preset.get("optimizer", "SGD")
    if name not in OPTIMIZERS:
        raise InputError(f"optimizer is {name!r}; it can be {', '.join(OPTIMIZERS)}")
    settings = dict(OPTIMIZERS[name])
    settings["split_qkv"] = preset.get("split_qkv", False)
    if schedule := preset.get("beta1_schedule"):
        settings["beta1"] = schedule["init"]
        settings["beta1_end"] = schedule["final"]
        settings["beta1_steps"] = schedule["num_transition_steps"]
    return settings


def _schedule(preset: Preset) -> dict[str, Any]:
    """Linear to zero, counted from step 0 even after a warm-up, and never below 1e-7."""
    schedule = preset.get("lr_bert_schedule")
    if not schedule:
        return {}
    peak = schedule["init_lr"]
    return {
        "schedule": "polynomial",
        "learning_rate": peak,
        "decay_steps": schedule["num_training_steps"],
        "warmup": schedule.get("num_warmup_steps", 0),
        "decay_from_zero": True,
        "end": 1e-7 / peak,
    }


def _data(preset: Preset) -> dict[str, Any]:
    """The folders of that program's files; `packhorse data import` converts them in place."""
    keys = {"input_files": "train", "on_the_spot_validation_files": "eval"}
    return {new: _folder(preset[old]) for old, new in keys.items() if preset.get(old)}


def _folder(patterns: list[str]) -> str:
    folders = {str(PurePosixPath(p).parent if "*" in p else PurePosixPath(p)) for p in patterns}
    if len(folders) > 1:
        raise InputError(
            f"files are in several folders ({', '.join(sorted(folders))}); import them into one"
        )
    return folders.pop()


def _evaluation(preset: Preset) -> dict[str, Any]:
    if not preset.get("on_the_spot_validation_files"):
        return {}
    by_token = preset.get("accuracy_averaging_basis") == "pertoken"
    return {
        "eval_every_sequences": _interval(preset),
        "measure": "mlm_accuracy" if by_token else "mlm_sequence_accuracy",
        "target": TARGET,
    }


def _interval(preset: Preset) -> int:
    """MLPerf's evaluation interval, unless the preset lists its own, which must be regular."""
    triggers = preset.get("on_the_spot_validation_triggers")
    if not triggers:
        return evaluation_interval(_batch(preset)["batch"])
    if triggers != [triggers[0] * (number + 1) for number in range(len(triggers))]:
        raise InputError(
            f"on_the_spot_validation_triggers is {triggers}; only multiples of the first one, "
            "in order, are supported"
        )
    return triggers[0]


def evaluation_interval(batch: int) -> int:
    """Sequences between two evaluations for a global batch size, by MLPerf's rule."""
    return int(0.05 * (230.23 * batch + 3_000_000) / 25_000) * 25_000


RULES: dict[str, Callable[[Preset], dict[str, Any]]] = {
    "task": _task,
    "dropout": _dropout,
    "precision": _precision,
    "batch": _batch,
    "optimizer": _optimizer,
    "schedule": _schedule,
    "data": _data,
    "evaluation": _evaluation,
}
KNOWN_KEYS = frozenset(
    {
        *RENAMED,
        *REQUIRED_VALUES,
        *IPU_KEYS,
        *DATA_KEYS,
        "task",
        "sequence_length",
        "loss_averaging_basis",
        "accuracy_averaging_basis",
        "reduce_nsp_overhead",
        "no_dropout",
        "dropout_prob",
        "no_attn_dropout",
        "popart_dtype",
        "batch_size",
        "global_batch_size",
        "gradient_accumulation_factor",
        "replication_factor",
        "avg_seq_per_pack",
        "optimizer",
        "beta1_schedule",
        "split_qkv",
        "lr_bert_schedule",
        "input_files",
        "on_the_spot_validation_files",
        "on_the_spot_validation_triggers",
    }
)
