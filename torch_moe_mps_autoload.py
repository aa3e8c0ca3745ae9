"""The names of torch_moe_mps in transformers, and what waits for other libraries to be imported.

`import torch` calls `autoload` through the entry point "torch.backends" of pyproject.toml. It puts a finder
in front of Python's import system, which adds names to transformers' registries once these exist: "moe_mps"
for experts, attention and masks, architectures of GGUF files, and a question before a checkpoint is loaded.
The functions behind the names, and what reads a checkpoint, import torch_moe_mps. A program that uses none of
them imports this module alone, which is no part of the package because that would import the package.

`import torch_moe_mps` lets the finder wait for torch, and its models let it wait for PEFT and TRL. These
libraries are extended while no module of the package is in the middle of its import. A module of the package
may so import them in any place, and what extends them may import any module of the package.
"""

import contextlib
import functools
import importlib
import importlib.abc
import os
import sys
import warnings
from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager
from importlib.machinery import ModuleSpec
from importlib.util import find_spec
from pathlib import Path
from types import ModuleType
from typing import Any

_PACKAGE = "torch_moe_mps"
NAME = "moe_mps"  # of our quantizer, and of our implementations of experts and attention
# {architecture of a GGUF file: the family that reads it}
GGUF_FAMILIES = {"gpt-oss": "gpt_oss"}
# {method: the package that transformers reads it with}; without it transformers refuses the checkpoint.
PACKAGES = {
    "auto-round": "auto_round",
    "awq": "gptqmodel",
    "compressed-tensors": "compressed_tensors",
    "gptq": "gptqmodel",
}
_DENSE_ON_MPS = ("fp8", "mxfp4")  # methods that transformers dequantises on a Mac


def autoload() -> None:
    """The entry point. torch takes an exception for a reason to refuse its own import, so none gets out."""
    if os.environ.get("MOE_MPS_AUTOLOAD") == "0":
        return
    try:
        register_names()
    except Exception as error:
        _warn(f"torch_moe_mps will not be loaded with transformers ({error})")


def register_names() -> None:
    """Adds our names to transformers, now or once it is imported."""
    _FINDER.wait_for(_NAMES)


def extend_when_imported(functions: Mapping[str, Callable[[], None]]) -> None:
    """Calls a function for each of these modules that is imported, and for the others once they are."""
    _FINDER.wait_for({name: _without_module(function) for name, function in functions.items()})


def _without_module(function: Callable[[], None]) -> Callable[[ModuleType], None]:
    return lambda module: function()


def lazy(module: str, name: str) -> Callable[..., Any]:
    """A function that imports a function of the package when it is called, and calls it."""

    def call(*args: Any, **kwargs: Any) -> Any:
        return getattr(importlib.import_module(f"{_PACKAGE}.{module}"), name)(*args, **kwargs)

    return call


def _name(functions: Any, module: str, name: str) -> None:
    """Registers a function of the package, unless the package has done so while this module waited."""
    if NAME not in functions:
        functions.register(NAME, lazy(module, name))


def _name_experts(module: Any) -> None:
    _name(module.ALL_EXPERTS_FUNCTIONS, "transformers.modules.experts", "experts_forward")


def _name_mask(module: Any) -> None:
    _name(module.AttentionMaskInterface(), "transformers.attention.attention", "attention_mask")


def _name_attention(module: Any) -> None:
    _name(module.AttentionInterface(), "transformers.attention.attention", "attention")
    _ask_before_loading(module)


def _name_architectures(registry: str, function: str) -> Callable[[Any], None]:
    families = Path(__file__).parent / _PACKAGE / "transformers" / "families"

    def register(module: Any) -> None:
        for architecture, family in GGUF_FAMILIES.items():
            if (families / family).is_dir():
                reader = f"transformers.families.{family}.gguf"
                getattr(module, registry)[architecture] = lazy(reader, function)

    return register


def _ask_before_loading(module: Any) -> None:
    """Lets `from_pretrained` of transformers ask for each checkpoint whether it is ours to read.

    `get_hf_quantizer` is the only call of a model's loading that sees its quantisation before transformers
    refuses one that names no method.
    """
    own = module.get_hf_quantizer

    @functools.wraps(own)
    def get_hf_quantizer(config: Any, asked: Any, *args: Any, gguf_file: Any = None, **kwargs: Any) -> Any:
        kwargs["gguf_file"] = gguf_file
        if f"{_PACKAGE}.transformers" in sys.modules or is_for_us(stored_in(config), asked, gguf_file):
            reads = lazy("transformers.checkpoints.quantizer", "get_hf_quantizer")
            return reads(own, config, asked, *args, **kwargs)
        return own(config, asked, *args, **kwargs)

    module.get_hf_quantizer = get_hf_quantizer


def stored_in(config: Any) -> Any:
    """The quantisation in a model's config, as transformers looks for it."""
    parts = [config, config.get_text_config(decoder=True)] if hasattr(config, "get_text_config") else [config]
    return next(filter(None, (getattr(part, "quantization_config", None) for part in parts)), None)


def is_for_us(stored: Any, asked: Any = None, gguf_file: Any = None) -> bool:
    """True for a checkpoint of this package or of MLX, and for one that transformers would not keep packed.

    Args:
        stored: the quantisation in its config.
        asked: the quantization_config that the user passed. One of transformers' classes leaves the
            checkpoint to transformers.
    """
    if gguf_file is not None:
        return _has_apple_gpu()
    if isinstance(asked, dict) and asked.get("quant_method") == NAME:
        return True
    if asked is not None or not isinstance(stored, dict):
        return False
    method = stored.get("quant_method")
    if method is None:
        return stored.get("library") == _PACKAGE or ("bits" in stored and "group_size" in stored)
    if method in PACKAGES:
        return find_spec(PACKAGES[method]) is None
    # transformers takes a checkpoint of ModelOpt for a dense one.
    return method in (NAME, "modelopt") or (method in _DENSE_ON_MPS and _has_apple_gpu())


def _has_apple_gpu() -> bool:
    torch: Any = sys.modules["torch"]
    return bool(torch.backends.mps.is_available())


# Modules of transformers, and what adds our names once they are imported.
_NAMES: dict[str, Callable[[Any], None]] = {
    "transformers.integrations.gguf.gguf_config_mapping": _name_architectures("GGUF_CONFIG_ARCHS", "config"),
    "transformers.integrations.gguf.gguf_conversion_mapping": _name_architectures(
        "GGUF_ARCHS", "conversions"
    ),
    "transformers.integrations.moe": _name_experts,
    "transformers.masking_utils": _name_mask,
    "transformers.modeling_utils": _name_attention,
}


class _Finder(importlib.abc.MetaPathFinder):
    """Calls functions after the import of modules, when no module of the package is half imported.

    Attributes:
        functions: the function for each module.
        missed: modules whose import began before this finder waited for them. Those in the middle of it, such
            as a module of transformers that imports torch, get their call after the next import.
    """

    def __init__(self) -> None:
        self.functions: dict[str, Callable[[Any], None]] = {}
        self.missed: list[str] = []
        self._due: list[str] = []
        self._importing: list[str] = []
        self._searching: set[str] = set()

    def wait_for(self, functions: Mapping[str, Callable[[Any], None]]) -> None:
        """Calling this again with the same modules, as a reload of the package does, changes nothing."""
        self.missed += [name for name in functions if name in sys.modules and name not in self.functions]
        self.functions = {**functions, **self.functions}
        if self not in sys.meta_path:
            sys.meta_path.insert(0, self)
        self.catch_up()

    def catch_up(self) -> None:
        """Make the calls for the missed modules whose import is complete."""
        complete = self._complete()
        self.missed = [name for name in self.missed if name not in complete]
        self._due += complete
        while self._due and not any(map(_is_own, self._importing)):
            name = self._due.pop(0)
            _call(self.functions[name], sys.modules[name])

    def _complete(self) -> list[str]:
        loaded = (name for name in self.missed if name in sys.modules)
        specs = {name: getattr(sys.modules[name], "__spec__", None) for name in loaded}
        return [name for name, spec in specs.items() if not getattr(spec, "_initializing", False)]

    def find_spec(self, fullname: str, path: Any, target: ModuleType | None = None) -> ModuleSpec | None:
        awaited = fullname in self.functions or _is_own(fullname)
        if fullname in self._searching or not (awaited or self._complete()):
            return None
        self._searching.add(fullname)  # another finder may ask all finders, as this one does
        try:
            others = (
                finder for finder in sys.meta_path if finder is not self and hasattr(finder, "find_spec")
            )
            spec = next(filter(None, (finder.find_spec(fullname, path, target) for finder in others)), None)
        finally:
            self._searching.remove(fullname)
        if spec is not None and spec.loader is not None:
            spec.loader = _Loader(spec.loader, self._around)
        return spec

    @contextlib.contextmanager
    def _around(self, fullname: str) -> Iterator[None]:
        """The import of a module. Behind one that fails, too, the calls that waited for its end are made."""
        self._importing.append(fullname)
        try:
            yield
            if fullname in self.functions:
                self.missed = [name for name in self.missed if name != fullname]  # its first import failed
                self._due.append(fullname)
        finally:
            self._importing.remove(fullname)
            self.catch_up()


class _Loader(importlib.abc.Loader):
    """Another loader, whose work is done inside of the context that `around` makes."""

    def __init__(self, loader: Any, around: Callable[[str], AbstractContextManager[None]]):
        self.loader = loader
        self.around = around

    def __getattr__(self, name: str) -> Any:  # `python -m` asks for the code of a module, and makes none
        return getattr(self.loader, name)

    def create_module(self, spec: ModuleSpec) -> ModuleType | None:
        return self.loader.create_module(spec)

    def exec_module(self, module: ModuleType) -> None:
        module.__loader__ = self.loader
        if module.__spec__ is not None:
            module.__spec__.loader = self.loader
        with self.around(module.__name__):
            self.loader.exec_module(module)


def _is_own(module: str) -> bool:
    return module.partition(".")[0] == _PACKAGE


def _call(function: Callable[[Any], None], module: ModuleType) -> None:
    """Whatever goes wrong must not break the import of another library."""
    try:
        function(module)
    except Exception as error:
        library = module.__name__.partition(".")[0]
        if library == "torch":  # the program imports torch_moe_mps itself
            raise
        version = getattr(sys.modules[library], "__version__", "of unknown version")
        _warn(f"torch_moe_mps: {library} {version} is not supported, its models run their own code ({error})")


def _warn(message: str) -> None:
    warnings.warn(message, stacklevel=2)


_FINDER = _Finder()
