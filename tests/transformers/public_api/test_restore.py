"""`restore` leaves nothing: other libraries are as they were once the models of this package are gone."""

import subprocess
import sys

import pytest
from support import tiny_models

from torch_moe_mps.models.upstream.reach import ROWS

PROGRAM = """
import gc, sys, types, warnings
warnings.simplefilter("ignore")
import accelerate, peft, torch, transformers

FOLDER, *NAMES = sys.argv[1:]
prompt = torch.arange(1, 9).reshape(2, 4)
LIBRARIES = ("transformers", "peft", "accelerate", "torch", "trl")
OWN = {  # counters and caches of torch
    "torch._subclasses.meta_utils.DESCRIBER_NEXT_ID",
    "torch.autograd.profiler._cupti_monitor_checked",
    "torch.autograd.profiler._cupti_monitor_module",
    "torch.nn.utils.parametrize._cache",
    "torch.utils.hooks.RemovableHandle.next_id",
}


def attributes():
    # (module, class or "", name) -> the object, of all modules that are loaded
    found = {}
    for module_name, module in [*sys.modules.items()]:
        if module_name.partition(".")[0] not in LIBRARIES or not isinstance(module, types.ModuleType):
            continue
        for name, value in [*vars(module).items()]:
            found[module_name, "", name] = value
            if isinstance(value, type) and value.__module__ == module_name:
                for member, held in [*vars(value).items()]:
                    found[module_name, name, member] = held
            if isinstance(value, type) and isinstance(vars(value).get("_global_mapping"), dict):
                mapping = value._global_mapping.items()
                found.update(((module_name, name + "._global_mapping", key), held) for key, held in mapping)
    return found


def changed(before, after):
    differ = [where for where, value in before.items() if after.get(where, before) is not value]
    return sorted({".".join(filter(None, where)) for where in differ} - OWN)


def dense(name):
    config = transformers.AutoConfig.from_pretrained(f"{FOLDER}/{name}")
    return getattr(transformers, config.architectures[0]).from_pretrained(f"{FOLDER}/{name}").eval()


def uses(model):
    torch_moe_mps.accelerate(model, 4, 32, linear_bits=4)
    model.save_pretrained(f"{FOLDER}/saved")
    model.generate(prompt, max_new_tokens=4, do_sample=True, top_k=5, pad_token_id=0)
    config = peft.LoraConfig(r=2, target_modules="all-linear", task_type="CAUSAL_LM", use_rslora=True)
    adapted = peft.get_peft_model(model, config).train()
    steps = torch.optim.SGD([p for p in adapted.parameters() if p.requires_grad], 0.1)
    adapted(input_ids=prompt, labels=prompt).loss.backward()
    steps.step()
    return adapted


# Everything is loaded and used once by the libraries themselves.
for name in NAMES:
    model = dense(name)
    model.generate(prompt, max_new_tokens=2, do_sample=True, top_k=5, pad_token_id=0)
    config = peft.LoraConfig(r=2, target_modules="all-linear", task_type="CAUSAL_LM")
    adapted = peft.get_peft_model(model, config)
    adapted(input_ids=prompt, labels=prompt).loss.backward()
    torch.optim.SGD([p for p in adapted.parameters() if p.requires_grad], 0.1).step()
del model, adapted
gc.collect()
before = attributes()
import torch_moe_mps

import torch_moe_mps.transformers

print("import:", *changed(before, attributes()))
adapted = [uses(dense(name)) for name in NAMES]
print("used:", *changed(before, attributes()))
for model in adapted:
    torch_moe_mps.restore(model)
gc.collect()
print("restored:", *changed(before, attributes()))
del model, adapted
gc.collect()
print("after:", *changed(before, attributes()))
"""
LIBRARIES = ("transformers", "peft")
NAMES = ("qwen3_moe", "gpt_oss", "deepseek_v3", "glm5_next")


@pytest.mark.slow("a process that uses four models with and without this package")
def test_other_libraries_are_as_before(tmp_path):
    with tiny_models.groups_of_32():
        for name in NAMES:
            tiny_models.tiny_model(name).save_pretrained(tmp_path / name)
    command = [sys.executable, "-c", PROGRAM, str(tmp_path), *NAMES]
    result = subprocess.run(command, capture_output=True, text=True, check=True)
    lines = [line.split(":") for line in result.stdout.splitlines()[-4:]]  # after what imports print
    found = {
        where: {each.replace("._global_mapping", "") for each in names.split()} for where, names in lines
    }
    rows = {library: {".".join(row.what) for row in ROWS if row.library == library} for library in LIBRARIES}
    assert len(ROWS) <= 6
    assert not found.pop("import")
    assert found.pop("used") <= set().union(*rows.values())
    assert found.pop("restored") <= rows["peft"]  # weights are packed still
    assert not found.pop("after") and not found
