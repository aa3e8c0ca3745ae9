"""Texts of chats and of tokenizers."""

from transformers.convert_slow_tokenizer import bytes_to_unicode
from transformers.utils.chat_parsing import ResponseParser

__all__ = ["ResponseParser", "bytes_to_unicode"]
