"""Servers of small models for the tests of this folder."""

from support.servers import anthropic, checkpoint, client, here, of_anthropic, of_openai, printable

__all__ = ["anthropic", "checkpoint", "client", "here", "of_anthropic", "of_openai", "printable"]
