"""Names of our implementations in configs, for the modules of one model alone.

A config is its user's: other models may be built from it, and `config.output_attentions = True` raises an
error beside any attention but "eager". So it keeps its names, and modules that shall run ours have a view.
"""

import functools
from collections.abc import Iterator
from typing import Any

from torch import nn

ATTENTION, EXPERTS = "_attn_implementation", "_experts_implementation"  # attributes of a config
_BEHIND = "_moe_mps_behind"  # the attribute that only a view has

Names = dict[str, tuple[Any, str]]  # {attribute: the name in the config at `accelerate`, our name}


class _Behind:
    """The config behind a view, and our names for it.

    Attributes:
        config: its attributes are the view's, too.
        inner: {attribute: view of the config that it holds}.
    """

    def __init__(self, config: Any = None) -> None:
        self.config = config
        self.names: Names = {}
        self.inner: dict[str, Any] = {}

    def name(self, attribute: str) -> Any:
        """Ours, unless another one was chosen since, or weights of attention are asked for."""
        now = getattr(self.config, attribute)
        before, ours = self.names.get(attribute, (None, None))
        is_chosen = ours is None or now != before
        is_asked = attribute == ATTENTION and getattr(self.config, "output_attentions", False)
        return now if is_chosen or is_asked else ours


class ImplementationNames:
    """The names of our implementations for modules of a model, by their configs."""

    def __init__(self) -> None:
        self._named: dict[int, Names] = {}  # {id of a config: names}
        self._views: dict[int, Any] = {}

    def add(self, config: Any, attribute: str, name: str) -> None:
        plain = plain_config(config)
        self._named.setdefault(id(plain), {})[attribute] = getattr(plain, attribute, None), name

    def show(self, model: nn.Module) -> None:
        """Gives modules views. A model of transformers, which makes masks, has one during its calls alone."""
        for module, config in list(_configs(model)):
            view = self._view(config)
            if not _is_model(module):
                module.config = view
            elif _names_attention(view) and not _is_handed_on(module, config):
                module.register_forward_pre_hook(_Config(view))
                module.register_forward_hook(_Config(config), always_call=True)

    def _view(self, config: Any) -> Any:
        """The view of a config; the config itself if there are no names for it and those in it."""
        if id(config) not in self._views:
            inside = {key: getattr(config, key, None) for key in getattr(config, "sub_configs", ())}
            views = {key: self._view(each) for key, each in inside.items() if each is not None}
            inner = {key: view for key, view in views.items() if view is not inside[key]}
            names = self._named.get(id(config), {})
            self._views[id(config)] = _view_of(config, names, inner) if names or inner else config
        return self._views[id(config)]


def _names_attention(view: Any) -> bool:
    """True if a view, or one in it, has our name of an attention."""
    behind = getattr(view, _BEHIND, None)
    return behind is not None and (
        ATTENTION in behind.names or any(map(_names_attention, behind.inner.values()))
    )


def plain_config(config: Any) -> Any:
    """The config that a view shows, or the config itself."""
    behind = getattr(config, _BEHIND, None)
    return config if behind is None else behind.config


def drop_views(model: nn.Module) -> None:
    """Gives all modules their configs back."""
    for module, config in list(_configs(model)):
        module.config = config
        for hooks in (module._forward_pre_hooks, module._forward_hooks):
            for key in [key for key, hook in hooks.items() if isinstance(hook, _Config)]:
                del hooks[key]
                module._forward_hooks_always_called.pop(key, None)


def _configs(model: nn.Module) -> Iterator[tuple[Any, Any]]:
    """(module, its config) of the modules that have one."""
    for module in model.modules():
        config = plain_config(vars(module).get("config"))
        if hasattr(config, "__dict__"):
            yield module, config


def _is_model(module: nn.Module) -> bool:
    return hasattr(module, "save_pretrained")


def _is_handed_on(model: nn.Module, config: Any) -> bool:
    """True if a model in this one has the same config, and makes the masks."""
    return any(
        module_config is config and module is not model and _is_model(module)
        for module, module_config in _configs(model)
    )


class _Config:
    """A hook that gives a module a config."""

    def __init__(self, config: Any) -> None:
        self.config = config

    def __call__(self, module: nn.Module, *_: Any) -> None:
        module.config = self.config


def _view_of(config: Any, names: Names, inner: dict[str, Any]) -> Any:
    view = _empty_view(type(config))
    view.__setstate__((config, names, inner))
    return view


def _empty_view(cls: type) -> Any:
    view: Any = object.__new__(_view_class(cls))
    object.__setattr__(view, _BEHIND, _Behind())
    return view


@functools.cache
def _view_class(cls: Any) -> type:
    """A subclass of a config's class. Its instances share the attributes of a config, but the names in it."""

    def __new__(view: type, *args: Any, **kwargs: Any) -> Any:
        return cls(*args, **kwargs)  # a plain config, where transformers calls a config's class

    def named(attribute: str) -> property:
        return property(lambda self: getattr(self, _BEHIND).name(attribute))

    def inner_config(key: str) -> property:
        return property(lambda self: getattr(self, _BEHIND).inner.get(key, vars(self).get(key)))

    def __setattr__(self: Any, key: str, value: Any) -> None:
        setattr(plain_config(self), key, value)

    def __reduce_ex__(self: Any, protocol: Any) -> tuple[Any, ...]:
        behind = getattr(self, _BEHIND)
        return _empty_view, (cls,), (behind.config, behind.names, behind.inner)

    def __setstate__(self: Any, state: tuple[Any, Names, dict[str, Any]]) -> None:
        behind = getattr(self, _BEHIND)
        behind.config, behind.names, behind.inner = state
        object.__setattr__(self, "__dict__", behind.config.__dict__)

    methods = (__new__, __setattr__, __reduce_ex__, __setstate__)
    attributes: dict[str, Any] = {each.__name__: each for each in methods}
    attributes |= {key: inner_config(key) for key in getattr(cls, "sub_configs", ())}
    attributes |= {attribute: named(attribute) for attribute in (ATTENTION, EXPERTS)}
    attributes |= {"__slots__": (_BEHIND,), "__module__": cls.__module__}
    return type(cls.__name__, (cls,), attributes)
