"""Vectors and scores over the server: those of transformers' own code for each text alone."""

import base64
import json
import struct

import openai
import pytest
import torch
import transformers
from support import serving
from support.checkpoints import tokenizer_of

TEXTS = ["the sky", "a", "why is the sky blue"]
SIZES = {
    "vocab_size": 97, "hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 2,
    "intermediate_size": 64,
    "max_position_embeddings": 64, "pad_token_id": 96,
}  # fmt: skip


def write(folder, cls: type, pooling: dict | None, **more: object):
    """A checkpoint with the files of sentence-transformers."""
    torch.manual_seed(0)
    cls(cls.config_class(**SIZES | more)).save_pretrained(folder)
    words = tokenizer_of([*map(chr, range(32, 127)), "\n", "_"], unk_token="_", pad_token="_")
    words.save_pretrained(folder)
    if pooling is not None:
        kinds = ("Transformer", "Pooling", "Normalize")
        modules = [
            {"idx": n, "name": str(n), "path": f"{n}_{kind}" if n else "", "type": f"a.models.{kind}"}
            for n, kind in enumerate(kinds)
        ]
        (folder / "modules.json").write_text(json.dumps(modules))
        (folder / "1_Pooling").mkdir()
        (folder / "1_Pooling" / "config.json").write_text(json.dumps(pooling))
    return folder


@torch.no_grad()
def states_of(folder, cls: type, text: str) -> torch.Tensor:
    """The last states [T, D] of a text alone."""
    ids = transformers.AutoTokenizer.from_pretrained(folder)(text, return_tensors="pt").input_ids
    return cls.from_pretrained(folder)(ids).last_hidden_state[0].double()


def test_the_longest_text_of_positions_behind_padding(tmp_path):
    """XLM-RoBERTa's first token has the position behind padding's, so that 64 positions are 62 tokens."""
    more = {"pad_token_id": 1, "max_position_embeddings": 64, "type_vocab_size": 1}
    folder = write(tmp_path / "model", transformers.XLMRobertaModel, None, **more)
    with serving.client_of(folder) as client:
        assert client.embeddings.create(model="m", input=[[7] * 62]).data
        with pytest.raises(openai.BadRequestError, match="from 1 to 62 tokens, got 63"):
            client.embeddings.create(model="m", input=[[7] * 63])


@pytest.mark.parametrize(
    ("cls", "pooling", "pooled"),
    [
        (transformers.BertModel, {"pooling_mode_cls_token": True}, lambda states: states[0]),
        pytest.param(
            transformers.BertModel,
            {"pooling_mode": "mean"},
            lambda states: states.mean(0),
            marks=pytest.mark.sweep,
        ),
        (transformers.Qwen3ForCausalLM, {"pooling_mode_lasttoken": True}, lambda states: states[-1]),
    ],
    ids=["cls", "mean", "last"],
)
def test_embeddings(cls, pooling, pooled, tmp_path):
    """Numbers and base64; shorter ones; of texts and of tokens."""
    more = {"num_key_value_heads": 1, "head_dim": 16} if cls is transformers.Qwen3ForCausalLM else {}
    folder = write(tmp_path / "model", cls, pooling, **more)
    base = transformers.Qwen3Model if more else cls
    expected = [torch.nn.functional.normalize(pooled(states_of(folder, base, text)), dim=0) for text in TEXTS]
    with serving.client_of(folder) as client:
        answer = client.embeddings.create(model="m", input=TEXTS, encoding_format="float")
        for entry, vector in zip(answer.data, expected, strict=True):
            assert entry.embedding == pytest.approx(vector.tolist(), abs=1e-5)
        assert answer.usage.prompt_tokens == sum(map(len, TEXTS)) and answer.model == folder.name
        short = client.embeddings.create(
            model="m", input=TEXTS[0], dimensions=8
        )  # the client asks for base64
        vector = torch.nn.functional.normalize(expected[0][:8], dim=0)
        assert short.data[0].embedding == pytest.approx(vector.tolist(), abs=1e-5)
        raw = client.embeddings.with_raw_response.create(model="m", input=TEXTS[0], encoding_format="base64")
        octets = base64.b64decode(json.loads(raw.text)["data"][0]["embedding"])
        assert struct.unpack("<32f", octets) == pytest.approx(expected[0].tolist(), abs=1e-5)
        ids = transformers.AutoTokenizer.from_pretrained(folder)(TEXTS[1]).input_ids
        of_tokens = client.embeddings.create(model="m", input=ids, encoding_format="float").data[0]
        assert of_tokens.embedding == pytest.approx(expected[1].tolist(), abs=1e-5)
        for wrong in ({"input": []}, {"input": "a" * 65}, {"input": [97]}, {"input": "a", "dimensions": 33}):
            with pytest.raises(openai.BadRequestError):
                client.embeddings.create(model="m", **wrong)
        if not more:
            with pytest.raises(openai.BadRequestError, match="This model generates no text"):
                client.chat.completions.create(model="m", messages=serving.said("a"))


@pytest.mark.parametrize("command", ["generate", "chat", "bench", "perplexity"])
def test_a_model_that_generates_nothing_is_refused_before_it_is_read(command, tmp_path, refused, monkeypatch):
    """By the sentence of the server; there are no weights."""
    transformers.BertConfig(**SIZES, architectures=["BertModel"]).save_pretrained(tmp_path)
    monkeypatch.setattr("torch_moe_mps.commands.sources.check_files", lambda folder: None)
    more = ["-p", "a"] if command == "generate" else []
    error = refused(command, tmp_path, *more, "--device", "cpu")
    assert error == "This model generates no text: ask /v1/embeddings or /v1/rerank."


def ranked(client, **asked) -> list[tuple[int, float]]:
    answer = client.post("/rerank", body={"query": "sky", "documents": TEXTS} | asked, cast_to=object)
    return [(result["index"], result["relevance_score"]) for result in answer["results"]]


@torch.no_grad()
def test_rerank_by_a_classifier(tmp_path):
    cls = transformers.BertForSequenceClassification
    folder = write(tmp_path / "model", cls, None, num_labels=1)
    model, words = cls.from_pretrained(folder), transformers.AutoTokenizer.from_pretrained(folder)
    scores = [
        model(**words("sky", text, return_tensors="pt")).logits.double().sigmoid().item() for text in TEXTS
    ]
    order = sorted(enumerate(scores), key=lambda pair: -pair[1])
    with serving.client_of(folder) as client:
        found = ranked(client)
        assert [index for index, _ in found] == [index for index, _ in order]
        assert [score for _, score in found] == pytest.approx([score for _, score in order], abs=1e-5)
        asked = {"top_n": 1, "return_documents": True, "documents": [{"text": text} for text in TEXTS]}
        answer = client.post("/rerank", body={"query": "sky"} | asked, cast_to=object)
        (result,) = answer["results"]
        assert result["document"] == {"text": TEXTS[order[0][0]]}
        for wrong in ({"documents": []}, {"documents": [5]}, {"query": None}, {"top_n": 0}):
            with pytest.raises(openai.BadRequestError):
                ranked(client, **wrong)
        with pytest.raises(openai.BadRequestError, match="This model makes no embeddings"):
            client.embeddings.create(model="m", input="a")


@torch.no_grad()
def test_rerank_by_yes_and_no(tmp_path):
    """A model of Qwen's that is named a reranker: the probability of yes beside no."""
    more = {"num_key_value_heads": 1, "head_dim": 16, "vocab_size": 99, "max_position_embeddings": 512}
    folder = write(tmp_path / "Qwen3-Reranker", transformers.Qwen3ForCausalLM, None, **more)
    characters = [*map(chr, range(32, 127)), "\n", "_"]
    tokenizer_of([*characters, "yes", "no"], unk_token="_", pad_token="_").save_pretrained(folder)
    words = transformers.AutoTokenizer.from_pretrained(folder)
    model = transformers.Qwen3ForCausalLM.from_pretrained(folder)
    from torch_moe_mps.serving.engine.encoder import Encoder

    expected = []
    for ids in Encoder(model, words, None, is_judge=True).pairs("sky", TEXTS):
        yes, no = model(torch.tensor([ids])).logits[0, -1].double()[[97, 98]]
        expected.append((yes.exp() / (yes.exp() + no.exp())).item())
        text = words.decode(ids).replace(" ", "")
        assert "<Query>:sky" in text and text.endswith("<think>\n\n</think>\n\n")
    with serving.client_of(folder) as client:
        assert dict(ranked(client)) == pytest.approx(dict(enumerate(expected)), abs=1e-5)
