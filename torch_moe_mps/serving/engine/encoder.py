"""Text embeddings and reranking scores."""

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from ...transformers.basics.logits import wide_logits

NO_TEXT = "This model generates no text: ask /v1/embeddings or /v1/rerank."
_AT_ONCE = 16  # texts
# {pooling: the names of it in the configs of sentence-transformers}
_POOLINGS = {
    "cls": ("pooling_mode_cls_token", "cls"),
    "mean": ("pooling_mode_mean_tokens", "mean"),
    "last": ("pooling_mode_lasttoken", "lasttoken"),
}
# The form of a prompt of Qwen3-Reranker, which its model card gives: the model answers with yes or no.
_TASK = "Given a web search query, retrieve relevant passages that answer the query"
_SYSTEM = (
    "Judge whether the Document meets the requirements based on the Query and the Instruct provided. "
    'Note that the answer can only be "yes" or "no".'
)


class Encoder:
    """An embedding or reranking model.

    Args:
        pooling: cls, mean or last; None for a model without embeddings.
        normalizes: True if vectors are normalized to length 1.
        is_judge: True if scores are the probability of "yes" against "no", as in Qwen3-Reranker.
    """

    def __init__(
        self, model: Any, tokenizer: Any, pooling: str | None, normalizes: bool = True, is_judge: bool = False
    ):
        self.model, self.tokenizer, self.pooling = model, tokenizer, pooling
        self.normalizes, self.is_judge = normalizes, is_judge
        self.is_classifier = getattr(model.config, "num_labels", 0) == 1 and _has_scores(model)

    @property
    def makes_scores(self) -> bool:
        return self.is_judge or self.is_classifier

    @torch.no_grad()
    def vectors(self, texts: Sequence[list[int]]) -> Tensor:
        """Embeddings [N, D] in float32 of tokenized texts. Call it on the device thread."""
        assert self.pooling is not None
        made = []
        for ids, mask in self._batches(texts):
            states = self.model.base_model(input_ids=ids, attention_mask=mask).last_hidden_state.float()
            weights = mask.unsqueeze(-1).float()
            if self.pooling == "mean":
                vectors = (states * weights).sum(1) / weights.sum(1)
            elif self.pooling == "last":
                vectors = states[torch.arange(len(ids), device=ids.device), mask.sum(1) - 1]
            else:
                vectors = states[:, 0]
            made.append(vectors.cpu())
        vectors = torch.cat(made)
        return torch.nn.functional.normalize(vectors, dim=-1) if self.normalizes else vectors

    def pairs(self, query: str, documents: Sequence[str]) -> list[list[int]]:
        """Tokenized pairs of the query and each document."""
        if not self.is_judge:
            return [self.tokenizer(query, document)["input_ids"] for document in documents]
        texts = [
            f"<|im_start|>system\n{_SYSTEM}<|im_end|>\n<|im_start|>user\n<Instruct>: {_TASK}\n"
            f"<Query>: {query}\n<Document>: {document}<|im_end|>\n"
            "<|im_start|>assistant\n<think>\n\n</think>\n\n"
            for document in documents
        ]
        return [self.tokenizer(text, add_special_tokens=False)["input_ids"] for text in texts]

    @torch.no_grad()
    def scores(self, pairs: Sequence[list[int]]) -> Tensor:
        """Relevance scores [N] from 0 to 1. Call it on the device thread."""
        made = []
        for ids, mask in self._batches(pairs):
            with wide_logits():
                logits = self.model(input_ids=ids, attention_mask=mask).logits.float()
            if self.is_judge:
                last = logits[torch.arange(len(ids), device=ids.device), mask.sum(1) - 1]
                yes, no = (self.tokenizer.convert_tokens_to_ids(word) for word in ("yes", "no"))
                logits = last[:, yes] - last[:, no]
            made.append(logits.reshape(-1).sigmoid().cpu())
        return torch.cat(made)

    def _batches(self, texts: Sequence[list[int]]) -> Any:
        """Yields batches of token ids and masks [B, T], padded on the right."""
        padding = self.tokenizer.pad_token_id or 0
        for at in range(0, len(texts), _AT_ONCE):
            some = texts[at : at + _AT_ONCE]
            width = max(map(len, some))
            ids = torch.tensor([[*text, *[padding] * (width - len(text))] for text in some])
            mask = torch.tensor([[1] * len(text) + [0] * (width - len(text)) for text in some])
            yield ids.to(self.model.device), mask.to(self.model.device)


def encoder_of(model: Any, tokenizer: Any, folder: Path, name: str) -> Encoder | None:
    """Encoder of a model, configured by sentence-transformers' files; None for a generative model.

    Args:
        name: of the model; Qwen3-Reranker is recognized by its name alone.
    """
    if "reranker" in name.lower() and model.can_generate():
        return Encoder(model, tokenizer, None, is_judge=True)
    if _has_scores(model):
        return Encoder(model, tokenizer, None)
    modules = _json(folder / "modules.json")
    if modules is None and model.can_generate():
        return None
    paths = {
        str(module.get("type", "")).rpartition(".")[2]: module.get("path", "") for module in modules or ()
    }
    config = _json(folder / paths["Pooling"] / "config.json") if "Pooling" in paths else None
    pooling = _pooling(config or {}) or ("last" if model.can_generate() else "mean")
    return Encoder(model, tokenizer, pooling, normalizes="Normalize" in paths or not paths)


def _pooling(config: dict[str, Any]) -> str | None:
    """Pooling mode of a sentence-transformers config; None if it has none."""
    named = (
        kind
        for kind, (flag, word) in _POOLINGS.items()
        if config.get(flag) or config.get("pooling_mode") == word
    )
    return next(named, None)


def _has_scores(model: Any) -> bool:
    return type(model).__name__.endswith("ForSequenceClassification")


def _json(file: Path) -> Any:
    return json.loads(file.read_text(encoding="utf-8")) if file.is_file() else None
