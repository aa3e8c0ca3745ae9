"""Limits of requests, checked before any work that grows with them.

Checks, parsing, templates and grammars hold the GIL, so one request's work delays the tokens of all others.
"""

# Bytes of a body
MEDIA_BYTES, TEXT_BYTES = 32 << 20, 8 << 20  # for a model that sees or hears, and for any other
TOKEN_BYTES = 32  # more for each token of the context, where a body is text
SHORT_BYTES = 1 << 16  # bodies up to here are read beside long ones
# Objects and lists of a body, and values, with as many more for each token of the context
CONTAINERS, CONTAINERS_OF_TOKEN = 1 << 15, 1
VALUES, VALUES_OF_TOKEN = 1 << 17, 4
CONTEXT = 1 << 18  # tokens of a context that count, at most

# Parts of a body
CHARACTERS = 1 << 23  # in the texts of a field: more than any context has
MESSAGES, TOOLS = 10_000, 1024  # in a chat; parts of messages count as messages
ANSWERS = 64  # to one request, all its prompts together: preparing them holds other requests up
STOPS, STOP_CHARACTERS = 16, 1024

# Schemas and grammars
FORM_CHARACTERS = 1 << 18
FORM_PARTS = 1 << 14  # objects and lists
CHOICES = 4096  # entries of one list or object, or alternatives of a grammar: time grows by the square
DEPTH = 100  # xgrammar reads values and parentheses by recursion
