"""TRL's SFTTrainer over packed models follows its own steps on the dense models with the same values."""

import copy

import peft
import pytest
import torch
from support import tiny_models
from support.checkpoints import LETTERS, tokenizer_of

import torch_moe_mps

ROWS = [{"prompt": "abcd", "completion": "efgh"}, {"prompt": "hgf", "completion": "edcba"}] * 4


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
