"""Make the committed GGUF files again: `python tests/checkpoint/make_ggufs.py LLAMA_CPP [KIND]`.

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
    "modern-bert": "f32",
    "jina-v2": "f32",
    "jina-v3": "f32",
    "eurobert": "f32",
    "qwen3": "f32",
}
CLASSES = {
    "bert": "Bert",
    "distilbert": "DistilBert",
    "xlm-roberta": "XLMRoberta",
    "nomic": "NomicBert",
    "modern-bert": "ModernBert",
    "jina-v2": "Bert",
    "jina-v3": "JinaEmbeddingsV3",
    "eurobert": "EuroBert",
    "qwen3": "Qwen3",
}
RULES = {"modern-bert": "modern-bert", "eurobert": "llama-bpe", "qwen3": "qwen2"}  # of byte pairs
UNIGRAM, BYTE_PAIRS = ("xlm-roberta", "jina-v3"), tuple(RULES)


def main(clone: Path, *kinds: str) -> None:
    sys.path[:0] = [str(clone), str(clone / "gguf-py")]
    TARGET.mkdir(exist_ok=True)
    for kind, numbers in KINDS.items():
        if kinds and kind not in kinds:
            continue
        with tempfile.TemporaryDirectory() as folder:
            make(kind.removesuffix("-q8"), Path(folder))
            convert(Path(folder), TARGET / f"{kind}.gguf", numbers, RULES.get(kind, "default"))
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
    settings = dict(SIZES)
    if kind in UNIGRAM:
        settings |= {"max_position_embeddings": 42, "type_vocab_size": 1, "pad_token_id": 1}
    elif kind == "distilbert":
        settings = {"vocab_size": 60, "dim": 32, "n_layers": 2, "n_heads": 4, "hidden_dim": 64}
        settings["max_position_embeddings"] = 40
    elif kind in ("bert", "jina-v2"):
        settings["max_position_embeddings"] = 40
    elif kind in BYTE_PAIRS:
        special = dict.fromkeys(("bos", "eos", "cls", "sep", "pad"), 0)
        settings |= {f"{name}_token_id": number for name, number in special.items()}
        settings |= {"vocab_size": BYTE_WORDS, "num_hidden_layers": 3}
        settings |= {"local_attention": 8} if kind == "modern-bert" else {"num_key_value_heads": 2}
        settings |= {"head_dim": 16} if kind == "qwen3" else {}
    model = getattr(transformers, f"{CLASSES[kind]}Model")(
        getattr(transformers, f"{CLASSES[kind]}Config")(**settings)
    )
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(torch.randn_like(parameter) * 0.1)
    model.save_pretrained(folder)
    if kind == "nomic":
        as_its_own_code(folder)
    elif kind == "jina-v2":
        as_jina(folder)
    elif kind == "jina-v3":  # by this key the converter knows it; adapters go to files of their own
        rewrite(folder, architectures=["XLMRobertaModel"], lora_adaptations=["retrieval.query"])
    elif kind == "modern-bert":  # keys of the files on the hub
        rewrite(folder, global_attn_every_n_layers=3, layer_norm_eps=1e-5)
        rewrite(folder, global_rope_theta=160_000.0, local_rope_theta=10_000.0)
    if kind in BYTE_PAIRS:
        byte_pairs(folder, kind)
    else:
        (unigram if kind in UNIGRAM else wordpiece)(folder)
    if kind == "jina-v3":
        add_charsmap(folder)
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


def rewrite(folder: Path, **more: Any) -> None:
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps(config | more))


def as_jina(folder: Path) -> None:
    """A BERT with gates and without positions, under the names and keys of Jina's own code."""
    import torch
    from safetensors.torch import load_file, save_file

    result: dict[str, torch.Tensor] = {}
    for name, tensor in load_file(folder / "model.safetensors").items():
        if "position" in name or "pooler" in name or name.endswith("intermediate.dense.bias"):
            continue
        renamed = name.replace("intermediate.dense", "mlp.gated_layers")
        if ".attention." not in name and ".layer." in name:
            renamed = renamed.replace("output.dense", "mlp.wo")
            renamed = renamed.replace("output.LayerNorm", "mlp.layernorm")
        if "gated_layers" in renamed:
            tensor = torch.cat([tensor, torch.randn_like(tensor) * 0.1])
        result[renamed] = tensor
    save_file(result, folder / "model.safetensors", {"format": "pt"})
    rewrite(
        folder,
        architectures=["JinaBertModel"],
        feed_forward_type="geglu",
        position_embedding_type="alibi",
        max_position_embeddings=8192,
    )


BYTE_WORDS = 300
GPT2_SPECIAL = {
    "modern-bert": {
        "cls": "[CLS]",
        "sep": "[SEP]",
        "pad": "[PAD]",
        "unk": "[UNK]",
        "mask": "[MASK]",
    },
    "eurobert": {"bos": "<|begin_of_text|>", "eos": "<|end_of_text|>", "mask": "<|mask|>"},
    "qwen3": {"eos": "<|endoftext|>", "pad": "<|endoftext|>"},
}


def byte_pairs(folder: Path, kind: str) -> None:
    """Byte pairs learned from a few words, with the rules and template of the published ones."""
    from tokenizers import (
        AddedToken,
        Regex,
        Tokenizer,
        decoders,
        models,
        normalizers,
        pre_tokenizers,
        processors,
        trainers,
    )
    from transformers import PreTrainedTokenizerFast

    library = Tokenizer(models.BPE())
    library.normalizer = normalizers.NFC()
    split = []
    if kind != "modern-bert":
        numbers = r"\p{N}" if kind == "qwen3" else r"\p{N}{1,3}"
        rule = r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|" + numbers
        rule += r"| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
        split = [pre_tokenizers.Split(Regex(rule), "isolated")]
    library.pre_tokenizer = pre_tokenizers.Sequence(
        [*split, pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=not split)]
    )
    library.decoder = decoders.ByteLevel()
    special = GPT2_SPECIAL[kind]
    trainer = trainers.BpeTrainer(
        vocab_size=BYTE_WORDS,
        special_tokens=list(dict.fromkeys(special.values())),
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
    )
    library.train_from_iterator(
        ["the horse and the pack, the packhorse packing 2,000"] * 3, trainer
    )
    if kind == "modern-bert":
        library.add_special_tokens([AddedToken("[MASK]", lstrip=True, normalized=False)])
        library.add_tokens([AddedToken("|||EMAIL|||", normalized=False)])
    begin = [special[name] for name in ("cls", "bos") if name in special]
    end = [special[name] for name in ("sep", "eos") if name in special]
    library.post_processor = processors.TemplateProcessing(
        single=[*begin, "$A", *end],
        pair=[*begin, "$A", *end, "$B", *end],
        special_tokens=[(token, library.token_to_id(token)) for token in {*begin, *end}],
    )
    names = {f"{name}_token": token for name, token in special.items()}
    PreTrainedTokenizerFast(tokenizer_object=library, **names).save_pretrained(folder)
    size = library.get_vocab_size()
    assert size <= BYTE_WORDS + 1, size


def add_charsmap(folder: Path) -> None:
    """A table of characters as SentencePiece compiles it, of a few rules of NFKC."""
    import base64
    import io

    from sentencepiece import SentencePieceTrainer, sentencepiece_model_pb2

    rules = {"\ufb01": "hi", "\uff41": "a", "\u2460": "b", "a\u0301": "c"}
    lines = [
        "\t".join(" ".join(f"{ord(c):X}" for c in text) for text in rule) for rule in rules.items()
    ]
    (folder / "rules.tsv").write_text("\n".join(lines))
    written = io.BytesIO()
    SentencePieceTrainer.train(
        sentence_iterator=iter(["the horse packs"] * 20),
        model_writer=written,
        vocab_size=14,
        normalization_rule_tsv=str(folder / "rules.tsv"),
    )
    model = sentencepiece_model_pb2.ModelProto.FromString(written.getvalue())
    charsmap = base64.b64encode(model.normalizer_spec.precompiled_charsmap).decode()
    tokenizer = json.loads((folder / "tokenizer.json").read_text())
    tokenizer["normalizer"] = {"type": "Precompiled", "precompiled_charsmap": charsmap}
    (folder / "tokenizer.json").write_text(json.dumps(tokenizer))


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


def convert(folder: Path, to: Path, numbers: str, rules: str) -> None:
    from conversion.base import TextModel  # pyright: ignore[reportMissingImports]

    # It knows the tokenizers of published models by a checksum, and these are none.
    TextModel.get_vocab_base_pre = lambda self, tokenizer: rules  # pyright: ignore
    made = folder / "model.gguf"  # adapters come beside it
    sys.argv = ["convert_hf_to_gguf.py", str(folder), "--outfile", str(made), "--outtype", numbers]
    import convert_hf_to_gguf  # pyright: ignore[reportMissingImports]

    convert_hf_to_gguf.main()
    shutil.copyfile(made, to)


if __name__ == "__main__":
    main(Path(sys.argv[1]), *sys.argv[2:])
