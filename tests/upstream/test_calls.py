"""Calls between the parts of transformers' models: keywords and places that parents use."""

import inspect

import pytest
import torch
import transformers
from support import tiny_models
from transformers import AttentionInterface, AttentionMaskInterface, Cache, PreTrainedModel
from transformers.integrations.moe import ALL_EXPERTS_FUNCTIONS

transformers.logging.set_verbosity_error()

# One of each kind of layer, mask, router and cache.
MODELS = (
    "llama", "gemma4", "qwen3_moe", "gpt_oss", "deepseek_v3", "qwen3_next", "mamba2", "bamba", "minimax",
    "nemotron_h", "kimi_linear", "glm_moe_dsa", "inkling", "recurrent_gemma", "bart", "rwkv",
)  # fmt: skip
CACHE = {"cache", "past_key_values", "cache_params"}  # up to 5.23 the latter two
# Keywords of all modules. A new one is an option that our forwards may have to understand.
KEYWORDS = CACHE | {
    "attention_mask", "cache_length", "conv_mask", "encoder_attention_mask", "encoder_hidden_states",
    "gammas", "hidden_states", "input_ids", "inputs_embeds", "layer_idx", "layer_type", "logits_to_keep",
    "mamba_attention_mask", "original_hidden_states", "output_attentions", "output_hidden_states",
    "output_router_logits", "past_key_values_length", "per_layer_inputs", "ple_input_ids",
    "position_embeddings", "position_ids", "prev_topk_indices", "return_dict", "shared_kv_states", "state",
    "token_type_ids", "transformer_hidden_states", "use_cache",
}  # fmt: skip
OF_ATTENTION = {
    "block_indices", "dropout", "encoder_hidden_states", "indices", "output_router_logits", "position_bias",
    "position_ids", "scaling", "sliding_window", "use_cache", "s_aux", "softcap", "is_causal", *CACHE,
}  # fmt: skip
OF_MASKS = {
    "allow_is_bidirectional_skip", "allow_is_causal_skip", "attention_mask", "batch_size", "config",
    "device", "dtype", "kv_length", "kv_offset", "local_size", "mask_function", "q_length", "q_offset",
    "use_vmap", "cache", "past_key_values",
}  # fmt: skip


def tiny(architecture: str) -> PreTrainedModel:
    if architecture in tiny_models.other_causal():
        return tiny_models.other_model(architecture)
    return tiny_models.tiny_model(architecture)


def tokens(model: PreTrainedModel, **options):
    how = {"max_new_tokens": 2, "min_new_tokens": 2, "do_sample": False, "pad_token_id": 0} | options
    return model.generate(torch.arange(2, 7)[None], **how, return_dict_in_generate=True)


@pytest.fixture
def attention_and_masks(monkeypatch):
    """Calls of the attention "sdpa", and of its mask: (arguments by place, by name)."""
    calls = [], []
    for interface, seen in zip((AttentionInterface, AttentionMaskInterface), calls, strict=True):
        own = interface._global_mapping["sdpa"]

        def noted(*args, own=own, seen=seen, **kwargs):
            seen.append((args, kwargs))
            return own(*args, **kwargs)

        monkeypatch.setitem(interface._global_mapping, "sdpa", noted)
    return calls


@pytest.mark.parametrize("architecture", MODELS)
def test_keywords(architecture, attention_and_masks):
    model, used = tiny(architecture), set()
    for module in model.modules():
        module.register_forward_pre_hook(lambda _, args, kwargs: used.update(kwargs), with_kwargs=True)
    result = tokens(model)
    assert used <= KEYWORDS, used - KEYWORDS
    assert {*result.keys()} <= {"sequences", "cache", "past_key_values"}
    attention, masks = attention_and_masks
    for args, kwargs in attention:
        assert len(args) == 5 and isinstance(args[0], torch.nn.Module) and {*kwargs} <= OF_ATTENTION
        assert all(isinstance(arg, torch.Tensor) and arg.dim() == 4 for arg in args[1:4])
    for args, kwargs in masks:
        assert not args and {*kwargs} <= OF_MASKS


@pytest.mark.parametrize("architecture", MODELS)
def test_a_forward_has_one_argument_for_its_cache(architecture):
    model = tiny(architecture)
    for module in model.modules():
        names = CACHE & inspect.signature(type(module).forward).parameters.keys()
        assert len(names) < 2, type(module)
    assert CACHE & inspect.signature(type(model).forward).parameters.keys() or architecture == "rwkv"


@pytest.mark.parametrize("architecture", [name for name in MODELS if name not in ("rwkv", "mamba2")])
def test_generate_gives_its_cache_back(architecture):
    caches = [value for value in tokens(tiny(architecture)).values() if isinstance(value, Cache)]
    assert len(caches) == 1 and caches[0].layers


@pytest.mark.parametrize("architecture", ["qwen3_moe", "gpt_oss", "deepseek_v3"])
def test_experts_are_called_with_ids_and_weights(architecture):
    seen = []

    def probe(self, hidden_states, top_k_index, top_k_weights):
        seen.append((type(self).__name__, hidden_states.shape, top_k_index.shape, top_k_weights.shape))
        return torch.zeros_like(hidden_states)

    ALL_EXPERTS_FUNCTIONS.register("probe", probe)
    try:
        model = tiny(architecture)
        model.set_experts_implementation("probe")
        assert model.config.get_text_config()._experts_implementation == "probe"
        tokens(model)
    finally:
        del ALL_EXPERTS_FUNCTIONS._global_mapping["probe"]
    assert seen
    for name, hidden, ids, weights in seen:
        assert name.endswith("Experts") and hidden[0] == ids[0] == weights[0] and ids == weights


def test_experts_are_stacks():
    model = tiny("qwen3_moe")
    experts = next(module for module in model.modules() if type(module).__name__.endswith("Experts"))
    config = model.config
    width = config.moe_intermediate_size
    assert experts.gate_up_proj.shape == (config.num_experts, 2 * width, config.hidden_size)
    assert experts.down_proj.shape == (config.num_experts, config.hidden_size, width)
    assert (experts.is_transposed, experts.has_bias, experts.is_concatenated) == (False, False, True)


def test_names_of_implementations_lie_in_the_config():
    model = tiny("qwen3_moe")
    assert model.config._attn_implementation == "sdpa"
    model.config._attn_implementation = "eager"
    assert model.model.layers[0].self_attn.config._attn_implementation == "eager"


def test_logits_of_the_last_token_alone():
    model = tiny("llama")
    with torch.no_grad():
        assert model(input_ids=torch.arange(2, 7)[None], logits_to_keep=1).logits.shape[:2] == (1, 1)
