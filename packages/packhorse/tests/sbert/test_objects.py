"""Our classes give the numbers of sentence-transformers' and take its arguments."""

from __future__ import annotations

import copy
import inspect
import json
import logging
import multiprocessing
import pickle
import queue
import re
import subprocess
import sys
import threading
import time
import warnings
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from types import ModuleType
from typing import Any

import numpy as np
import pytest
import torch

import packhorse
from packhorse.errors import InputError
from packhorse.sbert import arguments, pools
from packhorse.sbert.pools import PoolError

from ..runtime import retrieval_models as models
from ..runtime.retrieval_models import TEXTS

# What the libraries warn of is not ours.
pytestmark = pytest.mark.filterwarnings("ignore")
CLOSE = 1e-5
PAIRS = [("the horse", text) for text in TEXTS]
GUIDE = Path(__file__).parents[4] / "docs" / "guides" / "from-sentence-transformers.md"
KINDS = ("SentenceTransformer", "CrossEncoder", "SparseEncoder")


@pytest.fixture(scope="module")
def st() -> ModuleType:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        pytest.importorskip("transformers").logging.disable_progress_bar()
        return pytest.importorskip("sentence_transformers")


@pytest.fixture(scope="module")
def folders(st: ModuleType, tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """A tiny model of each kind, as the library saves it."""
    from sentence_transformers.sentence_transformer import modules

    home = tmp_path_factory.mktemp("models")
    base = models.bert(home / "bert", "BertModel")
    parts = [
        modules.Transformer(str(base)),
        modules.Pooling(32, "mean", include_prompt=False),
        modules.Dense(32, 16),
        modules.Normalize(),
    ]
    prompts = {"query": "a mat ", "passage": "home "}
    st.SentenceTransformer(modules=parts, device="cpu", prompts=prompts).save_pretrained(
        str(home / "SentenceTransformer")
    )
    torch.manual_seed(0)
    st.CrossEncoder(str(base), num_labels=1, device="cpu").save_pretrained(
        str(home / "CrossEncoder")
    )
    models.splade(models.bert(home / "mlm"), home / "SparseEncoder", "max", "relu")
    return {kind: home / kind for kind in KINDS}


@pytest.fixture(scope="module")
def both(st: ModuleType, folders: dict[str, Path]) -> dict[str, tuple[Any, Any]]:
    """Ours and the library's, by kind."""
    return {
        kind: (
            getattr(packhorse, kind)(str(folders[kind]), device="cpu"),
            getattr(st, kind)(str(folders[kind]), device="cpu"),
        )
        for kind in KINDS
    }


@pytest.fixture
def dense(folders: dict[str, Path]) -> packhorse.SentenceTransformer:
    return packhorse.SentenceTransformer(str(folders["SentenceTransformer"]))


def far(actual: Any, expected: Any) -> float:
    """The largest difference, of results of one kind and shape."""
    assert type(actual) is type(expected)
    if isinstance(actual, list):
        return max(map(far, actual, expected))
    assert actual.shape == expected.shape and actual.dtype == expected.dtype
    if isinstance(actual, torch.Tensor):
        assert actual.is_sparse == expected.is_sparse
        actual, expected = actual.to_dense().numpy(), expected.to_dense().numpy()
    return float(np.abs(actual.astype(float) - expected.astype(float)).max())


@pytest.mark.parametrize(
    "options",
    [
        {},
        {"normalize_embeddings": True, "batch_size": 2, "truncate_dim": 8},
        {"convert_to_tensor": True, "truncate_dim": 100},
        {"convert_to_numpy": False},
        {"output_value": "token_embeddings"},
        {"prompt": "the mule "},
        {"prompt_name": "query"},
        {"processing_kwargs": {"text": {"max_length": 4, "truncation": True}}},
    ],
    ids=str,
)
def test_vectors(both: dict[str, tuple[Any, Any]], options: dict[str, Any]) -> None:
    ours, theirs = both["SentenceTransformer"]
    assert far(ours.encode(TEXTS, **options), theirs.encode(TEXTS, **options)) <= CLOSE
    assert far(ours.encode(TEXTS[1], **options), theirs.encode(TEXTS[1], **options)) <= CLOSE


@pytest.mark.parametrize("side", ["query", "document"])
def test_queries_and_documents(both: dict[str, tuple[Any, Any]], side: str) -> None:
    ours, theirs = (getattr(model, f"encode_{side}") for model in both["SentenceTransformer"])
    assert far(ours(TEXTS), theirs(TEXTS)) <= CLOSE
    ours, theirs = (getattr(model, f"encode_{side}") for model in both["SparseEncoder"])
    assert far(ours(TEXTS), theirs(TEXTS)) <= CLOSE * 100  # of weights up to 100


def test_features_and_hooks(both: dict[str, tuple[Any, Any]]) -> None:
    """`model(model.preprocess(…))`, and what hooks see and replace, are the library's."""
    for kind, inputs in zip(KINDS, (TEXTS, PAIRS, TEXTS), strict=True):
        results: list[torch.Tensor] = []
        for model in both[kind]:
            with torch.inference_mode():
                features = model(model.preprocess(inputs))
            results.append(features["scores" if kind == "CrossEncoder" else "sentence_embedding"])
        first, second = (result.to_dense() for result in results)
        assert far(first, second) <= CLOSE * max(1, float(second.abs().max()))
    seen: list[Any] = []
    model = copy.deepcopy(both["CrossEncoder"][0])
    expected = model.predict(PAIRS, activation_fn=torch.nn.Identity())

    def double(module: Any, inputs: tuple[Any, ...], output: dict[str, Any]) -> dict[str, Any]:
        seen.append(module)
        return {**output, "scores": 2 * output["scores"]}

    handle = model.register_forward_hook(double)
    assert far(model.predict(PAIRS, activation_fn=torch.nn.Identity()), 2 * expected) <= CLOSE
    pickle.dumps(model)  # a function within another has no name to be found by
    handle.remove()
    assert far(model.predict(PAIRS, activation_fn=torch.nn.Identity()), expected) <= CLOSE
    assert seen == [model]


def test_models_of_modules_are_the_librarys_accelerated(
    st: ModuleType, folders: dict[str, Path], both: dict[str, tuple[Any, Any]]
) -> None:
    theirs = both["SentenceTransformer"][1]
    model = packhorse.SentenceTransformer(modules=list(theirs), device="cpu")
    assert type(model) is st.SentenceTransformer
    assert far(model.encode(TEXTS), theirs.encode(TEXTS)) <= CLOSE
    assert model._inference._encoder is not None  # pyright: ignore


SYSTEM = "{% for m in messages if m.role == 'system' %}{{ m.content }} . {% endfor %}"
ROLE = "{{ (messages | selectattr('role', 'eq', '%s') | first).content }}"
RERANKER = (
    f"{{{{ bos_token }}}}{SYSTEM}cat : {ROLE % 'query'} dog : {ROLE % 'document'} [SEP] home !"
)
ONLY_CHAT = "{% for m in messages %}{% if m.role == 'user' %}{{ m.content }}{% endif %}{% endfor %}"
PARTS = RERANKER.replace("content }}", "content[0].text }}")


STOPPING = "{% for message in messages %}{% if loop.index > 2 %}{% break %}{% endif %}" + (
    "{{ message.role }}: {{ message.content }} {% endfor %}"
)
FAULTY = {
    "{% macro f() %}{{ f() }}{% endmacro %}{{ f() }}": "cannot carry this input: .*recursion",
    "{{ '{x}'.format() }}": "cannot carry this input: 'x'",
    "{{ messages[0].content | truncate(-1) }}": "cannot carry this input: expected length",
    "{{ " + "(" * 3000 + ")" * 3000 + " }}": "cannot be read: .*recursion",
    5: "a chat template is a text, or texts by name, not 5",
}


@pytest.mark.parametrize(
    "template", [RERANKER, PARTS, STOPPING, {"default": ONLY_CHAT, "pairs": PARTS}]
)
def test_chat_templates(st: ModuleType, tmp_path: Path, template: Any) -> None:
    # As transformers saves it: a folder of the library's may say that it takes no messages.
    folder = str(models.bert(tmp_path / "ranker", "BertForSequenceClassification"))
    results: list[list[Any]] = []
    for library in (packhorse, st):
        model = library.CrossEncoder(
            folder, device="cpu", processor_kwargs={"chat_template": template}
        )
        if not isinstance(template, str):
            with pytest.raises(ValueError, match="cannot carry a 'query'/'document' pair"):
                model.predict(PAIRS)
            model[0].processing_kwargs["chat_template"] = {"chat_template": "pairs"}
        cut = {"text": {"max_length": 18, "truncation": True}}
        calls: list[dict[str, Any]] = [{}, {"prompt": "a mat"}, {"processing_kwargs": cut}]
        results.append([model.predict(PAIRS, **options) for options in calls])
    for ours, theirs in zip(*results, strict=True):
        assert far(ours, theirs) <= CLOSE
    plain = packhorse.CrossEncoder(folder, device="cpu")
    before = plain.predict(PAIRS)
    assert min(far(before, scores) for scores in results[0]) > 1e-4, "the template is not applied"
    plain.processor.chat_template = ONLY_CHAT
    with pytest.raises(InputError, match="it leaves out the query and the document; pass one"):
        plain.predict(PAIRS)
    plain.processor.chat_template = "{% for"
    with pytest.raises(InputError, match="the chat template cannot be read: "):
        plain.predict(PAIRS)
    plain.processor.chat_template = "{{ raise_exception('no dogs') }}"
    with pytest.raises(InputError, match="cannot carry this input: no dogs"):
        plain.predict(PAIRS)
    plain.processor.chat_template = "{{ messages.__class__.__mro__ }}"
    with pytest.raises(InputError, match="unsafe"):
        plain.predict(PAIRS)
    for template, part in FAULTY.items():
        plain.processor.chat_template = template
        with pytest.raises(InputError, match=part):
            plain.predict(PAIRS)
    plain.processor.chat_template = None
    assert far(plain.predict(PAIRS), before) == 0


def test_bytes_and_pairs(both: dict[str, tuple[Any, Any]]) -> None:
    ours, theirs = both["SentenceTransformer"]
    for precision in ("int8", "ubinary"):
        actual, expected = (model.encode(TEXTS, precision=precision) for model in (ours, theirs))
        assert far(actual, expected) <= 1
    assert far(ours.encode(PAIRS), theirs.encode(PAIRS)) <= CLOSE
    found = ours.encode(TEXTS[:2], output_value=None, prompt="home ")
    wanted = theirs.encode(TEXTS[:2], output_value=None, prompt="home ")
    for row, expected in zip(found, wanted, strict=True):
        assert row.keys() == expected.keys()
        assert row["prompt_length"] == expected["prompt_length"]
        assert far(row["sentence_embedding"], expected["sentence_embedding"]) <= CLOSE
        length = len(row["input_ids"])
        assert row["input_ids"].tolist() == expected["input_ids"][:length].tolist()


@pytest.mark.parametrize("name", ["cosine", "dot", "euclidean", "manhattan"])
def test_similarities(both: dict[str, tuple[Any, Any]], name: str) -> None:
    for kind in ("SentenceTransformer", "SparseEncoder"):
        ours, theirs = both[kind]
        vectors = theirs.encode(TEXTS[:4])
        ours.similarity_fn_name = theirs.similarity_fn_name = name
        largest = float(theirs.similarity(vectors, vectors).abs().max())
        # Their distance of sparse vectors, by squares, is off by a hundredth where it is 0.
        close = 0.02 if (kind, name) == ("SparseEncoder", "euclidean") else CLOSE * max(1, largest)
        for method in ("similarity", "similarity_pairwise"):
            actual, expected = (
                getattr(model, method)(vectors, vectors) for model in (ours, theirs)
            )
            assert far(actual.to_dense(), expected.to_dense()) <= close
        ours.similarity_fn_name = theirs.similarity_fn_name = "cosine"


def test_scores(both: dict[str, tuple[Any, Any]]) -> None:
    ours, theirs = both["CrossEncoder"]
    calls: list[dict[str, Any]] = [
        {},
        {"activation_fn": torch.nn.Tanh(), "convert_to_tensor": True},
        {"convert_to_numpy": False, "prompt": "a mat "},
    ]
    for options in calls:
        assert far(ours.predict(PAIRS, **options), theirs.predict(PAIRS, **options)) <= CLOSE
    assert far(ours.predict(PAIRS[1]), theirs.predict(PAIRS[1])) <= CLOSE
    actual, expected = (
        model.rank("the horse", TEXTS, top_k=3, return_documents=True) for model in (ours, theirs)
    )
    assert [row["text"] for row in actual] == [row["text"] for row in expected]
    with pytest.raises(InputError, match="takes pairs of texts, not 'alone'"):
        ours.predict([["a", "b"], "alone"])


def test_weights_of_words(both: dict[str, tuple[Any, Any]]) -> None:
    ours, theirs = both["SparseEncoder"]
    calls: list[dict[str, Any]] = [
        {},
        {"max_active_dims": 4},
        {"convert_to_sparse_tensor": False},
        {"convert_to_tensor": False},
    ]
    for options in calls:
        actual, expected = (model.encode(TEXTS, **options) for model in (ours, theirs))
        assert far(actual, expected) <= CLOSE * 100
    vectors = theirs.encode(TEXTS)
    assert ours.sparsity(vectors) == pytest.approx(theirs.sparsity(vectors))
    decoded = ours.decode(vectors, top_k=3), theirs.decode(vectors, top_k=3)
    assert decoded[0] == [[tuple(pair) for pair in row] for row in decoded[1]]
    assert (
        far(
            ours.intersection(vectors[1], vectors).to_dense(),
            theirs.intersection(vectors[1], vectors).to_dense(),
        )
        <= CLOSE
    )


@pytest.mark.parametrize("kind", KINDS)
def test_arguments_have_their_names_and_defaults(st: ModuleType, kind: str) -> None:
    ours, theirs = getattr(packhorse, kind), getattr(st, kind)
    methods = {"__init__", "encode", "predict", "rank", "save_pretrained", "push_to_hub"}
    for method in sorted(methods & set(dir(theirs))):
        wanted = inspect.signature(getattr(theirs, method)).parameters
        found = inspect.signature(getattr(ours, method)).parameters
        for name, parameter in wanted.items():
            if parameter.kind != parameter.VAR_KEYWORD and name != "args":
                assert name in found, (method, name)
                if name not in ("inputs", "query", "documents", "path", "repo_id"):
                    assert found[name].default == parameter.default, (method, name)
    public = {name for name in dir(theirs) if not name.startswith("_")}
    public -= {name for name in dir(torch.nn.Sequential)} | {"forward"}
    assert {"encode_query", "similarity"} & public or kind == "CrossEncoder"
    missing = public - set(dir(ours))
    assert missing <= NOT_HERE, sorted(missing - NOT_HERE)


# Of training, adapters, other backends and the inside of the library's own modules.
NOT_HERE = {
    *("fit", "old_fit", "evaluate", "smart_batching_collate", "smart_batching_collate_text_only"),
    *("check_peft_compatible_model", "has_peft_compatible_model"),
    *("add_adapter", "set_adapter", "load_adapter", "active_adapters", "active_adapter"),
    *("delete_adapter", "disable_adapters", "enable_adapters", "get_adapter_state_dict"),
    *("gradient_checkpointing_enable", "get_backend", "merge", "clear_placement_cache"),
    *("model_card_data_class", "default_huggingface_organization", "transformers_model"),
    *("modalities", "supports", "processor", "get_sentence_features", "load", "save_to_hub"),
    *("set_keep_in_fp32_modules", "get_default_activation_fn", "splade_pooling_chunk_size"),
    *("config", "set_pooling_include_prompt"),
}


def test_arguments_without_meaning_are_logged_once(
    folders: dict[str, Path], caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(arguments, "LOGGED", set())
    options: dict[str, Any] = {
        "backend": "onnx",
        "model_kwargs": {"attn_implementation": "sdpa", "torch_dtype": "float32"},
    }
    with caplog.at_level(logging.WARNING):
        for _ in range(2):
            packhorse.SentenceTransformer(str(folders["SentenceTransformer"]), **options)
    messages = [record.getMessage() for record in caplog.records]
    assert [message.split(" is ignored")[0] for message in messages] == [
        "backend='onnx'",
        "model_kwargs['attn_implementation']",
    ]


@pytest.mark.parametrize(
    ("call", "message"),
    [
        ({"batch_size": 0}, "batch_size must be a positive integer, got 0"),
        ({"prompt_name": "other"}, "Prompt name 'other' not found"),
        ({"precision": "int4"}, "Precision 'int4' is not supported"),
        ({"output_value": "logits"}, "output_value is 'logits'"),
        ({"normalize": True}, "takes no normalize"),
    ],
)
def test_bad_calls(
    dense: packhorse.SentenceTransformer, call: dict[str, Any], message: str
) -> None:
    with pytest.raises(ValueError, match=message):
        dense.encode(TEXTS, **call)


def test_other_models_are_refused(folders: dict[str, Path], tmp_path: Path) -> None:
    with pytest.raises(InputError, match="scores no pairs"):
        packhorse.CrossEncoder(str(folders["SentenceTransformer"]))
    with pytest.raises(InputError, match="does not weigh words"):
        packhorse.SparseEncoder(str(folders["SentenceTransformer"]))
    with pytest.raises(InputError, match="cannot be trained"):
        packhorse.SentenceTransformer(str(folders["SentenceTransformer"])).train()
    with pytest.raises(OSError, match="no folder"):
        packhorse.SentenceTransformer(str(tmp_path / "nothing"))


def test_settings_act_at_once(both: dict[str, tuple[Any, Any]]) -> None:
    ours, theirs = (copy.deepcopy(model) for model in both["SentenceTransformer"])
    whole = theirs.encode(TEXTS)
    for model in (ours, theirs):
        model.max_seq_length = 5
        model.prompts = {"query": "market "}
        model.truncate_dim = 8
        model.set_pooling_include_prompt(True)
    assert far(ours.encode_query(TEXTS), theirs.encode_query(TEXTS)) <= CLOSE
    assert ours.get_embedding_dimension() == theirs.get_embedding_dimension() == 8
    assert ours[0].max_seq_length == ours.tokenizer.model_max_length == 5
    with ours.truncate_embeddings(4):
        assert ours.encode("a").shape == (4,)
    # The settings of copies are their own, and the originals' are as they were.
    assert far(both["SentenceTransformer"][0].encode(TEXTS), whole) <= CLOSE
    assert ours[1].pooling_mode == theirs[1].pooling_mode == "mean"
    assert [part.kind for part in ours] == [type(part).__name__ for part in theirs]


def test_another_number_format(dense: packhorse.SentenceTransformer) -> None:
    exact = dense.encode(TEXTS)
    assert dense.eval() is dense and dense.to("cpu") is dense
    assert dense.bfloat16().dtype == torch.bfloat16
    rounded = dense.encode(TEXTS)
    assert 0 < far(rounded, exact) < 0.1
    assert far(dense.float().encode(TEXTS), exact) == 0


@pytest.mark.parametrize("half", ["half", "bfloat16"])
def test_vectors_have_the_format_of_the_model(
    st: ModuleType, folders: dict[str, Path], half: str
) -> None:
    calls: list[dict[str, Any]] = [
        {},
        {"convert_to_tensor": True},
        {"convert_to_numpy": False},
        {"normalize_embeddings": True},
        {"output_value": "token_embeddings"},
        {"precision": "ubinary"},
    ]
    formats: list[list[str]] = []
    for library in (packhorse, st):
        folder = str(folders["SentenceTransformer"])
        dense = getattr(library.SentenceTransformer(folder, device="cpu"), half)()
        vectors = [dense.encode(TEXTS, **options) for options in calls]
        vectors += [dense.encode(TEXTS[0]), dense.encode(TEXTS, output_value=None)[0]]
        formats.append([dtype_of(result) for result in vectors])
        sparse = library.SparseEncoder(str(folders["SparseEncoder"]), device="cpu")
        formats[-1].append(dtype_of(getattr(sparse, half)().encode(TEXTS)))
        scores = library.CrossEncoder(str(folders["CrossEncoder"]), device="cpu")
        formats[-1].append(dtype_of(getattr(scores, half)().predict(PAIRS)))
    assert formats[0] == formats[1]
    assert any("16" in name for name in formats[0]) and "float32" in formats[0]


def dtype_of(result: Any) -> str:
    if isinstance(result, dict):
        result = result["sentence_embedding"]
    return str(result[0].dtype if isinstance(result, list) else result.dtype)


def test_the_tokenizer(both: dict[str, tuple[Any, Any]]) -> None:
    ours, theirs = (model.tokenizer for model in both["SentenceTransformer"])
    for options in ({}, {"padding": True}, {"truncation": True, "max_length": 5}):
        assert ours(TEXTS, **options) == dict(theirs(TEXTS, **options))
    assert ours("the horse", "a dog") == dict(theirs("the horse", "a dog"))
    ids = ours.encode("the horse carries sacks", add_special_tokens=False)
    assert ids == theirs.encode("the horse carries sacks", add_special_tokens=False)
    assert ours.decode(ids) == theirs.decode(ids)
    assert ours.tokenize("the horses") == theirs.tokenize("the horses")
    assert ours.convert_tokens_to_ids("horse") == theirs.convert_tokens_to_ids("horse")
    assert len(ours) == len(theirs) and ours.get_vocab() == theirs.get_vocab()
    model = copy.deepcopy(both["SentenceTransformer"][0])
    before = model.encode(TEXTS)
    model.tokenizer = theirs  # one of transformers
    assert far(model.encode(TEXTS), before) == 0


@pytest.mark.parametrize("kind", KINDS)
def test_saved_models_open_there(
    both: dict[str, tuple[Any, Any]], st: ModuleType, kind: str, tmp_path: Path
) -> None:
    ours = copy.deepcopy(both[kind][0])
    method = "predict" if kind == "CrossEncoder" else "encode"
    inputs = PAIRS if kind == "CrossEncoder" else TEXTS
    ours.prompts = {"query": "market "}
    ours.default_prompt_name = "query"
    ours.max_seq_length = 12
    if kind == "CrossEncoder":
        ours.activation_fn = torch.nn.Tanh()
    ours.save_pretrained(str(tmp_path / "model"))
    expected = getattr(ours, method)(inputs)
    again = getattr(packhorse, kind)(str(tmp_path / "model"))
    assert far(getattr(again, method)(inputs), expected) == 0
    assert again.prompts["query"] == "market " and again.max_seq_length == 12
    theirs = getattr(st, kind)(str(tmp_path / "model"), device="cpu")
    assert far(getattr(theirs, method)(inputs), expected) <= CLOSE * 100
    card = (tmp_path / "model" / "README.md").read_text()
    assert kind in card


def test_a_plain_transformer_is_saved_with_its_modules(
    st: ModuleType, folders: dict[str, Path], tmp_path: Path
) -> None:
    ours = packhorse.SentenceTransformer(str(folders["SentenceTransformer"].parent / "bert"))
    ours.half().save_pretrained(str(tmp_path / "model"))
    assert json.loads((tmp_path / "model/config.json").read_text())["dtype"] == "float16"
    theirs = st.SentenceTransformer(str(tmp_path / "model"), device="cpu")
    assert far(theirs.float().encode(TEXTS), ours.float().encode(TEXTS)) < 0.02
    assert [type(part).__name__ for part in theirs] == ["Transformer", "Pooling"]


def test_copies_and_pickles(dense: packhorse.SentenceTransformer) -> None:
    dense.prompts["query"] = "home "
    expected = dense.encode_query(TEXTS)
    shared = copy.deepcopy(dense)
    assert shared.encoder is dense.encoder
    shared.prompts["query"] = ""
    pickled = pickle.dumps(dense)
    assert len(pickled) < 10_000
    assert far(pickle.loads(pickled).encode_query(TEXTS), expected) == 0
    assert far(dense.encode_query(TEXTS), expected) == 0


@pytest.mark.slow
def test_pools_of_processes(both: dict[str, tuple[Any, Any]]) -> None:
    for kind, (ours, _) in both.items():
        method = ours.predict if kind == "CrossEncoder" else ours.encode
        inputs = PAIRS if kind == "CrossEncoder" else TEXTS
        expected = method(inputs)
        assert far(method(inputs, device=["cpu", "cpu"]), expected) <= CLOSE
        pool = ours.start_multi_process_pool(["cpu"])
        assert far(method(inputs, pool=pool, chunk_size=2), expected) <= CLOSE
        ours.stop_multi_process_pool(pool)


def test_a_text_is_no_pair_of_letters(both: dict[str, tuple[Any, Any]]) -> None:
    with pytest.raises(InputError, match="'ab'"):
        both["CrossEncoder"][0].predict("ab")


def test_a_model_that_is_not_in_the_cache_of_the_user(tmp_path: Path) -> None:
    with pytest.raises(OSError, match="not whole") as error:
        packhorse.SentenceTransformer("org/x", cache_folder=str(tmp_path), local_files_only=True)
    assert f"cache {tmp_path}, and local_files_only is set" in str(error.value)
    assert f"hf download org/x --cache-dir {tmp_path}" in str(error.value)


def test_a_pool_forgets_answers_to_an_interrupted_call(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(pools, "_calls", iter([7]))
    outputs: queue.Queue[Any] = queue.Queue()
    outputs.put((6, 0, pickle.dumps(["old"]), ""))
    outputs.put((7, 0, pickle.dumps(["new"]), ""))
    pool = {"input": queue.Queue(), "output": outputs, "processes": [None]}
    assert pools.compute(pool | {"lock": threading.Lock()}, ["text"], None, {}) == ["new"]


def test_a_pool_that_is_stopped_meanwhile_is_told(dense: packhorse.SentenceTransformer) -> None:
    """Its process never answers; the call waits in a thread until another one stops the pool."""
    context = multiprocessing.get_context("spawn")
    process = context.Process(target=time.sleep, args=(600,), daemon=True)
    process.start()
    pool: dict[str, Any] = {"input": context.Queue(), "output": context.Queue()}
    pool |= {"processes": [process], "lock": threading.Lock()}
    with ThreadPoolExecutor(1) as threads:
        call = threads.submit(dense.encode, ["the horse"], pool=pool)
        while not pool["lock"].locked():
            time.sleep(0.01)
        dense.stop_multi_process_pool(pool)
        assert isinstance(call.exception(60), PoolError)
    with pytest.raises(PoolError, match="the pool was stopped; start a new one"):
        dense.encode(["the horse"], pool=pool)


def test_a_pool_refuses_what_it_cannot_send(dense: packhorse.SentenceTransformer) -> None:
    pool = {"processes": [None]}
    with pytest.raises(InputError, match="a pool cannot send"):
        dense.encode(["the horse"], pool=pool, processing_kwargs={"text": lambda: 0})


def test_pairs_are_cut_to_the_length_of_a_call(both: dict[str, tuple[Any, Any]]) -> None:
    ours, theirs = both["SentenceTransformer"]
    pairs = [(TEXTS[0] * 3, TEXTS[1] * 3)]
    short = {"processing_kwargs": {"text": {"max_length": 8}}}
    assert far(ours.encode(pairs, **short), theirs.encode(pairs, **short)) <= CLOSE
    assert far(ours.encode(pairs, **short), ours.encode(pairs)) > CLOSE


def test_upload(dense: packhorse.SentenceTransformer, monkeypatch: pytest.MonkeyPatch) -> None:
    """Only the hub is not the real one: what is sent to it is looked at."""
    from types import SimpleNamespace

    from huggingface_hub import HfApi

    sent: dict[str, Any] = {}

    def create(self: HfApi, repo_id: str, **options: Any) -> Any:
        return SimpleNamespace(repo_id=f"me/{repo_id}")

    def upload(self: HfApi, *, folder_path: str, **options: Any) -> Any:
        sent.update(options, files=sorted(path.name for path in Path(folder_path).iterdir()))
        return SimpleNamespace(
            commit_url="https://huggingface.co/commit", pr_url="https://huggingface.co/discussion"
        )

    monkeypatch.setattr(HfApi, "create_repo", create)
    monkeypatch.setattr(HfApi, "upload_folder", upload)
    assert dense.push_to_hub("model", commit_message="New") == "https://huggingface.co/commit"
    assert sent["repo_id"] == "me/model" and sent["commit_message"] == "New"
    assert {"README.md", "config.json", "model.safetensors", "modules.json"} <= set(sent["files"])
    assert dense.push_to_hub("model", create_pr=True) == "https://huggingface.co/discussion"


def test_without_the_library(folders: dict[str, Path]) -> None:
    """Neither sentence-transformers nor transformers is imported."""
    code = (
        "import sys; sys.modules['sentence_transformers'] = sys.modules['transformers'] = None\n"
        "import packhorse\n"
        f"model = packhorse.SentenceTransformer({str(folders['SentenceTransformer'])!r})\n"
        "assert model.encode(['a', 'b']).shape == (2, 16), model\n"
        "assert model.tokenizer.encode('the horse') and len(model) == 4\n"
        f"model = packhorse.CrossEncoder({str(folders['CrossEncoder'])!r})\n"
        "assert model.rank('a', ['b', 'c'])[0]['score'] > 0\n"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr


def test_the_guide_runs(st: ModuleType, minilm: Path) -> None:
    """Its blocks, with the model's folder for the name that the hub would be asked for."""
    text = GUIDE.read_text("utf-8")
    ours, theirs = re.findall(r"^```python\n(.*?)^```$", text, re.M | re.S)
    names: dict[str, Any] = {}
    exec(ours, names)
    assert isinstance(names["model"], packhorse.SentenceTransformer)
    expected = names["model"].encode(["A man eats."])
    folder = str(minilm).replace("\\", "/")
    exec(theirs.replace("sentence-transformers/all-MiniLM-L6-v2", folder), names)
    assert isinstance(names["model"], st.SentenceTransformer)
    assert far(names["vectors"], expected) <= CLOSE


def test_mteb_takes_the_object(dense: packhorse.SentenceTransformer) -> None:
    mteb = pytest.importorskip("mteb")
    from types import SimpleNamespace

    assert isinstance(dense, mteb.EncoderProtocol)
    assert dense.mteb_model_meta.embed_dim == 16
    dense.prompts["STS"] = "market "
    task = SimpleNamespace(name="Any", type="STS")
    batches = [{"text": TEXTS[:2]}, {"text": TEXTS[2:3]}]
    options: dict[str, Any] = {"task_metadata": task, "hf_split": "test", "hf_subset": "default"}
    vectors = dense.encode(batches, prompt_type=None, **options)
    assert far(vectors, dense.encode(TEXTS[:3], prompt_name="STS")) == 0


def test_langchain_takes_the_object(dense: packhorse.SentenceTransformer) -> None:
    embeddings = pytest.importorskip("langchain_core.embeddings")
    vectorstores = pytest.importorskip("langchain_core.vectorstores")

    class Packed(embeddings.Embeddings):
        def embed_documents(self, texts: list[str]) -> list[list[float]]:
            return dense.encode_document(texts).tolist()

        def embed_query(self, text: str) -> list[float]:
            return dense.encode_query(text).tolist()

    store = vectorstores.InMemoryVectorStore.from_texts(TEXTS[:5], Packed())
    scores = dense.similarity(dense.encode_query("a dog"), dense.encode_document(TEXTS[:5]))
    (best,) = store.similarity_search("a dog", k=1)
    assert best.page_content == TEXTS[int(scores.argmax())]
