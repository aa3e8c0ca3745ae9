"""Matrices of stacked experts that no forward reads, and that published checkpoints lack."""

from torch import nn

from ..transformers.basics.interface import FORM, experts_of, projections


def drop_unread(model: nn.Module) -> None:
    """Cuts stacks of a model without weights to as many matrices as there are experts.

    transformers makes LongCat's first ones for ids that mean the identity, too: a quarter of its weights.
    """
    for module in experts_of(model).values():
        if (form := vars(module).get(FORM)) is None:
            continue
        name = projections(module)[0]
        stack = module._parameters.get(name)
        if stack is not None and stack.is_meta and len(stack) > form.experts:
            module._parameters[name] = nn.Parameter(
                stack.detach()[: form.experts].clone(), stack.requires_grad
            )
            shapes = ((n, (form.experts, *shape[1:]) if n == name else shape) for n, shape in form.shapes)
            vars(module)[FORM] = form._replace(shapes=tuple(shapes))
