"""Rows of stacked experts that no forward reads, and that published checkpoints lack."""

from torch import nn

from ..transformers.basics.interface import FORM, experts_of, projections


def drop_unread_rows(model: nn.Module) -> None:
    """Cuts first matrices to as many as there are second ones, on the meta device.

    transformers makes LongCat's for ids that mean the identity, too: a third of its experts' memory.
    """
    for module in experts_of(model).values():
        if (form := vars(module).get(FORM)) is None or not form.has_identity:
            continue
        first, second = projections(module)
        stack, count = getattr(module, first), len(getattr(module, second))
        if stack.is_meta and len(stack) > count:
            module._parameters[first] = nn.Parameter(stack.detach()[:count].contiguous(), stack.requires_grad)
            shapes = tuple(
                (name, (count, *shape[1:])) if name == first else (name, shape) for name, shape in form.shapes
            )
            vars(module)[FORM] = form._replace(shapes=shapes)
