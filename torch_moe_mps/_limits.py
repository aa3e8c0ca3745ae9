"""Limits that several rooms share; this module imports nothing."""

MOST_TOKENS = 8  # new ones of a sequence in a decode step; a call with more is a prompt
LARGEST_CHUNK = 2048  # tokens of a prompt that are computed at once
# The same for experts on the SSD, on a GPU on which no check has passed. A kernel that takes ten times as
# long as planned still ends within the 5 s after which macOS stops it.
CAUTIOUS_CHUNK = 256
# {kv_bits of a KV cache in tiles: bits of its keys and of its values}
KV_FORMATS: dict[int | str, tuple[int, int]] = {4: (4, 4), "k4v2": (4, 2)}
KV_BITS = (*KV_FORMATS, 8, 16)  # 16 leaves keys and values as the model makes them
