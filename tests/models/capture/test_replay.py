"""A token as one call: the same bits as without, whatever happens to cache and surroundings between two."""

import contextlib
import copy
import gc
import pickle
import weakref

import pytest
import torch
from support.capturing import PROMPT, accelerated, assert_equal, double, norm, pair, without_capture
from support.models import Conversation, output, prompt
from support.sweep import in_sweep
from support.threads import in_threads
from torch import nn
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode
from transformers import DynamicCache

from torch_moe_mps.models.capture import surroundings
from torch_moe_mps.models.capture.classes import captures_of
from torch_moe_mps.models.capture.match import Match
from torch_moe_mps.models.upstream.calls import cache_argument
from torch_moe_mps.ops import _registry

pytestmark = pytest.mark.usefixtures("captured")


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
    Conversation(model).tokens(1)  # the layers of the other one have buffers of several sizes now
    assert ran == [1, 1] and captures.reason is None


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


def test_an_error_names_the_operator(device):
    program, x = torch.classes.moe_mps.Program(), torch.ones(2, 3, device=device)
    program.add_input(x, [], [])
    program.add_call("aten::mm", "", [[0], [0]], [], [1], [])
    program.finish(2, [1])
    call = program.bind([x], [], [], [])
    with pytest.raises(RuntimeError, match="aten::mm, an operator of a captured token"):
        call.run([])


def buffer_and_view(start: int, tokens: int, width: int = 4) -> tuple[torch.Tensor, torch.Tensor]:
    buffer = torch.zeros(2, 1, 20, 8)
    return buffer, buffer.narrow(2, start, tokens).narrow(3, 0, width)


def test_why_a_call_is_not_bound(simulated):
    """One number of the call is the length of its view, another one its rows."""
    program, weight, matrix = torch.classes.moe_mps.Program(), torch.zeros(3, 4), torch.zeros(6, 4)
    part = nn.Parameter(matrix[:3])
    program.add_symbol(2)  # rows
    program.add_symbol(0)  # tokens
    program.add_input(torch.zeros(2, 3), [0], [0])
    program.add_input(torch.zeros(2, 1, 20, 8), [0], [0])
    program.add_view(1, 1, -1, 5, 1, 0, 4)
    program.add_buffer(0)
    program.add_number(1)
    program.add_guard("s1 9 <")
    program.add_integer("s0 s1 *")
    program.add_constant(weight)
    program.add_weight(part)
    program.finish(3, [])

    def bound(x=None, memory=(1, 5), numbers=(5,), ends=(6,), shown=None):
        buffer, view = buffer_and_view(*memory)
        x = torch.ones(2, 3) if x is None else x
        return program.bind([x, buffer], [view if shown is None else shown], [*numbers], [*ends])

    assert bound().run([])[1] == [2 * 5]
    assert bound(memory=(1, 8), numbers=(8,), ends=(9,)).run([])[1] == [2 * 8]
    layout = "a tensor has another shape, dtype or device than in the captured call"
    part_of = "a tensor of the cache shows another part of its buffer than in the captured call"
    assert bound(torch.ones(2, 3).half()) == layout
    assert bound(torch.ones(2, 4)) == layout
    assert bound(torch.ones(3, 2).t()) == layout
    assert bound(torch.ones(3, 3)) == layout  # other rows than the buffer's
    assert bound(memory=(2, 5), ends=(7,)) == part_of
    assert bound(memory=(1, 5, 3)) == part_of
    assert bound(memory=(1, 4)) == part_of  # not as long as the number says
    assert bound(shown=buffer_and_view(1, 5)[1]) == part_of  # of another buffer
    assert bound(ends=(7,)) == "somebody else has written behind the cache's last token"
    sizes = "the call has sizes for which the model runs other operators"
    assert bound(memory=(1, 9), numbers=(9,), ends=(10,)) == sizes
    assert bound(numbers=(5, 5)) == "it has other tensors"
    with torch.inference_mode():
        made_inside = torch.ones(2, 3)
    assert bound(made_inside) == "a tensor of inference mode is used outside of it"
    part.data = torch.zeros(3, 4)
    assert bound() == "a weight lies elsewhere in memory than in the captured call"
    part.data = matrix[:3]
    weight.data = weight.data.double()
    assert bound() == "a weight has another shape, dtype or device than in the captured call"
    weight.data = weight.data.float()
    assert not isinstance(bound(), str)


def test_what_arrives_is_compared_too(simulated):
    program = torch.classes.moe_mps.Program()
    program.add_arriving(torch.zeros(2, 3))
    program.finish(1, [0])
    call = program.bind([], [], [], [])
    (result,), _ = call.run([torch.ones(2, 3)])
    assert torch.equal(result, torch.ones(2, 3))
    assert call.run([torch.ones(2, 4)]) == call.run([]) == ([], [])


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
