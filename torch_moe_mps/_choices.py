"""Formats that weights can be quantised to, for options too, which are checked before torch is imported."""

# {mode: bits}, {mode: columns that share a scale}: MLX's, then ggml's with integers as scales.
BITS = {
    "affine": (1, 2, 3, 4, 5, 6, 8),
    "mxfp4": (4,),
    "mxfp8": (8,),
    "nvfp4": (4,),
    "q2_k": (2,),
    "q3_k": (3,),
    "q4_k": (4,),
    "q5_k": (5,),
    "q6_k": (6,),
    "iq4_xs": (4,),
}
GROUP_SIZES = {
    "affine": (32, 64, 128),
    "mxfp4": (32,),
    "mxfp8": (32,),
    "nvfp4": (16,),
    "q2_k": (16,),
    "q3_k": (16,),
    "q4_k": (32,),
    "q5_k": (32,),
    "q6_k": (16,),
    "iq4_xs": (32,),
}
MODES = tuple(BITS)
DEFAULTS = {mode: (BITS[mode][0], GROUP_SIZES[mode][0]) for mode in MODES} | {"affine": (4, 64)}


def one_of(values: tuple[object, ...]) -> str:
    """The values as an error or a help says them: "32, 64 or 128"."""
    *others, last = map(str, values)
    return f"{', '.join(others)} or {last}" if others else last
