"""The package as a whole: what an import costs, and what it provides."""

import pytest
from support.processes import python

import torch_moe_mps


def test_what_an_import_registers():
    """Operators alone; with our part for transformers, implementations and a quantizer in its registries."""
    code = """
        import sys, warnings
        warnings.filterwarnings("error", message="torch_moe_mps")
        import torch_moe_mps
        print([name for name in ("transformers", "safetensors", "accelerate") if name in sys.modules])
        print(sys.modules["torch"].ops.moe_mps.rms_norm, "rms_norm" in torch_moe_mps.ops.OPERATORS)
        import torch_moe_mps.transformers
        from transformers import AttentionInterface, AttentionMaskInterface
        from transformers.integrations.moe import ALL_EXPERTS_FUNCTIONS
        from transformers.quantizers.auto import AUTO_QUANTIZATION_CONFIG_MAPPING, AUTO_QUANTIZER_MAPPING
        own = (AUTO_QUANTIZER_MAPPING, AUTO_QUANTIZATION_CONFIG_MAPPING, ALL_EXPERTS_FUNCTIONS)
        for names in (*own, AttentionInterface(), AttentionMaskInterface()):
            print(names["moe_mps"].__module__)
    """
    assert python(code).split("\n") == [
        "[]",
        "moe_mps.rms_norm True",
        "torch_moe_mps.checkpoints.quantizer",
        "torch_moe_mps.checkpoints.own.config",
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
