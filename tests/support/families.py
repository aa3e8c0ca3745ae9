"""What a model of an architecture with experts must do: the accelerated model against its own eager code."""

import copy
from pathlib import Path

import torch
import transformers

import torch_moe_mps
from support import tiny_models
from support.launches import captured_by_type, launches_by_type, model_on_mps
from support.models import NO_GENERATE, assert_close, eager, generate, output, prompt
from support.recognition import by_operators

transformers.logging.set_verbosity_error()

SHORT = {"max_new_tokens": 5}
# What computes their routing is one operator in captured tokens only.
ROUTED_IN_TOKENS = ("gemma4", "diffusion_gemma")


def accelerated(architecture: str):
    """A model that runs its own code, a copy that is accelerated, and the report."""
    own = eager(tiny_models.tiny_model(architecture))
    model = copy.deepcopy(own)
    return own, model, torch_moe_mps.accelerate(model)


def calls_of(model, names: list[str]) -> dict[str, tuple]:
    """The arguments with which the model calls each of its routers."""
    calls = {}

    def record(module, args, kwargs):
        calls[module] = (args, kwargs)

    modules = {name: model.get_submodule(name) for name in names}
    hooks = [module.register_forward_pre_hook(record, with_kwargs=True) for module in modules.values()]
    output(model, prompt(4, 16))
    for hook in hooks:
        hook.remove()
    some = next(iter(calls.values()), None)  # a router for images is not called by a prompt of text
    return {name: calls.get(module, some) for name, module in modules.items()}


def decided(router, args: tuple, kwargs: dict, ids: torch.Tensor) -> torch.Tensor:
    """Tokens whose chosen experts do not change when the hidden states change by 1e-5."""
    hidden, *others = args
    kept = torch.ones(ids.shape[0], dtype=torch.bool)
    for seed in range(4):
        noise = torch.randn(hidden.shape, generator=torch.Generator().manual_seed(seed))
        moved = router(hidden * (1 + 1e-5 * noise), *others, **kwargs)[2]
        kept &= (moved.sort(-1).values == ids.sort(-1).values).all(-1)
    return kept


def check_routers(own, model, report) -> None:
    """The same experts and weights for the same hidden states; near ties are excluded by construction."""
    replaced = [row for row in report.replaced if row.kind == "router"]
    names = [row.name for row in replaced if row.done[0].operator == "moe_router"]
    with torch.no_grad():
        for name, (args, kwargs) in calls_of(own, names).items():
            router = own.get_submodule(name)
            expected = router(*args, **kwargs)
            rows = decided(router, args, kwargs, expected[2])
            ours = model.get_submodule(name)
            logits, weights, ids = by_operators(lambda: ours(*args, **kwargs), "moe_router")[:3]  # noqa: B023
            assert rows.float().mean() > 0.8
            assert torch.equal(logits, expected[0])
            assert (ids.dtype, weights.dtype) == (expected[2].dtype, expected[1].dtype)
            order, own_order = ids.argsort(-1), expected[2].argsort(-1)
            assert torch.equal(ids.gather(1, order)[rows], expected[2].gather(1, own_order)[rows])
            assert_close(weights.gather(1, order)[rows], expected[1].gather(1, own_order)[rows], 1e-6)


# Operators of some calls alone: of few tokens, of more keys than are chosen, or of captured tokens.
IN_SOME_CALLS = {
    "_index_topk",
    "_pool_window_",
    "cached_attention",
    "_heads_mm",
    "_rope_cache_",
    "router_logits",
}
IN_SOME_CALLS |= {"_cached_attention", "_sample_with_flags"}
# {operator: architectures of which a prompt of text runs no layer with it: those of images, or that rotate}
NOT_OF_TEXT = {
    "layer_norm": (
        "deepseek_ocr2",
        "ernie4_5_vl_moe",
        "glm4v_moe",
        "qwen3_vl_moe",
        "step3p7",
        "unlimited_ocr",
    ),
    "rope": ("flint", "glm5_next", "granitemoehybrid"),
}


def output_by_operators(architecture: str, model, report, ids, **options) -> torch.Tensor:
    """The logits of a prompt, in which the operators of the report ran."""
    others = {operator for operator, names in NOT_OF_TEXT.items() if architecture in names}
    operators = report.operators() - IN_SOME_CALLS - others
    return by_operators(lambda: output(model, ids, **options), *operators)


def check_tokens(architecture: str, folder: Path | None = None) -> None:
    """Logits, routers and greedy tokens are those of eager code. With a folder, a checkpoint is loaded."""
    own, model, report = accelerated(architecture)
    if folder is not None:
        own.save_pretrained(folder)
        model = torch_moe_mps.from_pretrained(str(folder), model_class=type(own), dtype=torch.float32).eval()
        report = torch_moe_mps.accelerate(model)
    experts = [row for row in report.rows if row.kind == "experts"]
    assert experts and all(row.replaced_by for row in experts)
    found = output_by_operators(architecture, model, report, prompt())
    assert_close(found, output(own, prompt()), 1e-5)
    check_routers(own, model, report)
    if architecture not in NO_GENERATE:
        assert torch.equal(generate(model, prompt(), **SHORT), generate(own, prompt(), **SHORT))


def errors(result: torch.Tensor, exact: torch.Tensor) -> torch.Tensor:
    """Of each token's logits, relative."""
    difference = (result.float() - exact).norm(dim=-1)
    return (difference / exact.norm(dim=-1)).flatten()


def check_bfloat16(architecture: str) -> None:
    """No farther from float32 than the model's own code is. Near ties between experts fall either way, with
    the whole difference of two experts: the median is what rounding makes."""
    ids, own, ours = prompt(1, 7), [], []
    for seed in range(4):
        model = eager(tiny_models.tiny_model(architecture, torch.bfloat16, seed))
        exact = output(copy.deepcopy(model).float(), ids)
        own.append(errors(output(model, ids), exact))
        report = torch_moe_mps.accelerate(model)
        ours.append(errors(output_by_operators(architecture, model, report, ids), exact))
    assert torch.cat(ours).median() <= 1.1 * torch.cat(own).median()


def check_every_call(architecture: str, tmp_path: Path) -> None:
    """What is replaced, padded batches, a static cache, and a checkpoint that transformers reads."""
    own, model, report = accelerated(architecture)
    kinds = {"experts"} if architecture in ROUTED_IN_TOKENS else {"experts", "router"}
    assert kinds <= {row.kind for row in report.replaced}, str(report)
    assert not any(row.kind in kinds for row in report.left_alone), str(report)
    ids = prompt(3, 11)
    mask = torch.ones_like(ids)
    mask[0, :6] = mask[2, :1] = 0  # padded on the left as for generation
    ids, seen = ids * mask, mask.bool()
    expected = output(own, ids, attention_mask=mask)
    found = output_by_operators(architecture, model, report, ids, attention_mask=mask)
    assert_close(found[seen], expected[seen], 1e-5)
    for options in (SHORT, {"cache_implementation": "static", "disable_compile": True, **SHORT}):
        tokens = [generate(each, ids, attention_mask=mask, **options) for each in (model, own)]
        assert torch.equal(*tokens)
    model.save_pretrained(tmp_path)
    for implementation, tolerance in (("eager", 0.0), ("moe_mps", 1e-5)):
        loaded = type(model).from_pretrained(tmp_path, experts_implementation=implementation).eval()
        ran = [] if implementation == "eager" else ["_moe_experts"]
        run = lambda loaded=loaded: output(loaded, prompt())  # noqa: E731
        assert_close(by_operators(run, *ran) if ran else run(), output(own, prompt()), tolerance)


def check_launches(
    simulated,
    architecture: str,
    of_captured: dict[str, int] | None,
    of_modules: dict[str, int] | None = None,
) -> None:
    """At most so many launches of each type of layer for a token, captured and module by module.

    With the first layer count the tables of angles, 3 launches, which others share.
    """
    model = model_on_mps(architecture)
    torch_moe_mps.accelerate(model, bits=4, group_size=32)
    if of_modules is not None:
        check_types(launches_by_type(simulated, model), of_modules)
    if of_captured is None:  # no token is captured without some of the layers
        return
    found = captured_by_type(simulated, model)
    check_types(found if "outside" in of_captured else of_layers(found), of_captured)
    assert found["outside"]["embedding_rows_affine4_32_bf16"] == 1


def check_types(found: dict, most: dict[str, int]) -> None:
    assert found.keys() == most.keys()
    for kind, layer in found.items():
        assert sum(layer.values()) <= most[kind], (kind, dict(layer))


def of_layers(found: dict) -> dict:
    return {kind: layer for kind, layer in found.items() if kind != "outside"}
