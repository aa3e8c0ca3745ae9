"""TRL's trainers over packed models follow their own steps on the dense models with the same values."""

import copy

import peft
import pytest
import torch
from support import tiny_models
from support.checkpoints import LETTERS, tokenizer_of
from support.pages import script_of

import torch_moe_mps

ROWS = [{"prompt": "abcd", "completion": "efgh"}, {"prompt": "hgf", "completion": "edcba"}] * 4


PAIRS = [
    {"prompt": "abcd", "chosen": "efgh", "rejected": "hgfe"},
    {"prompt": "hgf", "chosen": "edcba", "rejected": "abc"},
] * 4
STEPS = 5


def reward(completions: list[str], **columns: object) -> list[float]:
    return [float(text.count("e")) for text in completions]


def trained(method: str, model, output) -> tuple[list[dict], object]:
    """The rows of the log, and the trainer."""
    import datasets
    import trl

    config = peft.LoraConfig(
        r=4,
        target_modules=["q_proj", "o_proj"],
        target_parameters=["experts.gate_up_proj", "experts.down_proj"],
        task_type="CAUSAL_LM",
    )
    arguments = {
        "output_dir": str(output), "max_steps": STEPS, "per_device_train_batch_size": 4, "report_to": [],
        "learning_rate": 2e-2, "logging_steps": 1, "save_strategy": "no", "use_cpu": True, "bf16": False,
        "disable_tqdm": True,
    }  # fmt: skip
    tokenizer = tokenizer_of(LETTERS, unk_token="?", pad_token="?", eos_token="?")
    torch.manual_seed(0)
    if method == "dpo":
        how, more, cls = trl.DPOConfig(**arguments), {}, trl.DPOTrainer
    else:
        how = trl.GRPOConfig(**arguments, num_generations=4, max_completion_length=8)
        more, cls = {"reward_funcs": reward}, trl.GRPOTrainer
    data = datasets.Dataset.from_list(PAIRS)
    trainer = cls(model, args=how, train_dataset=data, processing_class=tokenizer, peft_config=config, **more)
    trainer.train()
    return [row for row in trainer.state.log_history if "loss" in row], trainer


class OfRows(torch.autograd.Function):
    """Logits by slices of a weight that it saves, as losses in chunks of other libraries compute them."""

    @staticmethod
    def forward(ctx, x, weight):
        ctx.save_for_backward(weight)
        return torch.cat([x @ weight[at : at + 8].to(x.dtype).t() for at in range(0, weight.shape[0], 8)], 1)

    @staticmethod
    def backward(ctx, grad):
        (weight,) = ctx.saved_tensors
        assert ctx.needs_input_grad == (True, False)
        parts = [grad[:, at : at + 8] @ weight[at : at + 8] for at in range(0, weight.shape[0], 8)]
        return sum(parts), None


def test_autograd_functions_save_the_weight_of_a_head():
    """Its rows are decoded where they are read; it is no weight to compute with as a whole."""
    with tiny_models.groups_of_32():
        model = tiny_models.tiny_model("qwen3_moe", head_dim=32)
    torch_moe_mps.accelerate(model, 4, 32, linear_bits=4)
    head = model.lm_head
    right = head.dequantized(slice(None))
    x = torch.randn(3, right.shape[1], requires_grad=True)
    own = x.detach().clone().requires_grad_()
    out, expected = OfRows.apply(x, head.weight), own @ right.t()
    torch.testing.assert_close(out, expected)
    out.square().sum().backward(), expected.square().sum().backward()
    torch.testing.assert_close(x.grad, own.grad)
    assert torch.equal(head.weight[5], right[5]) and head.weight.device == right.device
    for use in (lambda weight: weight + 1, lambda weight: x @ weight.t(), lambda weight: weight.data):
        with pytest.raises(AttributeError, match=r"^moe_mps: a weight must be dense for "):
            use(head.weight)


@pytest.mark.sweep
@pytest.mark.parametrize("method", ["dpo", "grpo"])
def test_preferences_and_rewards(method, tmp_path):
    """Losses, rewards and lengths are those of the dense twin.

    The reference is the model without its adapter: there is no second one, and packed weights stay where they
    were.
    """
    with tiny_models.groups_of_32():
        dense = tiny_models.tiny_model("qwen3_moe", head_dim=32, vocab_size=32)
    packed = copy.deepcopy(dense)
    torch_moe_mps.accelerate(packed, 4, 32, linear_bits=4, embedding_bits=4)
    twin = tiny_models.dense_twin(dense, packed)
    before = {tensor.data_ptr(): tensor.clone() for tensor in (*packed.parameters(), *packed.buffers())}
    rows, trainer = trained(method, packed, tmp_path)
    expected, _ = trained(method, twin, tmp_path)
    assert len(rows) == STEPS and getattr(trainer, "ref_model", None) is None
    named = [(name, tensor) for name, tensor in trainer.model.named_parameters() if "lora_" not in name]
    held = [tensor for _, tensor in named] + [*trainer.model.buffers()]
    assert {tensor.data_ptr() for tensor in held} == {*before}
    assert all(torch.equal(tensor, before[tensor.data_ptr()]) for tensor in held)
    for row, other in zip(rows, expected, strict=True):
        assert abs(row["loss"] - other["loss"]) <= 1e-4
        for name in ("rewards/margins", "reward", "completions/mean_length"):
            assert name not in row or abs(row[name] - other[name]) <= 1e-4
    if method == "dpo":
        assert rows[0]["rewards/margins"] == 0 and rows[-1]["rewards/margins"] > 1


@pytest.mark.sweep
def test_sft(tmp_path):
    import datasets
    import trl

    with tiny_models.groups_of_32():
        dense = tiny_models.tiny_model("qwen3_moe", head_dim=32, vocab_size=32)
    packed = copy.deepcopy(dense)
    torch_moe_mps.accelerate(packed, 4, 32, linear_bits=4, embedding_bits=4)
    curves = []
    for model in (packed, tiny_models.dense_twin(dense, packed)):
        torch.manual_seed(0)
        config = peft.LoraConfig(
            r=4,
            target_modules=["q_proj", "o_proj"],
            target_parameters=["experts.gate_up_proj", "experts.down_proj"],
            task_type="CAUSAL_LM",
        )
        arguments = trl.SFTConfig(
            output_dir=str(tmp_path), max_steps=10, per_device_train_batch_size=4, learning_rate=2e-2,
            report_to=[], logging_steps=1, save_strategy="no", use_cpu=True, disable_tqdm=True, bf16=False,
        )  # fmt: skip
        tokenizer = tokenizer_of(LETTERS, unk_token="?", pad_token="?", eos_token="?")
        data = datasets.Dataset.from_list(ROWS)
        trainer = trl.SFTTrainer(
            model, arguments, train_dataset=data, processing_class=tokenizer, peft_config=config
        )
        trainer.train()
        curves.append(torch.tensor([row["loss"] for row in trainer.state.log_history if "loss" in row]))
    packed_losses, losses = curves
    assert len(losses) == 10 and losses[-1] < losses[0] - 0.1
    assert (packed_losses - losses).abs().max() <= 1e-4


@pytest.mark.sweep
def test_the_script_of_the_page(tmp_path, monkeypatch):
    """docs/finetuning.md's GRPO, with a step of short answers."""
    with tiny_models.groups_of_32():
        tiny_models.tiny_model("qwen3_moe", head_dim=32, vocab_size=32).save_pretrained(tmp_path / "model")
    tokenizer_of(LETTERS, unk_token="?", pad_token="?", eos_token="?").save_pretrained(tmp_path / "model")
    own = {
        "Qwen/Qwen3-30B-A3B": "model",
        'bits=4, device_map="mps"': 'bits=4, group_size=32, device_map="cpu"',
        "max_completion_length=256": "max_completion_length=8, max_steps=1, use_cpu=True, report_to=[]",
    }
    monkeypatch.chdir(tmp_path)
    exec(script_of("finetuning.md", "## Preferences and rewards", own), found := {})
    rewards = found["reward"](["it is 41, no\n42", "7", "none", ""], ["42"] * 4)
    assert rewards == [1.0, 0.1, 0.0, 0.0]
