"""Answers a question with a model: with transformers' own code, accelerated, and in 4 bits.

Without --model that is a Mixture of Experts with the trained weights of SmolLM2-135M, whose MLPs are its
experts. With --random, or where these weights are not installed, it writes a small Qwen3-MoE checkpoint with
random weights and loads that.
"""

import argparse
import copy
import itertools
import statistics
import sys
import tempfile
import time
from pathlib import Path

BITS = 4  # that are shown unless others are asked for
TURN = 16  # tokens that a model generates before the next one does: what else the machine does slows all
WARM_UP = 8  # tokens: the third one of a model on mps is captured
DTYPES = ("auto", "float32", "float16", "bfloat16")


def arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="scripts/demo", description=__doc__)
    parser.add_argument(
        "--model", help="checkpoint of a model that generates text: a folder, or a name on the Hub"
    )
    parser.add_argument("--random", action="store_true", help="a small model with random weights")
    parser.add_argument("--device", help="mps where there is one, else cpu")
    parser.add_argument(
        "--dtype",
        choices=DTYPES,
        default="auto",
        help="of the weights; auto: as in the checkpoint, of SmolLM2 float32 on a CPU, else bfloat16",
    )
    parser.add_argument(
        "--bits",
        type=int,
        choices=(0, 2, 3, 4, 5, 6, 8),
        help="of the quantised weights, 4 unless given; 0 quantises none",
    )
    parser.add_argument("--prompt", default="What is the capital of France?", help="needs a tokenizer")
    parser.add_argument("--tokens", type=int, default=64, help="how many to generate")
    arguments = parser.parse_args()
    if arguments.tokens < 1:
        parser.error(f"argument --tokens: must be at least 1, got {arguments.tokens}")
    if arguments.random and arguments.model is not None:
        parser.error("argument --random: not allowed with argument --model")
    return arguments


if __name__ == "__main__":
    ARGUMENTS = arguments()  # before the packages below are imported: --help needs none of them

import paths  # noqa: E402, F401  (for support)
import torch  # noqa: E402
import transformers  # noqa: E402
from safetensors import SafetensorError  # noqa: E402
from support import trained, trained_models  # noqa: E402

import torch_moe_mps  # noqa: E402
from torch_moe_mps.commands.sources import usable_device  # noqa: E402
from torch_moe_mps.transformers import Report, experts_of  # noqa: E402
from torch_moe_mps.transformers.checkpoints.quantize.sizes import total_bytes  # noqa: E402


def write_checkpoint(folder: str) -> None:
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
    model.save_pretrained(folder)


def is_checkpoint(path: str) -> bool:
    """A folder with a config, or what may be a name on the Hub."""
    is_name = path.count("/") <= 1 and not path.startswith((".", "/", "~")) and not Path(path).exists()
    return is_name or (Path(path) / "config.json").is_file()


def load(path: str, dtype: str, device: str):
    """The model in evaluation mode; one line on what is wrong otherwise."""
    try:
        config = transformers.AutoConfig.from_pretrained(path)
    except (OSError, ValueError) as error:
        sys.exit(f"error: no checkpoint at {path}: {first_line(error)}")
    try:
        model, info = transformers.AutoModelForCausalLM.from_pretrained(
            path, dtype=dtype, device_map=device, output_loading_info=True
        )
    except (OSError, ValueError, RuntimeError, SafetensorError) as error:
        sys.exit(f"error: {path} ({config.model_type}) could not be loaded: {first_line(error)}")
    if info["missing_keys"]:
        sys.exit(f"error: {path} ({config.model_type}) lacks {', '.join(sorted(info['missing_keys']))}")
    return model.eval()


def first_line(error: Exception) -> str:
    return str(error).strip().partition("\n")[0]


def prompt_ids(path: str, prompt: str, model):
    """(token ids, tokenizer); random ids and no tokenizer where the checkpoint has none."""
    local = Path(path)
    if not local.is_dir() or any(local.glob("tokenizer*")):
        try:
            tokenizer = transformers.AutoTokenizer.from_pretrained(path)
            return tokenizer(prompt, return_tensors="pt").input_ids.to(model.device), tokenizer
        except (OSError, ValueError) as error:
            sys.exit(f"error: the tokenizer of {path} could not be loaded: {first_line(error)}")
    vocabulary = model.config.get_text_config().vocab_size
    ids = torch.randint(0, vocabulary, (1, 16), generator=torch.Generator().manual_seed(0))
    return ids.to(model.device), None


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


def main(args: argparse.Namespace) -> None:
    transformers.logging.set_verbosity_error()
    transformers.logging.disable_progress_bar()
    try:
        device = usable_device(args.device)
    except ValueError as error:
        sys.exit(f"error: {error}")
    file = None if args.model or args.random else trained.smollm2()
    if file is not None:
        demonstrate(*trained_experts(file, args.prompt, args.dtype, device), args)
        return
    if not args.model and not args.random:
        print(f"{trained.MISSING}; the weights are random instead\n")
    with tempfile.TemporaryDirectory() as folder:
        path = args.model or folder
        if args.model is None:
            write_checkpoint(folder)
        elif not is_checkpoint(path):
            sys.exit(f"error: {path} is not a checkpoint: there is no {Path(path) / 'config.json'}")
        model = load(path, args.dtype, device)
        ids, tokenizer = prompt_ids(path, args.prompt, model)
    demonstrate(model, ids, tokenizer, args)


def trained_experts(file: Path, question: str, dtype: str, device: str):
    """(model, ids of the question, tokenizer): SmolLM2's function, in experts."""
    chosen = ("float32" if device == "cpu" else "bfloat16") if dtype == "auto" else dtype
    print(f"SmolLM2-135M from {file.name}, its MLPs as experts", flush=True)
    model = trained_models.mixture(trained_models.dense(file, getattr(torch, chosen))).to(device)
    tokenizer = trained_models.tokenizer_of(file)
    return model, trained_models.asked(tokenizer, question).to(device), tokenizer


def accelerate(model, bits: int | None = None) -> Report:
    """The report; one line on what is wrong where experts are left alone."""
    try:
        report = torch_moe_mps.accelerate(model, bits=bits)
    except ValueError as error:
        sys.exit(f"error: {first_line(error)}")
    for row in report.left_alone:
        if row.kind == "experts":
            sys.exit(f"error: {type(model).__name__}: {row.cls} is left alone: {row.reason}")
    return report


def with_the_same_weights(model):
    """A copy of a model that shares its tensors."""
    return copy.deepcopy(model, {id(tensor): tensor for tensor in (*model.parameters(), *model.buffers())})


def demonstrate(model, ids: torch.Tensor, tokenizer, args: argparse.Namespace) -> None:
    parameters, before = model.num_parameters() / 1e6, total_bytes(model) / 1e6
    print(f"{type(model).__name__}, {parameters:.0f} M parameters, {model.dtype}, {model.device}\n")
    if getattr(model, "hf_quantizer", None) is not None:
        print(accelerate(model))
        _, answer = run(model, ids, args.tokens)
        print(f"\nweights: {before:.0f} MB")
        speed = speeds_of({"": model}, ids, args.tokens)[""]
        print(f"tokens/s: {speed:.1f}; transformers' own code does not run quantised weights")
    else:
        accelerated, answer = compared(model, ids, args.tokens)
        models = {"eager": model, "accelerated": accelerated}
        quantized = None if args.bits == 0 else in_bits(model, args)
        if quantized is not None:
            name, models[name] = quantized
            print(f"\nweights: {before:.0f} MB before, {total_bytes(models[name]) / 1e6:.0f} MB {name}")
            _, answer = run(models[name], ids, args.tokens)
        say_speeds(speeds_of(models, ids, args.tokens))
        if quantized is not None and model.device.type == "cpu":
            print("a CPU decodes weights once, to float32: packed ones save memory there, and no time")
    if model.device.type == "mps":
        print("\nwrong or slow? `torch-moe-mps check` writes moe_mps_report.json, for an issue")
    text = (
        tokenizer.decode(answer, skip_special_tokens=True)
        if tokenizer
        else " ".join(map(str, answer.tolist()))
    )
    print(f"\n{args.prompt}\n{text}" if tokenizer else f"\n{text}")


def compared(model, ids: torch.Tensor, tokens: int):
    """(an accelerated copy of a model, its answer), compared with transformers' own code."""
    if experts_of(model):
        model.set_experts_implementation("eager")
    expected, eager_answer = run(model, ids, tokens)
    accelerated = with_the_same_weights(model)
    print(accelerate(accelerated))
    logits, answer = run(accelerated, ids, tokens)
    error = ((logits - expected).abs().max() / expected.abs().max()).item()
    same = int((answer == eager_answer[: len(answer)]).long().cumprod(0).sum())
    print(f"\nlogits of the prompt against eager: relative error {error:.1e}")
    print(f"greedy tokens equal to eager's: {same} of {len(eager_answer)}")
    return accelerated, answer


def in_bits(model, args: argparse.Namespace):
    """(a name, a quantised copy of a model); None where the bits by default do not fit its weights."""
    bits, quantized = args.bits or BITS, with_the_same_weights(model)
    if args.bits is None:
        try:
            quantization = torch_moe_mps.accelerate(quantized, bits=bits).quantization
        except ValueError as error:
            print(f"\nnot in {bits} bits: {first_line(error)}")
            return None
    else:
        quantization = accelerate(quantized, bits).quantization
    print(f"\nin {bits} bits:\n{quantization}")
    return f"in {bits} bits", quantized


def say_speeds(speeds: dict[str, float]) -> None:
    eager, *others = speeds.items()
    shown = [f"{name} {speed:.1f} ({speed / eager[1]:.2f} times)" for name, speed in others]
    print(f"tokens/s, in turns: {eager[0]} {eager[1]:.1f}, {', '.join(shown)}")


if __name__ == "__main__":
    main(ARGUMENTS)
