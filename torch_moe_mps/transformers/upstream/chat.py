"""Texts of chats and of tokenizers."""

from jinja2.meta import find_undeclared_variables
from transformers.convert_slow_tokenizer import bytes_to_unicode
from transformers.utils.chat_parsing import ResponseParser
from transformers.utils.chat_template_utils import _compile_jinja_template

__all__ = ["ResponseParser", "bytes_to_unicode", "variables_of"]


def variables_of(chat_template: str) -> set[str]:
    """Names of all that a chat template reads and does not set itself, functions of its environment included.

    Raises: jinja2.TemplateSyntaxError.
    """
    environment = _compile_jinja_template(chat_template).environment  # it has tags of transformers
    return {*find_undeclared_variables(environment.parse(chat_template))}
