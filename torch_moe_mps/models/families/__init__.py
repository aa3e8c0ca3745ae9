"""Families: a folder for each architecture that needs what no other does, and that nothing else knows.

A folder declares its parts in a FAMILY, and `wiring.py` at the door puts them in.
"""

from collections.abc import Callable, Mapping
from types import MappingProxyType
from typing import Any, NamedTuple

from torch import fx, nn

from ..basics.experts import Experts
from ..graphs.passes import Place
from ..modules.rules import ModuleRule


class Family(NamedTuple):
    """Parts of one architecture, by the table that takes them.

    Attributes:
        rules: module -> (the forward that it runs, what that is), or None, for MODULE_RULES.
        recognisers: module -> its experts, whose stacks have names of their own, or None.
        growing_class: class of a cache's layer -> the class that grows in place, or None if it is another's.
        methods: {name of a method of modules: its class's own -> the method that rewritten modules have}.
        masks_choices: whether a layer turns what its indexer chose into a mask, for all implementations.
        passes: where passes of a captured token stand.
        introduced: {pass: the operator that it puts in, if modules do not call that}.
        options_of: call of a router of its own -> its logits and options, as experts take them, or None.

    Modules are named, not imported, where they need a transformers that is complete.
    """

    rules: tuple[ModuleRule, ...] = ()
    recognisers: tuple[Callable[[nn.Module], Experts | None], ...] = ()
    growing_class: Callable[[Any], Any] | None = None
    methods: Mapping[str, Callable[[Callable], Callable]] = MappingProxyType({})
    masks_choices: Callable[[nn.Module], bool] | None = None
    passes: tuple[Place, ...] = ()
    introduced: Mapping[Callable[[fx.Graph], None], str] = MappingProxyType({})
    options_of: Callable[[fx.Node], dict[str, Any] | None] | None = None
