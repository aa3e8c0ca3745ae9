"""Answers a question with a Mixture of Experts: with transformers' own code, accelerated, and in 4 bits.

The model has the trained weights of SmolLM2-135M, whose MLPs are its experts. With --random, or where these
weights are not installed, it is a small Qwen3-MoE with random weights. `torch-moe-mps bench MODEL` measures
other models.
"""

import argparse
import copy
import itertools
import statistics
import sys
import time
from pathlib import Path

TURN = 16  # tokens that a model generates before the next one does: what else the machine does slows all
WARM_UP = 8  # tokens: the third one of a model on mps is captured


def arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="scripts/demo", description=__doc__)
    parser.add_argument("--random", action="store_true", help="a small model with random weights")
    parser.add_argument("--device", help="mps where there is one, else cpu")
    parser.add_argument(
        "--prompt", default="What is the capital of France?", help="needs the trained weights"
    )
    parser.add_argument("--tokens", type=int, default=64, help="how many to generate")
    arguments = parser.parse_args()
    if arguments.tokens < 1:
        parser.error(f"argument --tokens: must be at least 1, got {arguments.tokens}")
    return arguments


if __name__ == "__main__":
    ARGUMENTS = arguments()  # before the packages below are imported: --help needs none of them

import paths  # noqa: E402, F401  (for support)
import torch  # noqa: E402
import transformers  # noqa: E402
from support import trained, trained_models  # noqa: E402

import torch_moe_mps  # noqa: E402
from torch_moe_mps.checkpoints.quantize.sizes import total_bytes  # noqa: E402
from torch_moe_mps.commands.sources import usable_device  # noqa: E402


def random_model(device: str):
    """A Qwen3-MoE of 21 million parameters in its real architecture, with random weights."""
    config = transformers.Qwen3MoeConfig(
        vocab_size=2048,
        hidden_size=256,
        intermediate_size=512,
        moe_intermediate_size=192,
        num_hidden_layers=4,
        num_attention_heads=8,
        num_key_value_heads=2,
        head_dim=32,
        num_experts=32,
        num_experts_per_tok=4,
        eos_token_id=None,
    )
    torch.manual_seed(0)
    model = transformers.Qwen3MoeForCausalLM(config)
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.dim() > 1:
                parameter.normal_(0.0, parameter.shape[-1] ** -0.5)
    return model.to(device, torch.float32 if device == "cpu" else torch.bfloat16).eval()


def trained_experts(file: Path, device: str):
    """SmolLM2's function, in experts."""
    print(f"SmolLM2-135M from {file.name}, its MLPs as experts", flush=True)
    dtype = torch.float32 if device == "cpu" else torch.bfloat16
    return trained_models.mixture(trained_models.dense(file, dtype)).to(device)


def settings_for(ids: torch.Tensor, tokens: int) -> dict:
    options = {"do_sample": False, "pad_token_id": 0, "attention_mask": torch.ones_like(ids)}
    return options | {"input_ids": ids, "max_new_tokens": tokens}


@torch.no_grad()
def run(model, ids: torch.Tensor, tokens: int) -> tuple[torch.Tensor, torch.Tensor]:
    """The prompt's logits, and the greedy answer."""
    logits = model(input_ids=ids).logits.float()
    return logits, model.generate(**settings_for(ids, tokens))[0, ids.shape[1] :].cpu()


class Clock(transformers.generation.BaseStreamer):
    """Notes when generate() gives out the prompt, and each token."""

    def __init__(self) -> None:
        self.times: list[float] = []

    def put(self, value: torch.Tensor) -> None:
        self.times.append(time.perf_counter())

    def end(self) -> None:
        pass


def seconds_of(model, ids: torch.Tensor, tokens: int) -> list[float]:
    """Seconds between the tokens of an answer: so many behind its first one, whatever ends it."""
    clock = Clock()
    model.generate(**settings_for(ids, tokens + 1), min_new_tokens=tokens + 1, streamer=clock)
    return [after - before for before, after in itertools.pairwise(clock.times[1:])]


def speeds_of(models: dict, ids: torch.Tensor, tokens: int) -> dict[str, float]:
    """{name: tokens per second} of models that take turns, by the median of so many tokens or a few more."""
    seconds: dict[str, list[float]] = {name: [] for name in models}
    for model in models.values():
        seconds_of(model, ids, min(tokens, WARM_UP))
    names = [*models]
    for _ in range(-(-tokens // TURN)):
        for name in names:
            seconds[name] += seconds_of(models[name], ids, min(tokens, TURN))
        names.reverse()
    return {name: 1 / statistics.median(of_model) for name, of_model in seconds.items()}


def with_the_same_weights(model):
    """A copy of a model that shares its tensors."""
    return copy.deepcopy(model, {id(tensor): tensor for tensor in (*model.parameters(), *model.buffers())})


def main(args: argparse.Namespace) -> None:
    transformers.logging.set_verbosity_error()
    transformers.logging.disable_progress_bar()
    try:
        device = usable_device(args.device)
    except ValueError as error:
        sys.exit(f"error: {error}")
    file = None if args.random else trained.smollm2()
    if file is None and not args.random:
        print(f"{trained.MISSING}; the weights are random instead\n")
    model = random_model(device) if file is None else trained_experts(file, device)
    tokenizer = None if file is None else trained_models.tokenizer_of(file)
    if tokenizer is None:
        ids = torch.randint(0, 2048, (1, 16), generator=torch.Generator().manual_seed(0)).to(device)
    else:
        ids = trained_models.asked(tokenizer, args.prompt).to(device)
    answer = demonstrate(model, ids, args.tokens)
    if device == "mps":
        print("\nwrong or slow? `torch-moe-mps check` writes moe_mps_report.json, for an issue")
    if tokenizer is None:
        print(f"\n{' '.join(map(str, answer.tolist()))}")
    else:
        print(f"\n{args.prompt}\n{tokenizer.decode(answer, skip_special_tokens=True)}")


def demonstrate(model, ids: torch.Tensor, tokens: int) -> torch.Tensor:
    """Prints what is compared and measured. Returns: the answer in 4 bits."""
    parameters, before = model.num_parameters() / 1e6, total_bytes(model) / 1e6
    print(f"{type(model).__name__}, {parameters:.0f} M parameters, {model.dtype}, {model.device}\n")
    model.set_experts_implementation("eager")
    expected, eager_answer = run(model, ids, tokens)
    accelerated, quantized = with_the_same_weights(model), with_the_same_weights(model)
    print(torch_moe_mps.accelerate(accelerated))
    logits, answer = run(accelerated, ids, tokens)
    error = ((logits - expected).abs().max() / expected.abs().max()).item()
    same = int((answer == eager_answer[: len(answer)]).long().cumprod(0).sum())
    print(f"\nlogits of the prompt against eager: relative error {error:.1e}")
    print(f"greedy tokens equal to eager's: {same} of {len(eager_answer)}")
    print(f"\nin 4 bits:\n{torch_moe_mps.accelerate(quantized, bits=4).quantization}")
    print(f"\nweights: {before:.0f} MB before, {total_bytes(quantized) / 1e6:.0f} MB in 4 bits")
    _, answer = run(quantized, ids, tokens)
    speeds = speeds_of({"eager": model, "accelerated": accelerated, "in 4 bits": quantized}, ids, tokens)
    eager, *others = speeds.items()
    shown = [f"{name} {speed:.1f} ({speed / eager[1]:.2f} times)" for name, speed in others]
    print(f"tokens/s, in turns: {eager[0]} {eager[1]:.1f}, {', '.join(shown)}")
    if model.device.type == "cpu":
        print("a CPU decodes weights once, to float32: packed ones save memory there, and no time")
    return answer


if __name__ == "__main__":
    main(ARGUMENTS)
