"""The Metal kernels in MLX's wheel (`pip install 'mlx[cpu]'`), as the simulator compiles them."""

import importlib.util
from pathlib import Path

from . import build

KERNELS = "mlx/backend/metal/kernels"
# gemv.h marks values that a simdgroup shares.
PRELUDE = """\
#include <metal_stdlib>
using namespace metal;
template <class T> using uniform = T;
template <class T> constexpr T make_uniform(T x) { return x; }"""


def include_folder() -> Path | None:
    """The include folder of the installed wheel."""
    spec = importlib.util.find_spec("mlx")
    folders = [Path(folder) / "include" for folder in (spec.submodule_search_locations or ())] if spec else []
    return next((folder for folder in folders if has_kernels(folder)), None)


def has_kernels(include: Path) -> bool:
    return (include / KERNELS / "quantized.h").exists()


def changed_headers(root: Path) -> Path:
    """Replacements for headers that need Apple's compiler: builtins, a cast from half to bfloat."""
    texts = {"bf16_math.h": "#pragma once\n", "logging.h": "#pragma once\n"}
    for name in ("fp4.h", "fp8.h"):
        text = (root / KERNELS / name).read_text()
        texts[name] = text.replace(
            "static_cast<bfloat16_t>(this->operator float16_t())",
            "static_cast<bfloat16_t>(static_cast<float>(this->operator float16_t()))",
        )

    def make(target: Path) -> None:
        (target / KERNELS).mkdir(parents=True)
        for name, text in texts.items():
            (target / KERNELS / name).write_text(text)

    return build.build_once(build.cache_directory("mlx") / build.digest(*texts.values()), make)


def source(headers: tuple[str, ...]) -> str:
    return "\n".join([PRELUDE, *(f'#include "{KERNELS}/{header}"' for header in headers)]) + "\n"
