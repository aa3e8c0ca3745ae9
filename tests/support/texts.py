"""Texts of several scripts, of code, emoji, numbers and spaces, from a seed."""

import random

_SCRIPTS = {
    "latin": "abcdefghijklmnopqrstuvwxyzABCDEFGHIJKLMNOPQRSTUVWXYZ",
    "accents": "àéîõüçñßøåÀÉÎÕÜŁžğı",
    "greek": "αβγδεζηθικλμΑΒΓΔΩ",
    "cyrillic": "абвгдежзийклмнАБВГДЯ",
    "hebrew": "אבגדהוזחטי",
    "arabic": "ابتثجحخدذر",
    "devanagari": "कखगघचछािीुू्",
    "thai": "กขคงจชาิีุู่้",
    "han": "中文字漢語日本人大小天地",
    "kana": "あいうえおカキクケコ",
    "hangul": "가나다라마한국어",
}
_EMOJI = ("😀", "🚀", "👩‍💻", "🇫🇷", "👍🏽", "❤️", "♥", "✓", "→")
_CODE = (
    "def f(x):\n    return x**2  # y\n",
    "for (int i = 0; i < n; ++i) {\n\tsum += a[i];\n}\n",
    '{"key": [1, 2.5e-3, null], "other": "a\\nb"}',
    "<div class='a'>\r\n  <b>x</b>\r\n</div>",
    "SELECT * FROM t WHERE id=42 AND name!='Bob';",
    "https://example.org/a_b/c?d=e&f=%20g#h",
)
_SHORT = ("'s", "'S", "'re", "'LL", "'t", "'D", "n't", "I'm", "you'Ve", "'x")
_SPACES = (" ", "  ", "   ", "\t", "\n", "\r\n", "\n\n", " \n", "\n ", "\u00a0", "\u3000", "        ")
_SIGNS = (
    "!",
    "...",
    "?!",
    "--",
    "/",
    "//",
    "$",
    "%",
    "&&",
    "«",
    "»",
    "。",
    "，",
    "“",
    "”",
    "#",
    "@",
    "_",
    "()",
    "[]",
)
_NUMBERS = ("0", "7", "42", "123", "1234", "1234567", "3.14", "1,000,000", "٣٤", "½", "²")


def texts(count: int = 200, seed: int = 0) -> list[str]:
    """Each text mixes a few kinds of parts, as they follow each other in documents and where they do not."""
    draw = random.Random(seed)
    return [*_CODE, *("".join(_parts(draw)) for _ in range(count - len(_CODE)))]


def _parts(draw: random.Random) -> list[str]:
    scripts = draw.sample([*_SCRIPTS], 2)
    result = []
    for _ in range(draw.randint(3, 14)):
        kind = draw.random()
        if kind < 0.5:
            letters = _SCRIPTS[draw.choice(scripts)]
            result.append("".join(draw.choices(letters, k=draw.randint(1, 9))))
        else:
            choices = draw.choice((_EMOJI, _SHORT, _SPACES, _SPACES, _SIGNS, _NUMBERS))
            result.append(draw.choice(choices))
        if draw.random() < 0.6:
            result.append(draw.choice((" ", " ", " ", *_SPACES)))
    return result
