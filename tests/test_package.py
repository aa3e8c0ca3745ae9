"""The package as a whole: what an import costs, and what it provides."""

import pytest
from support.processes import python

import torch_moe_mps

UNKNOWN_TRANSFORMERS = """
import warnings
import torch_moe_mps
with warnings.catch_warnings(record=True) as caught:
    warnings.simplefilter("always")
    from transformers.masking_utils import VALUE
print(VALUE, *(warning.message for warning in caught))
"""


def test_unknown_transformers_can_be_imported(tmp_path):
    """A version that lacks what is registered with runs as if this package were not there, with a warning."""
    module = tmp_path / "transformers"
    module.mkdir()
    (module / "__init__.py").write_text("__version__ = '4.57.1'\n")
    (module / "masking_utils.py").write_text("VALUE = 42\n")
    output = python(UNKNOWN_TRANSFORMERS, paths=(tmp_path,))
    assert output.startswith("42 torch_moe_mps: transformers 4.57.1 is not supported")


def test_import_waits_for_torch_and_transformers():
    """It imports neither. Operators are there once torch is, names once transformers is, and a quantizer once
    a part of ours is used that needs it."""
    code = """
        import sys, warnings
        warnings.filterwarnings("error", message="torch_moe_mps")
        import torch_moe_mps
        print("torch" in sys.modules, *(name for name in sys.modules if name.startswith("torch_moe")))
        import torch
        print(torch.ops.moe_mps.rms_norm, "rms_norm" in torch_moe_mps.ops.OPERATORS)
        print("transformers" in sys.modules)
        from transformers.integrations.moe import ALL_EXPERTS_FUNCTIONS
        print("transformers.quantizers.auto" in sys.modules)
        import torch_moe_mps.transformers.checkpoints.gguf.file
        from transformers.quantizers.auto import AUTO_QUANTIZER_MAPPING
        print(AUTO_QUANTIZER_MAPPING["moe_mps"].__module__)
        from transformers import AttentionInterface, AttentionMaskInterface
        for names in (ALL_EXPERTS_FUNCTIONS, AttentionInterface(), AttentionMaskInterface()):
            print(names["moe_mps"].__module__)  # the function itself, not the one that imports it
    """
    assert python(code).split("\n") == [
        "False torch_moe_mps_autoload torch_moe_mps",
        "moe_mps.rms_norm True",
        "False",
        "False",
        "torch_moe_mps.transformers.checkpoints.quantizer",
        "torch_moe_mps.transformers.modules.experts",
        "torch_moe_mps.transformers.attention.attention",
        "torch_moe_mps.transformers.attention.attention",
    ]


def test_public_names_are_listed_before_their_first_use():
    assert {*torch_moe_mps.__all__} <= {*python("import torch_moe_mps; print(*dir(torch_moe_mps))").split()}


def test_public_names():
    assert all(callable(getattr(torch_moe_mps, name)) for name in set(torch_moe_mps.__all__) - {"ops"})
    with pytest.raises(AttributeError, match="has no attribute 'acelerate'"):
        torch_moe_mps.acelerate  # noqa: B018


@pytest.mark.sweep
def test_copies_that_wait_beside_each_other():
    """Two finders, of a package that is reloaded, and a third, of one that is imported anew."""
    code = """
        import importlib, sys, torch_moe_mps
        importlib.reload(torch_moe_mps)
        for name in [name for name in sys.modules if name.startswith("torch_moe_mps")]:
            del sys.modules[name]
        import torch_moe_mps, torch
        from transformers.integrations.moe import ALL_EXPERTS_FUNCTIONS
        print("moe_mps" in ALL_EXPERTS_FUNCTIONS, torch.ops.moe_mps.rms_norm)
    """
    assert python(code) == "True moe_mps.rms_norm"
