"""OpenAI's `/v1/embeddings`, and `/v1/rerank` as of Jina and Cohere."""

import base64
from typing import Any

from torch import Tensor

from ...engine.encoder import Encoder
from ...engine.ranges import integer
from .. import limits
from ..request import TEXT, YES_OR_NO, Fields, Refused, check_count, texts_or_tokens, wrong
from ..served import Served

EMBEDDINGS, RERANK = "/v1/embeddings", "/v1/rerank"
_FIELDS = {
    EMBEDDINGS: Fields(
        {"dimensions": integer(1), "model": TEXT, "user": TEXT}, "input", frozenset({"encoding_format"})
    ),
    RERANK: Fields(
        {
            "model": TEXT,
            "query": TEXT,
            "return_documents": YES_OR_NO,
            "top_n": integer(1),
        },
        "query",
        frozenset({"documents"}),
    ),
}


class Texts:
    """An embeddings or rerank request: its tokenized texts and its response.

    Args:
        path: EMBEDDINGS or RERANK.

    Raises: Refused.
    """

    def __init__(self, path: str, body: dict[str, Any], served: Served):
        self.path, self.body, self.served = path, body, served
        _FIELDS[path].check(body, path, served.say_once)
        self.encoder = _encoder(path, served)
        self.documents: list[str] = []
        field = "documents" if path == RERANK else "input"
        if path == RERANK:
            self.documents = _documents(body.get(field), field)
            count = sum(map(len, self.documents)) + len(self.documents) * len(body["query"])
            check_count(field, count, limits.CHARACTERS, "characters, with the query for each text,")
            with served.template.tokenizing():
                self.ids = self.encoder.pairs(body["query"], self.documents)
        else:
            if body.get("encoding_format") not in (None, "float", "base64"):
                raise wrong("encoding_format", "float or base64", body["encoding_format"])
            values = texts_or_tokens(body.get("input"), field, limits.TEXTS)
            check_count(field, sum(map(len, values)), limits.CHARACTERS, "characters")
            self.ids = [self._tokens(value) for value in values]
        for ids in self.ids:
            served.check_tokens(ids, field)
            if not 0 < len(ids) <= served.context:
                message = f"A text must have from 1 to {served.context} tokens, got {len(ids)}."
                raise Refused(message, field, "context_length_exceeded")

    def _tokens(self, value: str | list[int]) -> list[int]:
        if not isinstance(value, str):
            return value
        with self.served.template.tokenizing():
            return [*self.encoder.tokenizer(value)["input_ids"]]

    def compute(self) -> Tensor:
        """Computes the response. Call it on the device thread."""
        return self.encoder.scores(self.ids) if self.path == RERANK else self.encoder.vectors(self.ids)

    def answer(self, result: Tensor) -> dict[str, Any]:
        count = sum(map(len, self.ids))
        whole: dict[str, Any] = {"object": "list", "model": self.served.name}
        whole["usage"] = {"prompt_tokens": count, "total_tokens": count}
        return whole | (self._ranked(result) if self.path == RERANK else self._embedded(result))

    def _embedded(self, vectors: Tensor) -> dict[str, Any]:
        if (size := self.body.get("dimensions")) is not None:
            if size > vectors.shape[1]:
                raise wrong("dimensions", f"at most {vectors.shape[1]}", size)
            vectors = vectors[:, :size]
            vectors = vectors / vectors.norm(dim=1, keepdim=True)
        is_text = self.body.get("encoding_format") == "base64"
        data = [
            {"object": "embedding", "index": number, "embedding": _base64(row) if is_text else row.tolist()}
            for number, row in enumerate(vectors)
        ]
        return {"data": data}

    def _ranked(self, scores: Tensor) -> dict[str, Any]:
        best: list[int] = scores.argsort(descending=True, stable=True).tolist()
        results: list[dict[str, Any]] = [
            {"index": number, "relevance_score": scores[number].item()}
            for number in best[: self.body.get("top_n")]
        ]
        if self.body.get("return_documents"):
            for result in results:
                result["document"] = {"text": self.documents[result["index"]]}
        return {"results": results}


def _encoder(path: str, served: Served) -> Encoder:
    encoder = served.encoder
    if path == RERANK and (encoder is None or not encoder.makes_scores):
        raise Refused(
            "This model ranks no documents: /v1/rerank is for models such as BGE's rerankers.", "model"
        )
    if encoder is None or (path == EMBEDDINGS and encoder.pooling is None):
        raise Refused(
            "This model makes no embeddings: /v1/embeddings is for models that are made for them.", "model"
        )
    return encoder


def _documents(value: Any, field: str) -> list[str]:
    is_short = isinstance(value, list) and len(value) <= limits.TEXTS
    listed = [d.get("text") if isinstance(d, dict) else d for d in value] if is_short else []
    texts = [text for text in listed if isinstance(text, str)]
    if not 0 < len(texts) == len(listed):
        raise wrong(field, f"a list of at most {limits.TEXTS} texts", value)
    return texts


def _base64(vector: Tensor) -> str:
    """Base64 of the float32 values, as OpenAI clients decode it."""
    return base64.b64encode(vector.contiguous().numpy().astype("<f4").tobytes()).decode()
