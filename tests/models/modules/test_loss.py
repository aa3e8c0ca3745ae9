"""The loss in chunks: that of transformers, to the rounding, without the logits of all tokens in memory."""

import copy
import functools
import threading

import pytest
import torch
import transformers
from peft import LoraConfig, get_peft_model
from support import tiny_models
from support.memory import Memory
from support.models import tiny
from support.sweep import covering
from support.threads import in_threads
from torch import nn
from torch.nn import functional

import torch_moe_mps
from torch_moe_mps.models.modules import loss
from torch_moe_mps.models.modules.loss import Logits

IDS = torch.randint(1, 90, (3, 41), generator=torch.Generator().manual_seed(0))
LABELS = IDS.masked_fill(torch.rand(IDS.shape, generator=torch.Generator().manual_seed(1)) < 0.3, -100)


@pytest.fixture(autouse=True)
def small_chunks(monkeypatch):
    """Chunks of 7 tokens of 97 words."""
    monkeypatch.setattr(loss, "LARGEST", 7 * 97 + 5)


def pair(architecture: str, **options) -> tuple[nn.Module, nn.Module]:
    """A model of ours, and transformers' own with the same values."""
    dense = tiny(architecture)
    ours = copy.deepcopy(dense)
    torch_moe_mps.accelerate(ours, **options)
    return ours, tiny_models.dense_twin(dense, ours) if options else dense


def losses(model: nn.Module, **arguments) -> tuple[torch.Tensor, dict[str, torch.Tensor], object]:
    for name, parameter in model.named_parameters():
        parameter.requires_grad_(
            name.endswith(("q_proj.weight", "norm.weight", "norm1.weight", "ln_f.weight"))
        )
        parameter.grad = None
    out = model(input_ids=IDS, **({"labels": LABELS} | arguments))
    out.loss.sum().backward()
    return out.loss.detach(), {n: p.grad for n, p in model.named_parameters() if p.grad is not None}, out


def is_close(result: torch.Tensor, right: torch.Tensor, tolerance: float = 3e-6) -> bool:
    return bool((result - right).norm() <= tolerance * right.norm())


# gemma2 caps its logits, granite divides them, cohere multiplies them; mixtral's router has a loss of its own
@pytest.mark.parametrize(
    ("architecture", "options"),
    covering(
        ("qwen3_moe", "gemma2", "granite", "cohere", "mixtral"),
        ({}, {"bits": 4, "group_size": 32, "linear_bits": 8}),
    ),
)
def test_loss_and_gradients_of_transformers(architecture, options):
    ours, own = pair(architecture, **options)
    extra = {"output_router_logits": True} if architecture == "mixtral" else {}
    for arguments in (extra, {"num_items_in_batch": torch.tensor(50), **extra}):
        value, gradients, out = losses(ours, **arguments)
        right, expected, theirs = losses(own, **arguments)
        assert type(out.logits) is Logits and not out.logits._elements
        assert is_close(value, right)
        assert expected.keys() & gradients.keys() and all(
            is_close(gradients[name], expected[name], 1e-5) for name in expected.keys() & gradients.keys()
        )
        assert out.logits.shape == theirs.logits.shape and out.logits.dtype == theirs.logits.dtype
        assert is_close(out.logits, theirs.logits, 1e-5)


def test_shifted_labels_and_all_ignored():
    ours, own = pair("qwen3_moe")
    shifted = {"labels": LABELS, "shift_labels": LABELS.roll(-1, 1)}
    assert is_close(losses(ours, **shifted)[0], losses(own, **shifted)[0])
    nothing = {"labels": torch.full_like(IDS, -100)}
    assert losses(own, **nothing)[0].isnan() and losses(ours, **nothing)[0].isnan()
    kept = {"logits_to_keep": 20, "labels": LABELS[:, -20:]}
    assert is_close(losses(ours, **kept)[0], losses(own, **kept)[0])


def test_labels_by_place_and_tuples():
    ours, own = pair("llama")
    with torch.no_grad():
        for model in (ours, own):
            model.eval()
        by_place = (IDS, None, None, None, None, LABELS)
        (value, logits), (right, expected) = (
            model(*by_place, use_cache=False, return_dict=False) for model in (ours, own)
        )
    assert is_close(value, right) and type(logits) is Logits and is_close(logits, expected)


def test_losses_of_ones_own():
    """Whatever else reads the logits gets them, with their gradients; rows of them stay in chunks."""
    ours, own = pair("qwen3_moe")
    functions = {
        True: lambda x: functional.cross_entropy(
            x[..., :-1, :].contiguous().view(-1, 97), IDS[:, 1:].reshape(-1)
        ),
        False: lambda x: (
            functional.cross_entropy(x.transpose(1, 2), IDS, label_smoothing=0.1) + x[0, 3].square().sum()
        ),
    }
    for in_chunks, function in functions.items():
        results = []
        for model in (ours, own):
            _, _, out = losses(model)
            model.zero_grad()
            out = model(input_ids=IDS, labels=LABELS)
            value = function(out.logits)
            value.backward()
            gradients = [p.grad for p in model.parameters() if p.grad is not None]
            results.append((value.detach(), gradients, out.logits))
        (value, gradients, logits), (right, expected, _) = results
        assert is_close(value, right) and bool(logits._elements) is not in_chunks
        assert all(is_close(a, b, 1e-5) for a, b in zip(gradients, expected, strict=True))


@torch.no_grad()
def test_parts_of_the_logits():
    """Rows stay in chunks; a part of the vocabulary, or one index, is of the elements."""
    ours, own = pair("qwen3_moe")
    theirs = own(input_ids=IDS).logits
    for index, stays in (
        ((slice(1), slice(2, 9), slice(None)), True),
        ((..., slice(5)), False),
        ((slice(None), slice(None), slice(5)), False),
        ((slice(None), 3), False),
    ):
        part = ours(input_ids=IDS, labels=LABELS).logits[index]
        assert (type(part) is Logits) is stays
        assert part.shape == theirs[index].shape and is_close(part + 0, theirs[index], 1e-5)


def test_changed_in_place():
    ours, own = pair("qwen3_moe")
    with torch.no_grad():
        out, theirs = (model(input_ids=IDS, labels=LABELS).logits for model in (ours, own))
        out *= 2
        assert is_close(out + 0, theirs * 2, 1e-5) and is_close(out * 2, theirs * 4, 1e-5)


def test_logits_of_a_call_without_gradients_have_none():
    """Whatever is on when they are read: no graph is held, and numpy takes them."""
    ours, own = pair("qwen3_moe")
    with torch.no_grad():
        logits, theirs = (model(input_ids=IDS, labels=LABELS).logits for model in (ours, own))
    assert type(logits) is Logits and not theirs.requires_grad
    for read in (
        lambda x: x + 0,
        lambda x: x[:, 1:].float() + 0,
        lambda x: functional.cross_entropy(x.view(-1, 97), IDS.view(-1)),
    ):
        assert not read(logits).requires_grad and is_close(read(logits), read(theirs), 1e-5)
    assert is_close(torch.from_numpy(logits.numpy()), theirs, 1e-5)


def test_threads_at_once():
    """Each gets its loss, a call without labels its logits, and the head keeps its forward."""
    ours, own = pair("qwen3_moe")
    expected = own(input_ids=IDS, labels=LABELS)
    both, left, role = threading.Barrier(2), threading.Event(), threading.local()
    results = {}

    def in_the_head(*_) -> None:
        name = getattr(role, "name", None)
        if name is not None:
            both.wait(60)
        if name == "first":
            in_threads(lambda: results.update(none=ours(input_ids=IDS).logits))
        if name == "last":
            assert left.wait(60)

    def run(name: str) -> None:
        role.name = name
        results[name] = ours(input_ids=IDS, labels=LABELS)
        left.set()

    hook = ours.lm_head.register_forward_pre_hook(in_the_head)
    in_threads(*(functools.partial(run, name) for name in ("first", "last")))
    hook.remove()
    assert "forward" not in vars(ours.lm_head)
    assert type(results["none"]) is torch.Tensor and is_close(results["none"], expected.logits, 1e-5)
    for name in ("first", "last"):
        assert type(results[name].logits) is Logits and is_close(results[name].loss, expected.loss)


def test_without_labels_nothing_changes():
    ours, _ = pair("qwen3_moe")
    assert type(ours(input_ids=IDS).logits) is torch.Tensor
    assert type(ours(input_ids=IDS[:1, :7], labels=IDS[:1, :7]).logits) is torch.Tensor  # of one chunk
    assert "forward" not in ours.lm_head.__dict__
    assert type(copy.deepcopy(ours)(input_ids=IDS, labels=LABELS).logits) is Logits
    torch_moe_mps.restore(ours)
    assert type(ours) is transformers.Qwen3MoeForCausalLM
    assert type(ours(input_ids=IDS, labels=LABELS).logits) is torch.Tensor


def test_read_behind_a_step():
    ours, _ = pair("qwen3_moe")
    ours.lm_head.weight.requires_grad_()
    out = ours(input_ids=IDS, labels=LABELS)
    with torch.no_grad():
        ours.lm_head.weight += 1
    with pytest.raises(RuntimeError, match="logits must be read before the head's weights change"):
        out.logits.sum()


def test_heads_that_are_trained():
    ours, own = pair("qwen3_moe")
    gradients = []
    for model in (ours, own):
        for parameter in model.parameters():
            parameter.requires_grad_(parameter is model.lm_head.weight)
        model(input_ids=IDS, labels=LABELS).loss.backward()
        gradients.append(model.lm_head.weight.grad)
    assert is_close(*gradients)
    adapted = get_peft_model(ours, LoraConfig(target_modules=["lm_head"], r=2))  # gives its logits at once
    assert type(adapted(input_ids=IDS, labels=LABELS).logits) is torch.Tensor


def test_autocast():
    ours, own = pair("llama")
    with torch.autocast("cpu", torch.bfloat16):
        out, theirs = (model(input_ids=IDS, labels=LABELS) for model in (ours, own))
    assert is_close(out.loss, theirs.loss, 1e-3)
    assert out.logits.dtype == theirs.logits.dtype == torch.bfloat16
    assert is_close(out.logits.float(), theirs.logits.float(), 2e-2)  # read outside of the context


TOKENS = 256


def peak(layers: int, vocabulary: int) -> int:
    """Bytes beside weights and adapters, at most, in a step of LoRA on packed weights with checkpoints."""
    with tiny_models.groups_of_32():
        model = tiny_models.tiny_model("qwen3_moe", num_hidden_layers=layers, vocab_size=vocabulary)
    torch_moe_mps.accelerate(model, 4, 32, linear_bits=4)
    model = get_peft_model(model, LoraConfig(target_modules=["q_proj", "v_proj"], r=2)).train()
    model.gradient_checkpointing_enable()
    ids = torch.randint(1, 90, (1, TOKENS))
    model(input_ids=ids, labels=ids).loss.backward()  # the CPU keeps decoded weights
    model.zero_grad()
    weights = [*model.parameters(), *model.buffers()]
    with Memory(weights) as memory:
        before = memory.held()
        model(input_ids=ids, labels=ids).loss.backward()
    return memory.peak - before


@pytest.mark.slow("four models take a step of training")
def test_peak(monkeypatch):
    """At most the weights, a checkpoint for each layer, what one layer takes, and the logits of one chunk."""
    rows, vocabulary, hidden = 16, 1000, 64
    monkeypatch.setattr(loss, "LARGEST", rows * vocabulary)
    one, three = (peak(layers, 97) for layers in (1, 3))
    assert three - one <= 2 * TOKENS * hidden * 4 + 4096  # checkpoints, and gradients of the adapters
    chunk = 4 * rows * vocabulary * 4  # logits, in float32, their logarithms, their gradients
    assert peak(1, vocabulary) - one <= chunk < TOKENS * vocabulary * 4
    monkeypatch.setattr(loss, "LARGEST", 1 << 30)
    assert peak(1, vocabulary) - one > TOKENS * vocabulary * 4  # this is seen where there are no chunks
