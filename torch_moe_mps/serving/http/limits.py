"""Limits of requests: counts and lengths, each compared before any work that grows with it.

Checks, parsing, templates and grammars hold Python's lock: the work of one request delays the tokens of all
others.
"""

# Bodies
MEDIA_BYTES, TEXT_BYTES = 32 << 20, 8 << 20  # of a body for a model that sees or hears, and for any other
TOKEN_BYTES = 32  # more for each token of the context, where a body is text
SHORT_BYTES = 1 << 16  # of a body that is read beside long ones
CONTAINERS = 1 << 15  # objects and lists of a body, and one more for each token of the context
VALUES = 1 << 17  # of a body, and as many more for each token of the context
VALUES_OF_TOKEN = 4
OF_CONTEXT = 1 << 18  # tokens of a context that count, at most

# Parts of a body
CHARACTERS = 1 << 23  # of a text: more than any context has
MESSAGES, TOOLS = 10_000, 1024  # of a chat; parts of messages count as messages
PROMPTS, TEXTS = 64, 2048  # of a completion; of embeddings and rankings
PIECES = 1 << 14  # tokens that /tokenize shows with their texts
ANSWERS = 32  # to one request
STOPS, STOP_CHARACTERS = 16, 1024

# Schemas and grammars
FORM_CHARACTERS = 1 << 18
FORM_PARTS = 1 << 14  # objects and lists
CHOICES = 4096  # entries of one list or object, or alternatives of a grammar: time grows by the square
DEPTH = 100  # of values and of parentheses: xgrammar reads by recursion
