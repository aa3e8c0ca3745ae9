"""The options of the commands. Importing this costs nothing: help and wrong values do not wait for torch."""

import argparse
import math
import sys
import textwrap
from collections.abc import Callable, Sequence
from typing import Any, NoReturn

from .. import __version__
from .._limits import KV_BITS
from .._text import bytes_in, one_of, shown
from .._weight_formats import BITS, GROUP_SIZES, MODES
from ..serving.speculative import LOOKUP, MTP

RECIPES = ("small", "fast", "best")
NO_DRAFTS = "none"
MIXED = ("mixed_2_6", "mixed_3_4", "mixed_3_6", "mixed_4_6")
DTYPES = ("auto", "float32", "float16", "bfloat16")

DESCRIPTION = "Quantised Hugging Face models on Apple GPUs."
EPILOG = (
    "`torch-moe-mps COMMAND --help` has examples. An error is one line, to which --debug "
    "adds a traceback; the exit code is then not 0."
)


class _Parser(argparse.ArgumentParser):
    """ArgumentParser whose errors are one line."""

    def error(self, message: str) -> NoReturn:
        print(f"{self.prog}: error: {message}", file=sys.stderr)
        sys.exit(2)


def parser() -> argparse.ArgumentParser:
    """The parser of all commands; the docstrings of the functions that add options are their help."""
    whole = _Parser("torch-moe-mps", description=DESCRIPTION, epilog=EPILOG)
    whole.add_argument("--version", action="version", version=f"torch-moe-mps {__version__}")
    commands = whole.add_subparsers(dest="command", metavar="COMMAND")
    for add_options in (
        _check,
        _report,
        _convert,
        _perplexity,
        _fit,
        _bench,
        _chat,
        _generate,
        _serve,
        _launch,
    ):
        does, _, more = (add_options.__doc__ or "").partition("\n\n")
        command = commands.add_parser(
            add_options.__name__.removeprefix("_"),
            help=does[:1].lower() + does[1:].removesuffix("."),
            description=does,
            epilog=_with_examples(textwrap.dedent(more).rstrip()),
            formatter_class=argparse.RawDescriptionHelpFormatter,
        )
        add_options(command)
        command.add_argument(
            "--debug",
            action="store_true",
            help="show where an error comes from",
        )
    return whole


def parse(arguments: Sequence[str]) -> argparse.Namespace:
    """Parsed options of a command; arguments after -- of the agent command are in options.arguments."""
    command_arguments, behind = [*arguments], list[str]()
    if command_arguments[:1] == ["launch"] and "--" in command_arguments:
        place = command_arguments.index("--")
        command_arguments, behind = command_arguments[:place], command_arguments[place + 1 :]
    options = parser().parse_args(command_arguments)
    options.arguments = behind
    return options


def _with_examples(text: str) -> str:
    """The text of a command's help, with the comments of examples above them.

    zsh, the shell of macOS, takes a comment behind a command for arguments where it is pasted.
    """
    lines = []
    for line in text.splitlines():
        command, _, comment = line.partition("  # ")
        lines += [f"  {comment}:", f"    {command.strip()}"] if comment else [line]
    return "\n".join(lines)


def _setting(text: str) -> str:
    if not text.partition("=")[0].isidentifier() or "=" not in text:
        raise argparse.ArgumentTypeError(f"must be FLAG=VALUE, got {text!r}")
    return text


def _origin(text: str) -> str:
    """Origin of pages, as browsers send it."""
    scheme, mark, place = text.rstrip("/").lower().partition("://")
    if text != "null" and (not scheme or not mark or not place or set(place) & set("/?#@* ")):
        raise argparse.ArgumentTypeError(f"must be as https://app.example:8080, or null, got {text}")
    return text.rstrip("/").lower()


def _integer(least: int, largest: int | None = None) -> Callable[[str], int]:
    """Parser of an integer within bounds."""
    expected = f"of at least {least}" if largest is None else f"from {least} to {largest}"

    def read(text: str) -> int:
        try:
            value = int(text)
        except ValueError:
            value = least - 1
        if value < least or (largest is not None and value > largest):
            raise argparse.ArgumentTypeError(f"must be an integer {expected}, got {text}")
        return value

    return read


def _number(expected: str, is_within: Callable[[float], bool]) -> Callable[[str], float]:
    """Parser of a finite number within bounds."""

    def read(text: str) -> float:
        try:
            value = float(text)
        except ValueError:
            value = math.nan
        if not (math.isfinite(value) and is_within(value)):
            raise argparse.ArgumentTypeError(f"must be a finite number {expected}, got {text}")
        return value

    return read


_POSITIVE = _number("above 0", lambda value: value > 0)


def _one_of(*values: int | str) -> Callable[[str], Any]:
    """Parser of one of some integers or words."""
    expected, named = one_of(values), {str(value): value for value in values}

    def read(text: str) -> int | str:
        if text not in named:
            raise argparse.ArgumentTypeError(f"must be {expected}, got {text}")
        return named[text]

    return read


_BITS, _GROUP_SIZES = BITS["affine"], GROUP_SIZES["affine"]


def _mode(text: str) -> str:
    if text not in MODES:
        raise argparse.ArgumentTypeError(f"must be {one_of(MODES)}, got {text}")
    return text


def _numbers(text: str) -> list[int]:
    parts = text.split(",")
    if not all(part.strip().isdecimal() for part in parts):
        raise argparse.ArgumentTypeError(f"must be numbers with commas between, got {text!r}")
    return [int(part) for part in parts]


def _macs(text: str) -> list[int]:
    """The GB of each Mac, of an option such as 2x64 or 64+128."""
    macs: list[int] = []
    for part in text.split("+"):
        count, _, memory = part.rpartition("x")
        if not ((count or "1").isdecimal() and memory.isdecimal() and int(memory) > 0):
            raise argparse.ArgumentTypeError(
                f"must be Macs as in 2x64 or 64+128, with the GB of each, got {text!r}"
            )
        macs += [int(memory)] * int(count or 1)
    if len(macs) < 2:
        raise argparse.ArgumentTypeError(f"must be 2 Macs or more, as in 2x64 or 64+128, got {text!r}")
    return macs


def _size(text: str) -> int | str:
    if text == "auto":
        return text
    size = bytes_in(text)
    if size is None:
        raise argparse.ArgumentTypeError(f"must be a size such as 20GB, or auto, got {shown(text)}")
    return size


def _bits(text: str) -> int | str | None:
    if text in ("none", "same", "auto"):
        return None if text == "none" else text
    if text not in map(str, _BITS):
        raise argparse.ArgumentTypeError(f"must be {one_of((*_BITS, 'same', 'auto', 'none'))}, got {text}")
    return int(text)


# Options that several commands have; {} is what a command calls the model.
PROMPT_WRITES = 100.0  # GB a day: a small SSD is made for some 150 TB
_SHARED: dict[str, dict[str, Any]] = {
    "model": {
        "metavar": "MODEL",
        "help": "folder, name on the Hub, or a GGUF file: FILE.gguf, NAME:FILE.gguf",
    },
    "--bits": {
        "type": _one_of(*_BITS),
        "help": f"quantise while loading: {one_of(_BITS)} (as in the checkpoint)",
    },
    "--group-size": {
        "type": _one_of(*_GROUP_SIZES),
        "help": f"weights that share a scale, with --bits: {one_of(_GROUP_SIZES)} (64)",
    },
    "--kv-bits": {
        "type": _one_of(*KV_BITS),
        "metavar": f"{{{','.join(map(str, KV_BITS))}}}",
        "default": 16,
        "help": "of the keys and values in the cache; k4v2: keys in 4 and values in 2; 16 leaves them as the "
        "model makes them (16)",
    },
    "--experts-memory": {
        "type": _size,
        "metavar": "SIZE|auto",
        "help": "memory for experts, such as 20GB; others are read from the disk; auto: where all do not fit "
        "(all are in memory)",
    },
    "--no-keep-warm": {
        "action": "store_true",
        "help": "with --experts-memory: let the GPU's clock fall while it waits for experts",
    },
    "--adapter": {"metavar": "DIR", "help": "a LoRA adapter of PEFT for {}: a folder, or a name on the Hub"},
    "--device": {"help": "mps where there is one, else cpu"},
    "--dtype": {
        "choices": DTYPES,
        "default": "auto",
        "help": "of activations, and of weights that are not quantised (as in the checkpoint; beside "
        "quantised ones float16 where a text stays far below its end, else bfloat16; on a CPU float32)",
    },
    "--revision": {"help": "branch, tag or commit of {} on the Hub (main)"},
    "--trust-remote-code": {
        "action": "store_true",
        "help": "run the Python code that {} brings with it",
    },
    "--shares": {
        "type": _numbers,
        "metavar": "N,N",
        "help": "layers of each process (by memory)",
    },
    "--json": {"metavar": "FILE", "help": "write all that was found"},
    "--set": {
        "action": "append",
        "default": [],
        "type": _setting,
        "metavar": "FLAG=VALUE",
        "help": "an argument of generate()",
    },
    "--max-tokens": {
        "type": _integer(1),
        "metavar": "N",
        "help": "tokens of an answer, at most (as the checkpoint says, or what the context has left)",
    },
    "--temperature": {
        "type": _number("of at least 0", lambda value: value >= 0),
        "metavar": "T",
        "help": "of sampling; 0 takes the likeliest token each time (as the checkpoint says)",
    },
    "--top-p": {
        "type": _number("from 0 to 1", lambda value: 0 <= value <= 1),
        "metavar": "P",
        "help": "sample among the likeliest tokens with this probability together (as the checkpoint says)",
    },
    "--system-prompt": {"metavar": "TEXT", "help": "what the model is told first"},
    "--prompt-memory": {
        "type": _number("of at least 0", lambda value: value >= 0),
        "metavar": "GB",
        "help": "memory of the prefix cache beside the last prompt (an eighth of the machine's)",
    },
    "--prompt-folder": {
        "metavar": "DIR",
        "help": "the prefix cache on the disk: what memory has no room for, over restarts ({})",
    },
    "--prompt-disk": {
        "type": _number("of at least 0", lambda value: value >= 0),
        "metavar": "GB",
        "help": "size of the prefix cache on the disk; 0 for none (16, or a quarter of what is free)",
    },
    "--prompt-writes": {
        "type": _number("of at least 0", lambda value: value >= 0),
        "default": PROMPT_WRITES,
        "metavar": "GB",
        "help": f"what the prefix cache writes to the disk a day, at most ({PROMPT_WRITES:g})",
    },
    "--speculative": {
        "metavar": f"{LOOKUP}|{MTP}|{NO_DRAFTS}|MODEL",
        "help": "speculative decoding: prompt lookup, MTP layers of the checkpoint, none, or a draft "
        "model or assistant ({})",
    },
}
_FROM_THE_HUB = ("--revision", "--trust-remote-code")
_HOW_TO_RUN = (
    "--bits", "--group-size", "--kv-bits", "--experts-memory", "--no-keep-warm", "--device", "--dtype",
    *_FROM_THE_HUB,
)  # fmt: skip
_MODEL_TO_RUN = ("model", *_HOW_TO_RUN, "--shares")
_ANSWERS = ("--max-tokens", "--temperature", "--top-p", "--set")
_KEPT = ("--prompt-memory", "--prompt-disk", "--prompt-writes")


def _add(command: argparse.ArgumentParser, *names: str, of: str = "MODEL", **overrides: Any) -> None:
    """Adds options that several commands have; `overrides` change them for this one."""
    for name in names:
        arguments = _SHARED[name] | overrides
        command.add_argument(name, **arguments | {"help": arguments["help"].format(of)})


def _check(command: argparse.ArgumentParser) -> None:
    """Check that every kernel builds and is right here (exit code 2: no Apple GPU).

    examples:
      torch-moe-mps check                                             # everything; writes moe_mps_report.json
      torch-moe-mps check --first                                     # two minutes and a line to paste
      torch-moe-mps check --quick                                     # bfloat16, affine4_64 and mxfp4 alone
      torch-moe-mps check --dtype bfloat16 --format affine4_64,mxfp4  # what some models need
      torch-moe-mps check --large                                     # the sizes of three real models
      torch-moe-mps check --bisect qwen3-4bit                         # what makes a model's logits wrong
      torch-moe-mps check --probe > gpu.json                          # what is assumed of this GPU, measured
    """
    add = command.add_argument
    add("--dtype", metavar="NAMES", help="some of float32,float16,bfloat16 (all)")
    add("--format", metavar="NAMES", help="formats of weights, such as affine4_64,mxfp4 (all)")
    add(
        "--json",
        metavar="FILE",
        help="write all that was found, to attach to an issue (moe_mps_report.json; of --probe nothing)",
    )
    instead = command.add_mutually_exclusive_group()
    instead.add_argument(
        "--first",
        action="store_true",
        help="only what Qwen3-30B-A3B runs in bfloat16 and affine4_64: two minutes, and a line to paste",
    )
    instead.add_argument(
        "--quick",
        action="store_true",
        help="only bfloat16, and affine4_64 and mxfp4 unless --format names others: what most models run",
    )
    instead.add_argument(
        "--large",
        action="store_true",
        help="instead: calls of the sizes of real models, in bfloat16 and affine4_64; takes 3 GB of memory",
    )
    instead.add_argument(
        "--bisect",
        metavar="MODEL",
        help="instead: turn capture, then fusion, then one operator after another off, until the logits of "
        "a model agree with those of its eager code (exit code 1: they differ)",
    )
    instead.add_argument(
        "--probe",
        action="store_true",
        help="instead: measure what this GPU does and how fast, and print it as JSON",
    )


def _report(command: argparse.ArgumentParser) -> None:
    """Find out in an hour all that this Mac can tell about the package, for its developers.

    Runs check --quick, check --probe, check and check --large, and with a MODEL an answer and its speed,
    beside mlx-lm's where that is installed. All goes into one file as it comes; Ctrl-C leaves what is known.

    examples:
      torch-moe-mps report
      torch-moe-mps report qwen3-4bit --without check,large
    """
    add = command.add_argument
    add("model", nargs="?", metavar="MODEL", help="a checkpoint that fits, best one of mlx-lm's layout")
    add("--output", default="moe_mps_report.zip", metavar="FILE", help="file to write (moe_mps_report.zip)")
    add("--minutes", type=_POSITIVE, default=60, help="after which no phase goes on (60)")
    add(
        "--without",
        metavar="PHASES",
        help="phases to leave out: quick, probe, answer, bench, experts, mlx, disk, check, large",
    )


def _convert(command: argparse.ArgumentParser) -> None:
    """Quantise a checkpoint while it is read.

    examples:
      torch-moe-mps convert Qwen/Qwen3-30B-A3B qwen3-4bit                 # everything in 4 bit
      torch-moe-mps convert Qwen/Qwen3-30B-A3B qwen3 --dry-run            # only sizes; downloads no weights
      torch-moe-mps convert Qwen/Qwen3-30B-A3B qwen3-mixed --recipe mixed_4_6
      torch-moe-mps convert Qwen/Qwen3-30B-A3B qwen3-mlx --to mlx         # for mlx-lm
      torch-moe-mps convert Qwen/Qwen3-30B-A3B qwen3-4bit --importance auto  # the same bytes, less error
      torch-moe-mps convert qwen3-Q4_K_M.gguf qwen3-q4                    # as it is, packed
      torch-moe-mps convert qwen3-Q8_0.gguf qwen3-mlx --bits 4 --to mlx   # quantised again
    """
    add = command.add_argument
    add(
        "source",
        metavar="SRC",
        help="folder or name on the Hub: dense, FP8, of MLX, or converted before; or a GGUF file",
    )
    add("destination", metavar="DST", help="folder to write; it must not exist")
    add("--bits", type=_one_of(*_BITS), help=f"{one_of(_BITS)} (4)")
    sizes = f"weights that share a scale: {one_of(_GROUP_SIZES)} (64); a --mode but affine has one of its own"
    add("--group-size", type=_integer(1), help=sizes)
    add(
        "--mode",
        default="affine",
        type=_mode,
        help=f"{one_of(MODES)}; k and xs need rows of 256 n, others get affine (affine)",
    )
    add(
        "--linear-bits",
        type=_bits,
        default="auto",
        metavar="BITS",
        help="of linear layers; none is dense, same as the experts (auto: 6 beside experts where they are at "
        "most a tenth of the weights)",
    )
    add(
        "--embedding-bits",
        type=_bits,
        default="auto",
        metavar="BITS",
        help="of embeddings and output head; none is dense, same as the rest (auto: 6 where they are a tenth "
        "of the weights)",
    )
    add("--keep", action="append", default=[], metavar="PATTERN", help="names of weights that stay dense")
    add(
        "--recipe",
        metavar="NAME",
        help="small, fast, best, mixed_2_6 to mixed_4_6, or a JSON file",
    )
    add(
        "--importance",
        metavar="WHAT",
        help="weigh errors by what weights multiply: auto (run a built-in text through the model first), a "
        "UTF-8 text, or a file of --save-importance (no weighing)",
    )
    add("--save-importance", metavar="FILE", help="write what --importance found in a text")
    add("--to", choices=("moe_mps", "mlx"), default="moe_mps", help="layout to write (moe_mps)")
    add("--dry-run", action="store_true", help="print sizes, weight by weight, and write nothing")
    _add(command, "--json")
    dense = "of weights that stay dense, and of scales (as in SRC; float16 for bfloat16, but for --to mlx)"
    _add(command, "--dtype", help=dense)
    _add(command, *_FROM_THE_HUB, of="SRC")


def _perplexity(command: argparse.ArgumentParser) -> None:
    """Measure how well models predict a text.

    examples:
      torch-moe-mps perplexity qwen3-4bit
      torch-moe-mps perplexity qwen3-4bit --against Qwen/Qwen3-30B-A3B    # one model in memory at a time
      torch-moe-mps perplexity qwen3-3bit qwen3-4bit qwen3-8bit --against Qwen/Qwen3-30B-A3B
      torch-moe-mps perplexity qwen3-4bit --text chats.txt --window 2048
      torch-moe-mps perplexity qwen3-4bit --kv-bits 4 --against qwen3-4bit  # what a cache in 4 bits changes
    """
    add = command.add_argument
    add(
        "model",
        nargs="+",
        metavar="MODEL",
        help="folder, name on the Hub, or a GGUF file: FILE.gguf, NAME:FILE.gguf; several are one table",
    )
    add("--text", metavar="FILE", help="UTF-8 text (43,000 words of Python Enhancement Proposals of 2026)")
    add("--against", metavar="OTHER", help="a model to compare with, most often the dense one; it runs first")
    add("--window", type=_integer(2), default=512, help="tokens that are read at once (512)")
    add("--tokens", type=_integer(2), metavar="N", help="read the first N tokens of the text (all)")
    _add(command, "--adapter", "--json", "--kv-bits", "--device", "--shares", "--dtype", *_FROM_THE_HUB)


def _fit(command: argparse.ArgumentParser) -> None:
    """Say which Macs hold a model, and how fast it can be at most.

    examples:
      torch-moe-mps fit Qwen/Qwen3-30B-A3B            # downloads config.json, no weights
      torch-moe-mps fit Qwen/Qwen3-30B-A3B --mac      # for this Mac, as it lets the GPU have memory
      torch-moe-mps fit qwen3-4bit --context 32768 --kv-bits 4
      torch-moe-mps fit deepseek-ai/DeepSeek-V3 --macs 512+256  # each has some of the layers
      torch-moe-mps fit Qwen/Qwen3-30B-A3B --recipe mixed_4_6 --json sizes.json
    """
    add = command.add_argument
    add(
        "model",
        metavar="NAME",
        help="folder or name on the Hub, of which only config.json is read, or a GGUF file",
    )
    add("--mac", action="store_true", help="only this Mac")
    add("--macs", type=_macs, metavar="NxGB", help="Macs that share the layers, such as 2x64 or 64+128")
    add("--recipe", metavar="NAME", help="also small, fast, best, mixed_2_6 to mixed_4_6, or a JSON file")
    _add(command, "--json")
    add(
        "--context",
        type=_integer(0),
        default=4096,
        help="tokens of context that the bound of speed is for (4096)",
    )
    _add(command, "--group-size", help=f"weights that share a scale: {one_of(_GROUP_SIZES)} (64)")
    _add(command, "--kv-bits")
    dense = "of weights that stay dense, and of the KV cache in 16 bits (as in the checkpoint)"
    _add(command, "--dtype", help=dense)
    _add(command, *_FROM_THE_HUB, of="NAME")


def _bench(command: argparse.ArgumentParser) -> None:
    """Measure the speed of a model.

    examples:
      torch-moe-mps bench qwen3-4bit
      torch-moe-mps bench qwen3-4bit --depth 0,32768 --repeats 3 --json speed.json
    """
    add = command.add_argument
    _add(command, *_MODEL_TO_RUN)
    add("--prompt", type=_integer(1), default=512, metavar="N", help="tokens of a prompt (512)")
    _add(command, "--max-tokens", default=128, help="tokens that are generated (128)")
    add("--turn", type=_integer(1), default=64, metavar="N", help="tokens of a second turn (64)")
    add("--depth", type=_numbers, metavar="N,N", help="contexts (0,4096,16384, as far as the model reads)")
    add("--repeats", type=_integer(1), default=5, help="of each test, behind one that warms up (5)")
    _add(command, "--speculative", of=NO_DRAFTS)
    _add(command, "--json")
    add(
        "--bandwidth",
        type=_POSITIVE,
        metavar="GB/s",
        help="of this machine's memory, for the bound (known of Macs)",
    )


def _chat(command: argparse.ArgumentParser) -> None:
    """Chat with a model.

    !help in the chat lists what else it understands. Ctrl-C ends an answer, Ctrl-D the chat.

    examples:
      torch-moe-mps chat qwen3-4bit
      torch-moe-mps chat unsloth/Qwen3-30B-A3B-GGUF:Qwen3-30B-A3B-Q4_K_M.gguf
      torch-moe-mps chat Qwen/Qwen3-30B-A3B --bits 4 --max-tokens 1000 --temperature 0.6
      torch-moe-mps chat qwen3-4bit --kv-bits 8                           # long chats in half of the memory
      torch-moe-mps chat qwen3-4bit --kv-bits 4                           # in a quarter
      torch-moe-mps chat qwen3-4bit --system-prompt "$(cat manual.txt)" --prompt-folder prompts
      torch-moe-mps chat qwen3-32b-4bit --speculative qwen3-0.6b                # a small model drafts tokens
    """
    _add(command, *_MODEL_TO_RUN, "--adapter", *_ANSWERS, "--system-prompt")
    _add(command, "--prompt-folder", *_KEPT, of="none")
    _add(command, "--speculative", of="lookup, and mtp where the checkpoint has it")
    command.set_defaults(parallel=1)


def _generate(command: argparse.ArgumentParser) -> None:
    """Answer a prompt once, for scripts.

    Answers go to stdout, all else to stderr. Ctrl-C ends an answer, and --prompt-folder keeps its prompt
    then, too.

    examples:
      torch-moe-mps generate qwen3-4bit -p "Why is the sky blue?"
      torch-moe-mps generate qwen3-4bit --system-prompt "Summarise:" < report.txt > summary.txt
      torch-moe-mps generate qwen3-4bit --raw -p "def quicksort(" --temperature 0.2 --speculative lookup
      torch-moe-mps generate qwen3-4bit --prompts questions.txt --batch 16 > answers.jsonl
      torch-moe-mps generate qwen3-vl-4bit --image cat.png -p "What is this?"
    """
    add = command.add_argument
    _add(command, "model")
    add("-p", "--prompt", metavar="TEXT", help="what the model is asked (read from stdin)")
    add("--prompts", metavar="FILE", help="a prompt in each line; each answer is a line of JSON")
    add(
        "--batch", type=_integer(1), default=8, metavar="N", help="prompts of --prompts that run together (8)"
    )
    add("--raw", action="store_true", help="the prompt as it is, without the chat template")
    _add(command, "--system-prompt")
    add("--image", action="append", default=[], metavar="FILE", help="an image in front of the prompt")
    _add(command, *_ANSWERS)
    _add(command, "--prompt-folder", "--prompt-disk", "--prompt-writes", of="none")
    _add(command, "--adapter", *_HOW_TO_RUN)
    _add(command, "--speculative", of=NO_DRAFTS)
    command.set_defaults(shares=None)  # it is for one process


def _serve(command: argparse.ArgumentParser) -> None:
    """Serve a model to clients of OpenAI and Anthropic.

    Clients of OpenAI use the URL http://localhost:8000/v1, those of Anthropic http://localhost:8000. A
    request computes its new tokens alone: the prefix cache, in memory and on the disk, has earlier turns and
    shared beginnings, over restarts, too. Sequences are batched continuously, as agents ask for several;
    --parallel 1 runs them one by one.

    examples:
      torch-moe-mps serve qwen3-4bit --prompt-folder prompts --prompt-disk 50
      torch-moe-mps serve qwen3-4bit --speculative qwen3-0.6b                 # a small model drafts tokens
      torch-moe-mps serve Qwen/Qwen3-30B-A3B --bits 4 --port 8080
      torch-moe-mps serve qwen3-4bit --host 0.0.0.0 --api-key "$(cat key)"
    """
    add = command.add_argument
    _add(command, *_MODEL_TO_RUN, "--adapter", *_KEPT)
    _add(command, "--prompt-folder", of="the user's cache")
    _add(command, "--speculative", of="lookup, and mtp where the checkpoint has it")
    together = "sequences in a batch, at most (8 where memory takes them); 1 as generate() does"
    add("--parallel", type=_integer(1), metavar="N", help=together)
    add("--host", default="localhost", help="address to listen on (localhost)")
    add("--port", type=_integer(0, 65535), default=8000, help="port to listen on (8000)")
    add("--api-key", metavar="KEY", help="what requests need as a bearer (MOE_MPS_API_KEY, or none)")
    add("--enable-cors", action="store_true", help="answer scripts of any web page")
    add(
        "--allow-origin",
        action="append",
        type=_origin,
        default=[],
        metavar="ORIGIN",
        help="answer scripts of its pages, such as https://app.example; again for each",
    )
    add(
        "--allow-host",
        action="append",
        default=[],
        metavar="NAME",
        help="a name in the Host header of requests, beside addresses and this machine's names",
    )
    levels = ("debug", "info", "warning", "error")
    add(
        "--log-level", choices=levels, default="info", help="what is logged; info: a line each request (info)"
    )


def _launch(command: argparse.ArgumentParser) -> None:
    """Start a coding agent that asks a model on this machine.

    The server that answers at --port is asked, if there is one with this model, and goes on afterwards.
    Otherwise one is started, and ends behind the agent. Nothing in the agent's own settings changes. What is
    behind -- are its arguments.

    examples:
      torch-moe-mps launch claude qwen3-4bit
      torch-moe-mps launch codex Qwen/Qwen3-30B-A3B --bits 4
      torch-moe-mps launch opencode                                       # with the server that is running
      torch-moe-mps launch codex qwen3-4bit -- exec "What does this repository do?"
    """
    add = command.add_argument
    add("agent", choices=("codex", "claude", "opencode"), metavar="AGENT", help="codex, claude or opencode")
    _add(command, "model", nargs="?", help="folder, name on the Hub, or a GGUF file (as the server has it)")
    add("--port", type=_integer(1, 65535), default=8000, help="port of the server (8000)")
    _add(command, *_HOW_TO_RUN, "--adapter", *_KEPT)
    _add(command, "--prompt-folder", of="the user's cache")
