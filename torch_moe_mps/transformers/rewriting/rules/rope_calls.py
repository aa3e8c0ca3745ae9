"""One call of `rope` instead of several statements: for q and k, and for heads of which only a part turns."""

import ast

from ...report import NOTHING_NEW, Done
from ..program.rewrites import Match, Rewrite
from .rope import has_heads_first


def _has_no_norm(match: Match) -> Done | None:
    return None if any(option.arg == "q_norm" for option in match.values["OPTIONS"]) else NOTHING_NEW


# The operator passes on what does not turn.
TURN_LAST = Rewrite(
    "PARTS = torch.split(Q, [KEPT, WIDTH], dim=-1); "
    "TURNED = rope(F, FORM, PARTS[1], K, COS, SIN, **OPTIONS); "
    "S = torch.cat((PARTS[0], TURNED[0]), dim=-1)",
    "TURNED = rope(F, FORM, Q, K, COS, SIN, **OPTIONS, last=WIDTH); S = TURNED[0]",
    where=_has_no_norm,
)


def _hands_norms_on(match: Match) -> Done:
    """Each may have a norm in front, and no other option yet."""
    match.values["NORM_OF_K"] = [ast.keyword("k_norm", each.value) for each in match.values["NORM"]]
    return Done("rope", "rope of q and k")


JOIN_ROTATIONS = Rewrite(
    "A = rope(F, FORM, Q, None, COS, SIN, **NORM_OF_Q); B = rope(F, FORM, K, None, COS, SIN, **NORM)",
    "A, B = rope(F, FORM, Q, K, COS, SIN, **NORM_OF_Q, **NORM_OF_K, one_by_one=True)",
    where=_hands_norms_on,
)

# The operator would transpose what it gives.
GIVE_HEADS_FIRST = Rewrite(
    "ITEMS = rope(F, FORM, Q, K, COS, SIN, **OPTIONS); "
    "A = ITEMS[0].transpose(1, 2); B = ITEMS[1].transpose(1, 2)",
    "A, B = rope(F, FORM, Q, K, COS, SIN, heads_first=True, **OPTIONS)",
    where=lambda match: None if has_heads_first(match) else NOTHING_NEW,
)
