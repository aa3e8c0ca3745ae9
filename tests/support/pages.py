"""Scripts of the documentation's pages."""

import re

from .processes import REPOSITORY


def script_of(page: str, heading: str, changes: dict[str, str] | None = None) -> str:
    """The first Python script under a heading of a page of docs/.

    Args:
        changes: {text that must be in it: what takes its place}.
    """
    text = (REPOSITORY / "docs" / page).read_text().partition(heading)[2]
    script = re.search(r"```python\n(.*?)```", text, re.DOTALL)[1]
    for shown, here in (changes or {}).items():
        assert shown in script
        script = script.replace(shown, here)
    return script
