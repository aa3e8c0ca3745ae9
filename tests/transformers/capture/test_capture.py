"""A token as one call: the same bits as without, whatever happens to the model between two tokens."""

import contextlib
import copy
import functools
import gc
import itertools
import pickle
import sys
import warnings
import weakref
from collections import OrderedDict
from types import SimpleNamespace

import pytest
import torch
from support import tiny_models
from support.models import Conversation, assert_close, eager, generate, output, prompt, tiny
from support.sweep import in_sweep, rows_in_sweep
from support.threads import in_threads
from torch import nn
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode
from transformers import AttentionInterface, DynamicCache, masking_utils, modeling_utils
from transformers.cache_utils import DynamicLayer
from transformers.integrations import sdpa_attention
from transformers.utils import output_capturing

import torch_moe_mps
from torch_moe_mps import _environment
from torch_moe_mps.ops import _registry
from torch_moe_mps.ops.attention import bits_as_bool
from torch_moe_mps.transformers.attention.attention import NAME
from torch_moe_mps.transformers.basics import tensors
from torch_moe_mps.transformers.basics.state import state_in
from torch_moe_mps.transformers.caches.prompt_cache import new_cache
from torch_moe_mps.transformers.caches.quantized_states import QuantizedStates
from torch_moe_mps.transformers.capture import policy, record, surroundings
from torch_moe_mps.transformers.capture import fingerprint as fingerprints
from torch_moe_mps.transformers.capture.replay import Captures
from torch_moe_mps.transformers.capture.classes import captures_of
from torch_moe_mps.transformers.capture.fingerprint import Fingerprint
from torch_moe_mps.transformers.capture.match import Match
from torch_moe_mps.transformers.graphs import passes, tracing
from torch_moe_mps.transformers.graphs.tracing import Recorder
from torch_moe_mps.transformers.upstream.calls import cache_among, cache_argument

PROMPT = 9


pytestmark = pytest.mark.usefixtures("captured")


@pytest.fixture
def same_bits(monkeypatch):
    """Without the passes, which join roundings: what was recorded is what runs."""
    monkeypatch.setattr(passes, "PASSES", ())


def accelerated(architecture: str, device: str, dtype=torch.float32, sizes=(), **options) -> nn.Module:
    with tiny_models.groups_of_32():
        model = eager(tiny_models.tiny_model(architecture, dtype, **dict(sizes))).to(device)
    torch_moe_mps.accelerate(model, **options)
    return model


def without_capture(model: nn.Module) -> nn.Module:
    for module in model.modules():
        state_in(module).captures = None
    return model


def pair(*arguments, **options) -> tuple[nn.Module, nn.Module]:
    """An accelerated model, and a copy of it whose tokens are not captured."""
    model = accelerated(*arguments, **options)
    return model, without_capture(copy.deepcopy(model))


def assert_equal(results: list[torch.Tensor], expected: list[torch.Tensor]) -> None:
    assert [torch.equal(a, b) for a, b in zip(results, expected, strict=True)] == [True] * len(expected)


# One classifies tokens without a cache.
ARCHITECTURES = sorted(
    {*tiny_models.architectures(), *tiny_models.DENSE_ARCHITECTURES} - {"openai_privacy_filter"}
)
QUANTISED_SIZES = {"q_lora_rank": 32, "kv_lora_rank": 32, "shared_expert_intermediate_size": 64}
# Their indexers make masks for torch's attention; a batch with padding runs module by module.
OWN_MASKS = {"glm5_next", "minimax_m3_vl", "qwen4_exp"}
ONE_BY_ONE = {0: set(), 4: {"deepseek_v4", "unlimited_ocr", *OWN_MASKS}}  # by padding


def answer(model: nn.Module, device: str, padding: int = 0) -> list[torch.Tensor]:
    """The logits of six tokens behind a prompt, or behind two, of which the second is padded on its left."""
    batch = 2 if padding else 1
    shown = torch.ones(batch, PROMPT + 6, dtype=torch.int64, device=device)
    shown[1:, :padding] = 0

    def call(ids, end, cache=None):
        mask = {"attention_mask": shown[:, :end]} if padding else {}
        return model(ids, **mask, **cache_argument(model, cache))

    ids = prompt(batch, PROMPT).to(device)
    cache = cache_among(call(ids, PROMPT, new_cache(model)))
    tokens = torch.arange(3, 3 + 6 * batch, device=device).view(6, batch, 1)
    return [call(each, PROMPT + n, cache)[0].cpu() for n, each in enumerate(tokens, 1)]


@pytest.mark.sweep
@pytest.mark.parametrize("architecture", [*filter("inkling2".__ne__, ARCHITECTURES)])
@pytest.mark.parametrize("device", ["mps"], indirect=True)
@torch.no_grad()
def test_every_architecture(architecture, device, same_bits):
    """Without Inkling 2, which needs a router in float32 beside layers in bfloat16."""
    with tiny_models.sizes(**QUANTISED_SIZES):
        model, own = pair(architecture, device, torch.bfloat16, bits=4, group_size=32)
    captures_of(model)._user_code = False  # all that runs is a library's
    assert_equal(answer(model, device), answer(own, device))
    captures = captures_of(model)
    assert captures.programs, str(captures)


@pytest.mark.sweep
@pytest.mark.parametrize(("padding", "bits"), [(0, 4), (4, None)])
@pytest.mark.parametrize("architecture", ARCHITECTURES)
@torch.no_grad()
def test_passes_on_every_architecture(architecture, padding, bits):
    """As close to the model's own code as roundings allow; in 4 bit, to what runs module by module."""
    with tiny_models.sizes(**QUANTISED_SIZES):
        model = accelerated(architecture, "cpu", bits=bits, group_size=32 if bits else None)
        own = tiny(architecture) if bits is None else without_capture(copy.deepcopy(model))
    for each in (model, own) if bits else (model,):
        if architecture not in OWN_MASKS:
            each.set_attn_implementation(NAME)  # on a CPU, too
    assert_close(answer(model, "cpu", padding), answer(own, "cpu", padding), 2e-5)
    if architecture not in ONE_BY_ONE[padding]:
        assert captures_of(model).reason is None, captures_of(model).reason


# Architectures whose cache has rows that stand for several tokens, the programs for tokens behind the prompt,
# and the token from which on all run as one. Where the model's own code makes a row, the token that completes
# it is of another kind, and the third of them is captured.
KINDS_OF_TOKENS = {"deepseek_v4": (1, 2), "minimax_m3_vl": (1, 2), "glm5_next": (2, 15), "qwen4_exp": (2, 7)}


@pytest.mark.parametrize("architecture", in_sweep(KINDS_OF_TOKENS, ("deepseek_v4",)))
@torch.no_grad()
@pytest.mark.on("cpu")
def test_tokens_that_choose_from_rows_for_several(device, architecture, same_bits):
    rates = dict.fromkeys(("index_kpool", "indexer_compress_ratio", "index_block_size"), 4)
    chosen = {"index_topk": 8, "indexer_budget": 8, "index_topk_blocks": 2}
    if architecture == "deepseek_v4":  # whose rates are 2 and 3
        rates, chosen = {}, {"index_topk": 3}
    with tiny_models.sizes(**rates, **chosen, index_head_dim=16):
        model, own = pair(architecture, device, torch.bfloat16)
    captures = captures_of(model)
    ids, mine, theirs, by_modules = prompt(1, PROMPT).to(device), [], [], []
    cache, other = (
        cache_among(each(ids, **cache_argument(each, DynamicCache(config=each.config))))
        for each in (model, own)
    )
    programs, first = KINDS_OF_TOKENS[architecture]
    for number, token in enumerate(torch.arange(first + 8, device=device).view(-1, 1, 1)):
        captures.reason = "none ran"
        mine.append(model(token, **cache_argument(model, cache))[0].cpu())
        theirs.append(own(token, **cache_argument(own, other))[0].cpu())
        if captures.reason is not None:
            by_modules.append(number)
    assert_equal(mine, theirs)
    assert len(captures.programs) == programs
    assert by_modules[-1] == first - 1


@torch.no_grad()
def test_a_program_runs_as_long_as_an_indexer_may_choose_all_keys(monkeypatch):
    """Masks of indexers are cut out of the causal mask, of as many keys as there are."""
    monkeypatch.setattr(tensors, "_constants", {})
    model = accelerated("axk2", "cpu")
    Conversation(model, length=3).tokens(20)
    captures = captures_of(model)
    assert len(captures.programs) == 1 and captures.reason is None


@pytest.mark.slow("a conversation on the simulated GPU, twice")
@torch.no_grad()
def test_a_captured_token_has_the_same_bits(device, same_bits):
    model, own = pair("qwen3_moe", device)
    mine, theirs = Conversation(model), Conversation(own)
    captures = captures_of(model)
    assert_equal(mine.tokens(2), theirs.tokens(2))
    assert not captures.programs and "three times" in str(captures)
    assert_equal(mine.tokens(1), theirs.tokens(1))
    (program,) = captures.programs
    assert captures.reason is None and "one call" in str(captures)
    assert_equal(mine.tokens(12), theirs.tokens(12))
    assert mine.cache.get_seq_length() == theirs.cache.get_seq_length() == PROMPT + 15
    for layer, other in zip(mine.cache.layers, theirs.cache.layers, strict=True):
        assert torch.equal(layer.keys, other.keys) and torch.equal(layer.values, other.values)
    # A new conversation goes on with it; on the CPU, which is faster at a prompt, one whose memory is full.
    length = 262 if device == "cpu" else PROMPT
    mine, theirs = Conversation(model, length=length), Conversation(own, length=length)
    assert_equal(mine.tokens(8), theirs.tokens(8))
    assert captures.programs == [program]


@torch.no_grad()
def test_a_captured_token_is_checked_once(simulated, monkeypatch):
    """The sizes that grow with the context are symbols of the recording, which has checked them."""
    model = accelerated("qwen3_moe", "mps")
    conversation = Conversation(model)
    conversation.tokens(3)
    (program,) = captures_of(model).programs
    checked = []
    monkeypatch.setattr(_registry, "before_first_call", lambda name, given: checked.append(name))
    conversation.tokens(5)
    assert checked == [] and captures_of(model).programs == [program]
    torch.ops.moe_mps._forget_signatures()
    conversation.tokens(1)
    assert "_rope_attention_" in checked


ON_BOTH = ("qwen3_moe", "qwen3_next", "gemma4")
ON_THE_CPU = ("mixtral", "gpt_oss", "glm4_moe", "deepseek_v3", "deepseek_v2")


def tokens_behind_passes(architecture, device, batch):
    """As close to those of the model's own code, with the values of 4 bits, as roundings allow."""
    with tiny_models.sizes(linear_num_value_heads=16, **QUANTISED_SIZES):
        model, own = accelerated(architecture, device, bits=4, group_size=32), tiny(architecture)
    tiny_models.dense_twin(own, copy.deepcopy(model).cpu())
    mine, theirs = Conversation(model, batch=batch), Conversation(own, batch=batch)
    assert_close(mine.tokens(5), theirs.tokens(5), 2e-5)
    assert captures_of(model).programs


@torch.no_grad()
@pytest.mark.on("cpu")
@pytest.mark.parametrize("architecture", in_sweep(ON_BOTH, ("qwen3_next",)))
def test_tokens_behind_passes(architecture, device):
    tokens_behind_passes(architecture, device, 1)


@torch.no_grad()
@pytest.mark.parametrize(
    ("architecture", "batch"), rows_in_sweep(itertools.product(ON_THE_CPU, (2, 1)), [("deepseek_v3", 2)])
)
def test_tokens_behind_passes_of_more(architecture, batch):
    tokens_behind_passes(architecture, "cpu", batch)


@torch.no_grad()
@pytest.mark.on("cpu")
def test_several_tokens(device, same_bits):
    model, own = pair("gpt_oss", device)
    caches = [DynamicCache(config=model.config) for _ in range(2)]
    ids = prompt(1, PROMPT + 6 * 3).to(device)
    for part in ids.split([PROMPT, *[3] * 6], 1):
        results = [
            output(m, part, **cache_argument(m, c), use_cache=True)
            for m, c in zip((model, own), caches, strict=True)
        ]
        assert torch.equal(*results)
    assert captures_of(model).programs


def test_symbols_end_with_their_recording(monkeypatch):
    """Of what is traced and captured, no ShapeEnv stays: a server would add one with each kind of call."""
    alive = weakref.WeakSet()

    class Symbols(tracing._Symbols):
        def __init__(self, **options):
            super().__init__(**options)
            made.append(None)
            alive.add(self)

    made = []
    monkeypatch.setattr(tracing, "_Symbols", Symbols)
    model = accelerated("llama", "cpu")
    with torch.no_grad():
        answer(model, "cpu")
    programs = len(captures_of(model).programs)
    gc.collect()
    assert 0 < programs <= len(made) and not alive
    torch_moe_mps.restore(model)
    assert not alive


@torch.no_grad()
def test_kinds_behind_each_other():
    """A batch of one row has a program of its own, larger ones share one."""
    model, own = pair("qwen3_moe", "cpu")
    captures, programs = captures_of(model), []
    for batch in (1, 2, 3, 5, 1):
        mine, theirs = Conversation(model, batch=batch), Conversation(own, batch=batch)
        assert_equal(mine.tokens(4), theirs.tokens(4))
        assert captures.reason is None
        programs.append(captures.programs[0].match)
    assert len(captures.programs) == 2
    assert programs[3] is programs[2] is programs[1] and programs[4] is programs[0]


@torch.no_grad()
def test_masks_of_padding():
    """Key ranges are read anew for each token; what is no range runs too."""
    model, own = pair("gpt_oss", "cpu")
    caches = [DynamicCache(config=model.config) for _ in range(2)]
    ids, shown = prompt(2, 60), torch.ones(2, 60, dtype=torch.int64)

    def tokens(begin, end, hidden=()):
        mask = shown.clone()
        for row, key in hidden:
            mask[row, key] = 0
        for first, stop in zip(range(begin, end), range(begin + 1, end + 1), strict=True):
            part = slice(0 if first == 30 else first, stop)
            results = [
                output(each, ids[:, part], attention_mask=mask[:, :stop], **cache_argument(each, cache))
                for each, cache in zip((model, own), caches, strict=True)
            ]
            assert torch.equal(*results)

    left = [(1, key) for key in range(4)]
    tokens(30, 36, left)
    captures = captures_of(model)
    (program,) = captures.programs
    tokens(36, 40, [(0, 0), (0, 1)])
    assert captures.programs == [program]
    tokens(40, 44)
    count = len(captures.programs[0].operators)
    assert len(captures.programs) == 2 and abs(count - len(program.operators)) <= 4
    tokens(44, 48, [(0, 10), (1, 20)])
    assert len(captures.programs) == 3
    tokens(48, 60, left)
    assert captures.programs[0].operators == program.operators


# Architectures with own code for a padded batch -> why its tokens are not captured; None where they are.
PADDED = {
    "deepseek_v4": "the call takes attributes from a layer of its cache",
    "minimax_m3_vl": None,
    "unlimited_ocr": None,
    "glm5_next": "it asks for values that only the GPU knows (aten.nonzero.default)",
    "qwen4_exp": "it asks for values that only the GPU knows (aten.nonzero.default)",
}


@torch.no_grad()
@pytest.mark.parametrize("architecture", in_sweep(PADDED, ["minimax_m3_vl"]))
def test_own_code_for_padded_batches(architecture, same_bits, caplog, recwarn):
    model = accelerated(architecture, "cpu")
    ids, shown = prompt(2, 24), torch.ones(2, 24, dtype=torch.int64)
    shown[1, :3] = 0
    results = []
    for each in (model, without_capture(copy.deepcopy(model))):
        cache = DynamicCache(config=model.config)
        parts = [slice(0, 9), *(slice(n, n + 1) for n in range(9, 24))]
        given = [(ids[:, part], shown[:, : part.stop].contiguous()) for part in parts]
        results.append([output(each, i, attention_mask=m, **cache_argument(each, cache)) for i, m in given])
    assert_equal(*results)
    reason = PADDED[architecture]
    assert captures_of(model).reason == reason
    said = [text for text in map(str, (warning.message for warning in recwarn)) if "be captured" in text]
    assert len(said) == (reason is not None) and all(text.endswith(f": {reason}") for text in said)
    assert not [record for record in caplog.records if record.levelname == "ERROR"]  # torch's own


def test_a_model_that_keeps_its_states_runs_module_by_module_and_says_where(simulated):
    """RecurrentGemma has them in attributes; a recording that failed leaves them as they were."""
    model = tiny_models.other_model("recurrent_gemma")
    expected = generate(model, prompt(1))
    torch_moe_mps.accelerate(model)
    assert torch.equal(generate(model, prompt(1)), expected)
    assert captures_of(model).reason == "a call changes model.layers.0.temporal_block.conv1d_state"


# What may change between two tokens; test_changes.py has what comes of it


def norm(model):
    return model.model.layers[0].post_attention_layernorm


def double(module, args, result=None):
    return None if result is None else 2 * result


class Slotted:
    __slots__ = ("number", "numbers")

    def __init__(self) -> None:
        self.number, self.numbers = 1, {"a": 1}


def counter():
    count = 0

    def reads():
        return count

    return reads


def file_of(model):
    return sys.modules[type(model).__module__]


def adds(numbers):
    """To a list or a set. Returns: what undoes it."""
    (numbers.append if isinstance(numbers, list) else numbers.add)(3)
    return lambda: numbers.remove(3)


def has(name, value):
    """What is done before the fingerprint is made: the norm gets an attribute."""
    return lambda model: setattr(norm(model), name, value)


def file_has(name, value):
    return lambda model: setattr(file_of(model), name, value)


def sets(of, name, value, **options):
    """A change, of an attribute of what `of` finds in a model."""
    return lambda model, patch: patch.setattr(of(model), name, value, **options)


def puts(of, key, value):
    """A change, of an item."""
    return lambda model, patch: patch.setitem(of(model), key, value)


def of_functions(interface):
    return lambda model: interface._local_mapping


# name: (what is done before the fingerprint is made, the change)
WATCHED = {
    "attribute": (None, sets(norm, "variance_epsilon", 2.0)),
    "kind of a number": (has("factor", 1), sets(norm, "factor", 1.0)),
    "attribute with another name": (
        has("named", SimpleNamespace(one=1)),
        lambda m, p: (p.delattr(norm(m).named, "one"), p.setattr(norm(m).named, "two", 1, raising=False)),
    ),
    "parameter": (None, puts(lambda m: norm(m)._parameters, "weight", None)),
    "tensor of one element in another dictionary": (
        has("ordered", OrderedDict(one=torch.ones(1))),
        puts(lambda m: norm(m).ordered, "one", torch.ones(1)),
    ),
    "tensor of one element": (
        lambda m: norm(m).register_buffer("one", torch.ones(1)),
        puts(lambda m: norm(m)._buffers, "one", torch.ones(1)),
    ),
    "module": (None, puts(lambda m: m.model._modules, "norm", nn.Identity())),
    "attribute of the config": (None, sets(lambda m: m.config, "num_experts_per_tok", 3)),
    "hook": (None, puts(lambda m: norm(m)._forward_hooks, 0, double)),
    "hook before": (None, puts(lambda m: norm(m)._forward_pre_hooks, 0, double)),
    "state of the package": (None, sets(lambda m: fingerprints, "_changes", -1)),
    "class of a module": (
        None,
        lambda m, p: p.setattr(norm(m), "__class__", type("Other", (type(norm(m)),), {})),
    ),
    "interface": (None, puts(lambda m: AttentionInterface._global_mapping, "sdpa", double)),
    "interface of one file": (
        None,
        puts(of_functions(modeling_utils.ALL_ATTENTION_FUNCTIONS), "sdpa", double),
    ),
    "masks": (None, puts(of_functions(masking_utils.ALL_MASK_ATTENTION_FUNCTIONS), "sdpa", double)),
    "name in the file": (None, sets(file_of, "apply_rotary_pos_emb", double)),
    "numbers in the file": (
        file_has("_numbers", {"scale": 1}),
        puts(lambda m: file_of(m)._numbers, "scale", 2),
    ),
    "list in the file": (file_has("_list", [1, 2]), lambda m, p: adds(file_of(m)._list)),
    "set in the file": (file_has("_set", {1}), lambda m, p: adds(file_of(m)._set)),
    "set of a module": (has("set", {1}), lambda m, p: adds(norm(m).set)),
    "order of a dictionary": (has("two", {"a": 1, "b": 1}), sets(norm, "two", {"b": 1, "a": 1})),
    "name in the file of a helper": (None, sets(lambda m: sdpa_attention, "repeat_kv", double)),
    "torch's functions": (None, sets(lambda m: nn.functional, "scaled_dot_product_attention", double)),
    "method of a cache": (None, sets(lambda m: DynamicCache, "get_seq_length", double)),
    "method of a cache's layer": (None, sets(lambda m: DynamicLayer, "get_mask_sizes", double)),
    "class of the config": (None, sets(lambda m: type(m.config), "scale", 2, raising=False)),
    "list of the config": (
        lambda m: setattr(m.config, "numbers", [{"a": 1}, 2]),
        puts(lambda m: m.config.numbers[0], "a", 2),
    ),
    "slot of an object": (has("slotted", Slotted()), sets(lambda m: norm(m).slotted, "number", 2)),
    "dictionary in a slot": (has("held", Slotted()), puts(lambda m: norm(m).held.numbers, "a", 2)),
    "arguments of a partial": (
        has("partial", functools.partial(double, args=1)),
        puts(lambda m: norm(m).partial.keywords, "args", 2),
    ),
    "what a function has closed over": (
        has("reads", counter()),
        sets(lambda m: norm(m).reads.__closure__[0], "cell_contents", 2),
    ),
    "hook of a module that is not registered": (
        lambda m: norm(m).__dict__.update(hidden=[nn.Identity()]),
        puts(lambda m: norm(m).hidden[0]._forward_hooks, 0, double),
    ),
}


@torch.no_grad()
def test_what_the_fingerprint_holds(monkeypatch):
    model = accelerated("qwen3_moe", "cpu")
    for _, (prepare, _) in WATCHED.items():
        if prepare is not None:
            prepare(model)
    fingerprint = Fingerprint(model)
    found = {}
    for what, (_, change) in WATCHED.items():
        with monkeypatch.context() as patch:
            undo = change(model, patch)
            found[what] = fingerprint.holds()
            if callable(undo):
                undo()
        assert fingerprint.holds(), what
    torch.set_default_dtype(torch.float64)
    try:
        found["default dtype"] = fingerprint.holds()
    finally:
        torch.set_default_dtype(torch.float32)
    assert [what for what, holds in found.items() if holds] == []
    norm(model).variance_epsilon = float(repr(norm(model).variance_epsilon))  # another object
    assert fingerprint.holds()


@torch.no_grad()
def test_what_python_notes_at_first_is_no_change():
    """In a class that is copied and in a file that warns; and what transformers notes of another model."""
    model = accelerated("qwen3_moe", "cpu")
    cls, file = type(model.config), file_of(model)
    if "__slotnames__" in vars(cls):
        del cls.__slotnames__
    vars(file).pop("__warningregistry__", None)
    fingerprint = Fingerprint(model)
    copy.copy(model.config)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        exec("__import__('warnings').warn('a first one')", vars(file))
    assert fingerprint.holds()
    output_capturing._CAN_RECORD_REGISTRY[nn.Linear(1, 1)] = {}
    try:
        assert fingerprint.holds()
    finally:
        output_capturing._CAN_RECORD_REGISTRY.pop(str(nn.Linear))


@torch.no_grad()
def test_a_key_that_cannot_be_compared():
    """As torch's DispatchKey with any string, from torch 2.15 on."""

    class Key:
        __hash__ = object.__hash__

        def __eq__(self, other):
            raise RuntimeError("could not parse dispatch key")

    model = accelerated("qwen3_moe", "cpu")
    model.model.held = {Key(): [1]}
    fingerprint = Fingerprint(model)
    assert fingerprint.holds()
    next(iter(model.model.held.values())).append(2)
    assert not fingerprint.holds() and fingerprint.changed().startswith("model.held[")


@torch.no_grad()
def test_the_end_of_a_class_is_no_change():
    """The garbage collector may come in the middle of a call."""
    model = accelerated("qwen3_moe", "cpu")

    class Unused(DynamicCache):
        pass

    fingerprint = Fingerprint(model)
    del Unused
    gc.collect()
    assert fingerprint.holds()


@torch.no_grad()
def test_a_patched_model_class_and_a_shallow_copy():
    model = accelerated("qwen3_moe", "cpu")
    talk = Conversation(model)
    talk.tokens(4)
    assert captures_of(model).programs
    cls = tiny_models.model_class("qwen3_moe")
    forward = cls.forward
    try:
        cls.forward = lambda self, *args, **kwargs: forward(self, *args, **kwargs) | {"logits": None}
        assert model(talk.token, **cache_argument(model, talk.cache))["logits"] is None
    finally:
        cls.forward = forward
    talk.tokens(4)
    assert captures_of(model).programs
    other = copy.copy(model)  # with the same modules, and attributes of its own
    other.lm_head_of_both = None
    other._modules = other._modules | {"lm_head": copy.deepcopy(model.lm_head)}
    other.lm_head.weight.mul_(2)
    mine, theirs = Conversation(model, copy.deepcopy(talk.cache)), Conversation(other, talk.cache)
    mine.token = theirs.token = talk.token
    for _ in range(4):
        (one,), (two,) = mine.tokens(1), theirs.tokens(1)
        assert torch.equal(2 * one, two)


class Forgets(DynamicCache):
    """Shows only the newest tokens."""

    def update(self, *args, **kwargs):
        keys, values = super().update(*args, **kwargs)
        return keys[:, :, -4:], values[:, :, -4:]


def of_class(cache, cls):
    cache.__class__ = cls
    return cache


def with_new_keys(cache):
    cache.layers[1].keys = cache.layers[1].keys.flip(2)
    return cache


def with_written_keys(cache):
    cache.layers[1].keys.mul_(2)
    return cache


def by(method, *arguments):
    def change(cache):
        getattr(cache, method)(*arguments)
        return cache

    return change


# Of the cache, between two tokens.
CACHE_CHANGES = {
    "cropped": by("crop", -3),
    "reordered": by("reorder_cache", torch.tensor([1, 0])),
    "repeated": by("batch_repeat_interleave", 2),
    "chosen": by("batch_select_indices", torch.tensor([1, 1])),
    "copied": copy.deepcopy,
    "pickled": lambda cache: pickle.loads(pickle.dumps(cache)),
    "keys replaced": with_new_keys,
    "keys written": with_written_keys,
    "another class": lambda cache: of_class(cache, Forgets),
}


@pytest.mark.filterwarnings("error:torch_moe_mps")
@torch.no_grad()
def test_changes_of_the_cache():
    """One program for all of them, one after the other."""
    model, own = pair("qwen3_moe", "cpu")
    talks = [Conversation(each, batch=2) for each in (model, own)]
    assert_equal(*(talk.tokens(4) for talk in talks))
    for change in CACHE_CHANGES.values():
        for talk in talks:
            talk.cache = change(talk.cache)
            rows = talk.cache.layers[0].keys.shape[0]
            talk.token = talk.token[torch.arange(rows) % talk.token.shape[0]]
        assert_equal(*(talk.tokens(2) for talk in talks))
    assert captures_of(model).programs


@torch.no_grad()
def test_memory_that_is_not_shared_any_more():
    """Of latents and what turns beside them, once one of them is another conversation's."""
    models = pair("deepseek_v3", "cpu")
    talks, others = ([Conversation(model) for model in models] for _ in range(2))
    for other in others:
        other.token = other.token + 1
    for each in (talks, others):
        assert_equal(*(talk.tokens(4) for talk in each))
    assert captures_of(models[0]).programs
    for talk, other in zip(talks, others, strict=True):
        talk.cache.layers[1].values = other.cache.layers[1].values
    assert_equal(*(talk.tokens(1) for talk in talks))
    assert captures_of(models[0]).reason == "the layers of the cache share other buffers"


@torch.no_grad()
def test_counts_of_layers_that_differ():
    """Windows that had seen as many tokens in the captured calls, one of which has seen another number."""
    model, own = pair("gpt_oss", "cpu", sizes={"num_hidden_layers": 4})
    talks = [Conversation(each) for each in (model, own)]
    assert_equal(*(talk.tokens(4) for talk in talks))
    assert captures_of(model).programs
    for talk in talks:
        talk.cache.layers[2].cumulative_length += 1
    assert_equal(*(talk.tokens(1) for talk in talks))
    counts = [[layer.cumulative_length for layer in talk.cache.layers[::2]] for talk in talks]
    assert counts == 2 * [[14, 15]]


@torch.no_grad()
def test_calls_that_are_left_alone():
    model = accelerated("qwen3_moe", "cpu")
    talk = Conversation(model)
    talk.tokens(4)
    captures = captures_of(model)
    ran = []

    def run(*given, own=captures.programs[0].run):
        ran.append(1)
        return own(*given)

    captures.programs = [captures.programs[0]._replace(run=run)]
    talk.tokens(1)
    assert ran == [1]
    with torch.enable_grad():
        Conversation(model).tokens(1)[0].sum().backward()
    assert model.lm_head.weight.grad is not None and "gradients" in captures.reason
    with torch.autocast("cpu", torch.bfloat16):
        talk.tokens(1)
    assert "autocast" in captures.reason

    class Watch(TorchDispatchMode):
        def __torch_dispatch__(self, function, types, args=(), kwargs=None):
            return function(*args, **(kwargs or {}))

    with Watch():
        talk.tokens(1)
    assert "mode" in captures.reason
    assert ran == [1]
    talk.tokens(1)
    assert ran == [1, 1]


@torch.no_grad()
def test_an_index_is_another_argument_than_an_equal_number():
    """No number of logits to keep means all of them; an index of 0 means those of the first token."""
    talks = [Conversation(each, logits_to_keep=0) for each in pair("qwen3_moe", "cpu")]
    for kept in (0, 0, 0, 0, torch.tensor([0])):
        for talk in talks:
            talk.token, talk.inputs = prompt(1, 2), {"logits_to_keep": kept}
        results, expected = (talk.tokens(1) for talk in talks)
        assert_equal(results, expected)
    assert expected[0].shape[1] == 1 and len(captures_of(talks[0].model).programs) == 1


class Looks(TorchFunctionMode):
    def __torch_function__(self, function, types, args=(), kwargs=None):
        return function(*args, **(kwargs or {}))


@contextlib.contextmanager
def hooks_of_all_modules(kind, **options):
    handle = getattr(nn.modules.module, f"register_module_{kind}_hook")(double, **options)
    try:
        yield
    finally:
        handle.remove()


AROUND = [
    ("gradients", torch.enable_grad),
    ("mode", Looks),
    ("mode", torch.autograd.forward_ad.dual_level),
    ("hooks", lambda: hooks_of_all_modules("forward")),
    ("hooks", lambda: hooks_of_all_modules("forward", with_kwargs=True, always_call=True)),
    ("hooks", lambda: hooks_of_all_modules("forward_pre")),
    ("hooks", lambda: hooks_of_all_modules("module_registration")),
    ("hooks", lambda: hooks_of_all_modules("buffer_registration")),
    ("hooks", lambda: hooks_of_all_modules("parameter_registration")),
]


@pytest.mark.filterwarnings("ignore:`torch.jit.trace`")
@torch.no_grad()
def test_what_must_not_be_around_a_token():
    assert surroundings.forbidden() is None
    for reason, around in AROUND:
        with around():
            assert reason in surroundings.forbidden()
        assert surroundings.forbidden() is None
    with hooks_of_all_modules("full_backward"), hooks_of_all_modules("full_backward_pre"):
        assert surroundings.forbidden() is None
    found = []
    torch.vmap(lambda x: found.append(surroundings.forbidden()) or x)(torch.ones(2))
    torch.jit.trace(
        lambda x: found.append(surroundings.forbidden()) or x + 1, torch.ones(2), check_trace=False
    )
    assert len(found) == 2 and all("mode" in reason for reason in found)


class OfDefaultDevice(nn.Module):
    def forward(self, x):
        return x * (2 if torch.empty(0).device.type == "cpu" else 3)


@torch.no_grad()
@pytest.mark.on("cpu")
def test_default_devices(device, same_bits):
    """Each has a program of its own; `with` and `set_default_device` are alike."""
    model = accelerated("qwen3_moe", device)
    model.model.layers[0].post_attention_layernorm = OfDefaultDevice()
    own = without_capture(copy.deepcopy(model))
    mine, theirs, programs = Conversation(model), Conversation(own), []
    for default in (device, "meta", None, "meta", device):
        torch.set_default_device(default)
        try:
            assert_equal(mine.tokens(4), theirs.tokens(4))
        finally:
            torch.set_default_device(None)
        programs.append(captures_of(model).programs[0].match)
    assert len(captures_of(model).programs) == 3 and programs[3] is programs[1] and programs[4] is programs[0]
    with torch.device("meta"):
        assert_equal(mine.tokens(1), theirs.tokens(1))
    assert captures_of(model).programs[0].match is programs[1]


def test_inference_mode(same_bits):
    """Pipelines have it. A program runs with and without it."""
    model = accelerated("qwen3_next", "cpu")
    own, captures = without_capture(copy.deepcopy(model)), captures_of(model)
    for mode in (torch.inference_mode, torch.no_grad):
        with mode():
            assert_equal(Conversation(model).tokens(5), Conversation(own).tokens(5))
        assert len(captures.programs) == 1 and captures.reason is None


class CompiledNorm(nn.RMSNorm):
    double = staticmethod(torch.compile(lambda x: 2 * x, backend="eager", fullgraph=True))

    def forward(self, x):
        return self.double(super().forward(x))


@torch.no_grad()
def test_compiled_code_in_a_model_stays_compiled(same_bits):
    """With fullgraph=True, torch raises where it is not."""
    model = accelerated("qwen3_moe", "cpu")
    model.model.norm = CompiledNorm(64)
    torch_moe_mps.accelerate(model)  # which traces the norm
    own = without_capture(copy.deepcopy(model))
    mine, theirs = Conversation(model), Conversation(own)
    assert_equal(mine.tokens(5), theirs.tokens(5))
    assert captures_of(model).programs
    assert_equal(Conversation(model).tokens(1), Conversation(own).tokens(1))


@torch.no_grad()
def test_an_unknown_cache_says_why():
    class Own(DynamicCache):
        pass

    model = accelerated("qwen3_moe", "cpu")
    Conversation(model, cache=Own(config=model.config)).tokens(4)
    assert str(captures_of(model)) == "tokens run module by module: the cache is a Own"


@pytest.mark.parametrize("own_cache", [False, True])
@torch.no_grad()
def test_short_prompts_cost_no_capture(own_cache):
    """They make a cache's states, and are no tokens behind others: the tokens behind them are captured."""
    model = accelerated("qwen3_moe", "cpu")
    captures = captures_of(model)
    for _ in range(9):
        cache = DynamicCache(config=model.config) if own_cache else None
        cache = cache_among(model(prompt(1, 5), **cache_argument(model, cache)))
        assert captures.reason in ("it fills an empty cache", "it makes a cache", policy.TOO_FEW)
    token = prompt(1, 1)
    for _ in range(4):  # the first makes the layers grow in place
        model(token, **cache_argument(model, cache))
    assert captures.reason is None and len(captures.programs) == 1, str(captures)


def says_why(model, talk, reason: str) -> None:
    """The next token runs module by module, and the report says why and what still is one call."""
    talk.tokens(1)
    says = str(captures_of(model))
    assert says.startswith(f"the last token ran module by module: {reason}"), says
    assert says.endswith("others are one call (" + said_operators(model) + ")"), says


def said_operators(model) -> str:
    return ", ".join(f"{len(program.operators)} operators" for program in captures_of(model).programs)


@torch.no_grad()
def test_a_call_says_why_it_ran_module_by_module(monkeypatch):
    model = accelerated("qwen3_moe", "cpu")
    talk = Conversation(model)
    talk.tokens(4)
    captures = captures_of(model)
    assert str(captures) == f"a token is one call ({said_operators(model)})"
    talk.inputs = {"logits_to_keep": 1}
    says_why(model, talk, "it has other arguments")
    talk.inputs = {}
    talk.cache.layers[1].noted = 1
    says_why(model, talk, "the cache has other attributes")
    del talk.cache.layers[1].noted
    cache, talk.cache = talk.cache, DynamicCache(config=model.config)
    says_why(model, talk, "it fills an empty cache")
    with torch.enable_grad():
        says_why(model, talk, "gradients are on")
    talk.cache = cache
    norm(model).weight.data = norm(model).weight.data.double()
    norm(model).weight.data = norm(model).weight.data.float()  # elsewhere, of the same kind
    talk.tokens(1)
    assert captures.reason is None
    with monkeypatch.context() as patch:
        patch.setattr(Match, "bind", lambda *given: {}["keys"])
        says_why(model, talk, "the cache holds something else (KeyError: 'keys')")
        patch.setattr(Match, "bind", lambda *given: 1 / 0)
        with pytest.raises(ZeroDivisionError):  # a fault of ours
            talk.tokens(1)
    talk.tokens(1)
    assert captures.reason is None
    norm(model).variance_epsilon = 0.5
    talk.tokens(1)
    assert str(captures) == (
        "tokens run module by module: model.layers.0.post_attention_layernorm.variance_epsilon has changed "
        "since tokens were captured"
    )
    talk.tokens(2)
    assert captures.reason is None


@pytest.mark.parametrize("keys", [20, 70])
def test_words_of_bits_are_no_condition_of_a_recording(keys):
    """A mask of bits has a word for 32 keys, and whether it is the only one must not be asked."""
    recorder = Recorder()
    count = recorder.symbol(keys, 2)
    words = torch.zeros(1, 1, 1, -(-keys // 32), dtype=torch.int32)
    mask = recorder.input(words, (1, 1, 1, (count + 31) // 32))
    shown = recorder.run(lambda: bits_as_bool(mask, count))
    assert shown.shape[-1] == count and recorder.env.guards == []


@torch.no_grad()
@pytest.mark.on("mps")
def test_two_threads_share_a_program(device, same_bits):
    model, own = pair("qwen3_moe", device)
    Conversation(model).tokens(3)
    expected = [Conversation(own, length=n).tokens(6) for n in (7, 30)]
    talks, results = [Conversation(model, length=n) for n in (7, 30)], {}

    def run(number):
        with torch.no_grad():
            results[number] = talks[number].tokens(6)

    in_threads(lambda: run(0), lambda: run(1))
    for number in range(2):
        assert_equal(results[number], expected[number])
    assert len(captures_of(model).programs) == 1


@torch.no_grad()
def test_nothing_is_kept_but_weights():
    model = accelerated("qwen3_moe", "cpu")
    talk = Conversation(model)
    talk.tokens(5)
    assert captures_of(model).programs
    out = model(talk.token, **cache_argument(model, talk.cache), use_cache=True)
    alive = [weakref.ref(out.logits), *(weakref.ref(layer.keys) for layer in talk.cache.layers)]
    del out, talk
    gc.collect()
    assert [ref() for ref in alive] == [None] * len(alive)
    weight = weakref.ref(norm(model).weight)
    model.to(torch.bfloat16)
    assert not captures_of(model).programs
    del model
    gc.collect()
    assert weight() is None


@torch.no_grad()
def test_a_fault_in_a_capture_warns_once(monkeypatch):
    """It stays the reason while the kind is not tried again, beside a kind that is one call or alone."""

    def fail(*args):
        raise ZeroDivisionError("injected")

    for tokens_before in (0, 4):
        model, own = pair("qwen3_moe", "cpu")
        mine, theirs = Conversation(model), Conversation(own)
        assert_equal(mine.tokens(tokens_before), theirs.tokens(tokens_before))
        with monkeypatch.context() as patch, warnings.catch_warnings():
            patch.setattr(record, "assemble", fail)
            mine.inputs = theirs.inputs = {"logits_to_keep": 1} if tokens_before else {}
            with pytest.warns(UserWarning, match=r"could not be captured.*ZeroDivisionError: injected"):
                assert_equal(mine.tokens(3), theirs.tokens(3))
            warnings.simplefilter("error")
            assert_equal(mine.tokens(12), theirs.tokens(12))
        assert captures_of(model).reason == "ZeroDivisionError: injected"


@torch.no_grad()
def test_a_recording_that_changes_the_model_is_undone():
    model = accelerated("qwen3_moe", "cpu")
    module = model.model.layers[1].self_attn
    forward = type(module).forward

    class Remembers(type(module)):
        def forward(self, *args, **kwargs):
            self.last, weights = forward(self, *args, **kwargs)
            return self.last, weights

    module.__class__ = Remembers
    Conversation(model).tokens(4)
    assert type(module.last) is torch.Tensor
    assert "a call changes model.layers.1.self_attn.last" in str(captures_of(model))


def test_the_switch(monkeypatch):
    monkeypatch.setenv(_environment.CAPTURE, "0")
    model = accelerated("qwen3_moe", "cpu")
    assert captures_of(model) is None and isinstance(model, tiny_models.model_class("qwen3_moe"))
    monkeypatch.setenv(_environment.CAPTURE, "yes")
    with pytest.raises(ValueError, match="MOE_MPS_CAPTURE must be 0, 1 or auto, got 'yes'"):
        torch_moe_mps.accelerate(model)
    monkeypatch.setenv(_environment.CAPTURE, "1")
    torch_moe_mps.accelerate(model)
    assert isinstance(captures_of(model), Captures) and isinstance(
        model, tiny_models.model_class("qwen3_moe")
    )
    torch_moe_mps.restore(model)
    assert captures_of(model) is None and type(model) is tiny_models.model_class("qwen3_moe")


def test_an_error_names_the_operator(device):
    program, x = torch.classes.moe_mps.Program(), torch.ones(2, 3, device=device)
    program.add_input(x, [], [])
    program.add_call("aten::mm", "", [[0], [0]], [], [1], [])
    program.finish(2, [1])
    call = program.bind([x], [], [], [])
    with pytest.raises(RuntimeError, match="aten::mm, an operator of a captured token"):
        call.run([])


GENERATIONS = {
    "greedy": {},
    "sampling": {"do_sample": True, "top_k": 20},
    "beams": {"num_beams": 3},
    "assisted": {"prompt_lookup_num_tokens": 2, "max_new_tokens": 40, "min_new_tokens": 40},
    "padding": {"batch": 2},
}


OFTEN = ("sampling", "beams", "padding")


@pytest.mark.slow("ways to generate, by two models")
@torch.no_grad()
@pytest.mark.on("cpu")
@pytest.mark.parametrize("ways", in_sweep((OFTEN, tuple(GENERATIONS)), [OFTEN]), ids=len)
def test_generate(device, same_bits, ways):
    """In turns by one model, as a server has them; the windows of half of its layers begin to move."""
    model, own = pair("gpt_oss", device, torch.bfloat16, bits=4, group_size=32)
    for options in map(GENERATIONS.get, ways):
        options = {
            "max_new_tokens": 14,
            "min_new_tokens": 14,
            "do_sample": False,
            "pad_token_id": 0,
        } | options
        ids = prompt(options.pop("batch", 1)).repeat(1, 3).to(device)
        mask = torch.ones_like(ids)
        mask[1:, :4] = 0
        captures, results = captures_of(model), []
        for each in (own, model):
            torch.manual_seed(0)
            results.append(each.generate(input_ids=ids, attention_mask=mask, **options).cpu())
        assert torch.equal(*results), options
        assert captures.programs and captures._policy.failure is None, (options, str(captures))


@pytest.mark.sweep
@torch.no_grad()
@pytest.mark.on("mps")
@pytest.mark.parametrize(
    "architecture,sizes,bits",
    [
        ("gpt_oss", {"head_dim": 32, "sliding_window": 12}, 8),
        pytest.param("deepseek_v3", {"kv_lora_rank": 32}, None, marks=pytest.mark.sweep),
        pytest.param(
            *("deepseek_v3", {"kv_lora_rank": 32, "qk_rope_head_dim": 32, "head_dim": 32}, 8),
            marks=pytest.mark.sweep,
        ),
        pytest.param("qwen3_next", {}, None, marks=pytest.mark.sweep),
    ],
)
def test_caches(architecture, sizes, bits, device, same_bits):
    """In 8 bits, of latents in one memory, with recurrent states."""
    model, own = pair(architecture, device, torch.bfloat16, sizes, bits=4, group_size=32, kv_bits=bits)
    mine, theirs = Conversation(model, batch=2), Conversation(own, batch=2)
    if bits:
        assert all(isinstance(layer.keys, QuantizedStates) for layer in mine.cache.layers)
    assert_equal(mine.tokens(14), theirs.tokens(14))
    assert captures_of(model).programs, str(captures_of(model))
    for layer, other in zip(mine.cache.layers, theirs.cache.layers, strict=True):
        assert vars(layer).keys() == vars(other).keys()
