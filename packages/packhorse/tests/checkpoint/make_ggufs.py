"""Make the committed GGUF files again: `python tests/checkpoint/make_ggufs.py LLAMA_CPP`.

LLAMA_CPP is a clone of https://github.com/ggml-org/llama.cpp (here of commit b21e4de), whose own
converter writes them from tiny random models of transformers; it needs torch, transformers
and sentencepiece. What each was made of lies beside it in `ggufs/`, to compare with.
"""

from __future__ import annotations

import json
import shutil
import sys
import tempfile
from pathlib import Path
from typing import Any

TARGET = Path(__file__).parent / "ggufs"
SIZES: dict[str, Any] = {
    "vocab_size": 60,
    "hidden_size": 32,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "intermediate_size": 64,
}
SPECIAL = ["[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]"]
LETTERS = "abcdefghijklmnopqrs"
WORDS = [
    *SPECIAL,
    *LETTERS,
    *(f"##{letter}" for letter in LETTERS),
    "horse",
    "pack",
    "##ing",
    "the",
]
WORDS += [".", ",", "?", "!", "x", "[unused0]", "1", "2", "##1", "##2", "3", "##3", "4"][:13]
PIECES = ["<s>", "<pad>", "</s>", "<unk>", "▁", *(f"▁{letter}" for letter in LETTERS), *LETTERS]
PIECES += ["▁the", "▁horse", "ing", ".", ",", "?", "!", "▁pack", "s.", "ho", "rs", "se", "es", "re"]
KINDS = {
    "bert": "f32",
    "bert-q8": "q8_0",
    "distilbert": "f16",
    "xlm-roberta": "bf16",
    "nomic": "f32",
}


def main(clone: Path) -> None:
    sys.path[:0] = [str(clone), str(clone / "gguf-py")]
    TARGET.mkdir(exist_ok=True)
    for kind, numbers in KINDS.items():
        with tempfile.TemporaryDirectory() as folder:
            make(kind.removesuffix("-q8"), Path(folder))
            convert(Path(folder), TARGET / f"{kind}.gguf", numbers)
            if not kind.endswith("-q8"):
                shutil.copyfile(Path(folder) / "model.safetensors", TARGET / f"{kind}.safetensors")
                shutil.copyfile(Path(folder) / "config.json", TARGET / f"{kind}.config.json")
                shutil.copyfile(Path(folder) / "tokenizer.json", TARGET / f"{kind}.tokenizer.json")
    for path in TARGET.iterdir():
        path.chmod(0o644)


def make(kind: str, folder: Path) -> None:
    """A model whose weights are all random: zeros and ones would hide one that went astray."""
    import torch
    import transformers

    torch.manual_seed(0)
    names = {"bert": "Bert", "distilbert": "DistilBert", "xlm-roberta": "XLMRoberta"}
    name = names.get(kind, "NomicBert")
    settings = dict(SIZES)
    if kind == "xlm-roberta":
        settings |= {"max_position_embeddings": 42, "type_vocab_size": 1, "pad_token_id": 1}
    elif kind == "distilbert":
        settings = {"vocab_size": 60, "dim": 32, "n_layers": 2, "n_heads": 4, "hidden_dim": 64}
        settings["max_position_embeddings"] = 40
    elif kind == "bert":
        settings["max_position_embeddings"] = 40
    model = getattr(transformers, f"{name}Model")(
        getattr(transformers, f"{name}Config")(**settings)
    )
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(torch.randn_like(parameter) * 0.1)
    model.save_pretrained(folder)
    if kind == "nomic":
        as_its_own_code(folder)
    (unigram if kind == "xlm-roberta" else wordpiece)(folder)
    if kind == "bert":
        (folder / "1_Pooling").mkdir()
        (folder / "1_Pooling" / "config.json").write_text('{"pooling_mode_cls_token": true}')
        pooling = {"type": "sentence_transformers.models.Pooling", "path": "1_Pooling"}
        (folder / "modules.json").write_text(json.dumps([pooling]))


def as_its_own_code(folder: Path) -> None:
    """The keys and names that the converter knows: those of nomic-embed's own code."""
    from safetensors.torch import load_file, save_file

    config = json.loads((folder / "config.json").read_text())
    config |= {
        "n_positions": 8192,
        "max_trained_positions": 2048,
        "n_embd": 32,
        "n_layer": 2,
        "n_head": 4,
        "n_inner": 64,
        "activation_function": "swiglu",
        "causal": False,
        "qkv_proj_bias": False,
        "mlp_fc1_bias": False,
        "mlp_fc2_bias": False,
        "prenorm": False,
        "rotary_emb_fraction": 1.0,
        "rotary_emb_interleaved": False,
        "rotary_emb_scale_base": None,
        "rotary_emb_base": 1000,
        "layer_norm_epsilon": config["layer_norm_eps"],
        "type_vocab_size": 2,
    }
    (folder / "config.json").write_text(json.dumps(config))
    save_file(load_file(folder / "model.safetensors"), folder / "model.safetensors")


def wordpiece(folder: Path) -> None:
    from transformers import BertTokenizer

    assert len(WORDS) == len(set(WORDS)) <= 60
    words = [*WORDS, *(f"[unused{number}]" for number in range(1, 61 - len(WORDS)))]
    BertTokenizer({word: number for number, word in enumerate(words)}).save_pretrained(folder)


def unigram(folder: Path) -> None:
    from transformers import XLMRobertaTokenizer

    pieces = [*PIECES, *(f"▁x{number}" for number in range(59 - len(PIECES)))]
    scored = [(piece, -0.5 * number) for number, piece in enumerate(pieces)]
    XLMRobertaTokenizer([*scored, ("<mask>", 0.0)]).save_pretrained(folder)
    tokenizer = json.loads((folder / "tokenizer.json").read_text())
    # The converter reads this table of characters; the real one would be most of the file.
    squeeze = {"type": "Replace", "pattern": {"Regex": " {2,}"}, "content": " "}
    tokenizer["normalizer"] = squeeze | {"precompiled_charsmap": ""}
    (folder / "tokenizer.json").write_text(json.dumps(tokenizer))


def convert(folder: Path, to: Path, numbers: str) -> None:
    from conversion.base import TextModel  # pyright: ignore[reportMissingImports]

    # It knows the tokenizers of published models by a checksum, and these are none.
    TextModel.get_vocab_base_pre = lambda self, tokenizer: "default"  # pyright: ignore
    sys.argv = ["convert_hf_to_gguf.py", str(folder), "--outfile", str(to), "--outtype", numbers]
    import convert_hf_to_gguf  # pyright: ignore[reportMissingImports]

    convert_hf_to_gguf.main()


if __name__ == "__main__":
    main(Path(sys.argv[1]))
