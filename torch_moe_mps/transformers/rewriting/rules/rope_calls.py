"""One call of `rope` instead of several statements: for q and k, and for heads of which only a part turns."""

import ast

from ..program.rewrites import Match, Rewrite


def _has_no_norm(match: Match) -> str | None:
    return None if any(option.arg == "q_norm" for option in match.values["OPTIONS"]) else ""


# The operator passes on what does not turn.
TURN_LAST = Rewrite(
    "PARTS = torch.split(Q, [KEPT, WIDTH], dim=-1); "
    "TURNED = rope(F, FORM, PARTS[1], K, COS, SIN, **OPTIONS); "
    "S = torch.cat((PARTS[0], TURNED[0]), dim=-1)",
    "TURNED = rope(F, FORM, Q, K, COS, SIN, **OPTIONS, last=WIDTH); S = TURNED[0]",
    where=_has_no_norm,
)


def _turn_alike(match: Match) -> str | None:
    """Whether q and k turn in the same way; each may have a norm in front."""
    options = [match.values[name] for name in ("OPTIONS", "OPTIONS_OF_K")]
    match.values["NORM_OF_K"] = [ast.keyword("k_norm", o.value) for o in options[1] if o.arg == "q_norm"]
    of_q, of_k = ([ast.dump(o) for o in each if o.arg != "q_norm"] for each in options)
    return "rope of q and k" if of_q == of_k else None


JOIN_ROTATIONS = Rewrite(
    "A = rope(F, FORM, Q, None, COS, SIN, **OPTIONS); B = rope(F, FORM, K, None, COS, SIN, **OPTIONS_OF_K)",
    "A, B = rope(F, FORM, Q, K, COS, SIN, **OPTIONS, **NORM_OF_K, one_by_one=True)",
    where=_turn_alike,
)
