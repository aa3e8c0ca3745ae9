"""Servers of small models for the tests of this folder."""

from support.servers import checkpoint, client, here, printable

__all__ = ["checkpoint", "client", "here", "printable"]
