#!/usr/bin/env python
"""Coding agents at one server of `serve`, with what may happen in an hour: what is wrong, lost, read again.

Three at once, two as Codex and one as Claude Code (`agents.py`), whose texts are --shrink times shorter. An
agent sends what the model has answered back, with the results of its calls, and begins a new conversation
where the context is full. Now and then one leaves in the middle of an answer and asks again. Meanwhile the
server is killed (SIGKILL), ended by Ctrl-C and started anew, and its disk gets full.

The model is the first layers of SmolLM2-135M-Instruct, dense in float32, with a template that shows tools.
Answers are greedy; each is compared with that of transformers' own model and `generate` to the same request,
alone. Tokens count as read again that an answered request had at the same places.
"""

import argparse
import contextlib
import os
import signal
import socket
import subprocess
import sys
import tempfile
import threading
import time
import urllib.request
from pathlib import Path

os.environ.setdefault("OMP_NUM_THREADS", "1")

import paths  # noqa: F401  (for support)
import torch
from agents import CLAUDE, CODEX, Agent, Asked, Played, parts
from torch import Tensor

TEMPLATE = (
    "{% if tools %}<|im_start|>system\n{% for tool in tools %}{{ tool | tojson }}\n{% endfor %}<|im_end|>\n"
    "{% endif %}{% for message in messages %}<|im_start|>{{ message.role }}\n"
    "{% if message.role == 'assistant' %}<think>\n\n</think>\n\n{% endif %}{{ message.content }}"
    "{% for call in message.tool_calls or [] %}<tool_call>\n"
    "{{ {'name': call.function.name, 'arguments': call.function.arguments} | tojson }}\n</tool_call>"
    "{% endfor %}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n<think>\n\n</think>\n\n{% endif %}"
)
# The server


def serves(budget: float, arguments: list[str]) -> None:
    """Runs `serve` with a budget of so many GB; at SIGUSR1 it writes how many objects there are.

    Memory that is free goes back to the system before: what is left is in use.
    """
    import ctypes
    import gc

    from torch_moe_mps import macs
    from torch_moe_mps.commands import main

    macs._OF_THE_MACHINE = budget * 1e9 / macs.machine_memory()

    def tell(number: int, frame: object) -> None:
        gc.collect()
        with contextlib.suppress(AttributeError):  # of glibc
            ctypes.CDLL(None).malloc_trim(0)
        print(f"objects {len(gc.get_objects())}", flush=True)

    signal.signal(signal.SIGUSR1, tell)
    raise SystemExit(main(["serve", *arguments]))


class Server:
    """A server of a process of its own, which may end at any time.

    Attributes:
        begun: how many processes there have been.
        weights: bytes of the process when it begins to answer.
        samples: of each process, its bytes beside the prefix cache, and its objects.
        most: the most bytes of the process beside what it has at its start, and of the prefix cache.
    """

    def __init__(self, model: Path, context: int, folder: Path, options: argparse.Namespace, log: Path):
        self.context, self.port, self.begun = context, free_port(), 0
        self.samples: list[list[tuple[int, int]]] = []
        self.most: dict[str, float] = {}
        self.metrics: dict[str, float] = {}
        self._up, self._log = threading.Event(), log
        self._command = [
            sys.executable, __file__, "--serves", str(options.memory), str(model), "--device", "cpu",
            "--port", str(self.port), "--prompt-folder", str(folder), "--prompt-disk", str(options.disk),
            "--prompt-memory", str(options.prompt_memory), "--parallel", "4",
        ]  # fmt: skip

    def wait(self) -> None:
        self._up.wait(120)

    def start(self) -> None:
        with self._log.open("ab") as log:
            self._process = subprocess.Popen(self._command, stdout=subprocess.PIPE, stderr=log, text=True)
        while self._asked() is None:
            if self._process.poll() is not None:
                raise SystemExit(f"the server has ended: {self._log.read_text()[-2000:]}")
            time.sleep(0.1)
        self.begun += 1
        self._at_start = self._bytes()
        self.samples.append([])
        self._up.set()

    def stop(self, number: int) -> None:
        """Ends it by a signal."""
        self._up.clear()
        self._process.send_signal(number)
        self._process.wait()

    def _asked(self) -> str | None:
        try:
            with urllib.request.urlopen(f"http://127.0.0.1:{self.port}/metrics", timeout=10) as answer:
                return str(answer.read().decode())
        except OSError:
            return None

    def _bytes(self) -> int:
        told = subprocess.run(
            ["ps", "-o", "rss=", "-p", str(self._process.pid)], capture_output=True, text=True
        )
        return int(told.stdout or 0) * 1024

    def end(self) -> None:
        if self.begun and self._process.poll() is None:
            self._process.kill()
            self._process.wait()

    def look(self) -> None:
        """Takes the memory of the process and of the prefix cache."""
        text = self._asked() or ""
        lines = [line.split() for line in text.splitlines() if not line.startswith("#") and "{" not in line]
        self.metrics = {name.removeprefix("moe_mps_"): float(value) for name, value in lines}
        seen = {"process": float(self._bytes() - self._at_start)}
        seen |= {name: self.metrics.get(name, 0.0) for name in ("prefix_cache_bytes", "disk_bytes")}
        self.most = {name: max(value, self.most.get(name, 0.0)) for name, value in seen.items()}

    def sample(self) -> None:
        """Takes the bytes of the process beside the prefix cache, and its objects."""
        assert self._process.stdout is not None
        self._process.send_signal(signal.SIGUSR1)
        objects = int(self._process.stdout.readline().split()[1])
        self.look()
        kept = int(self.metrics["prefix_cache_bytes"])
        self.samples[-1].append((self._bytes() - kept, objects))


def free_port() -> int:
    with socket.create_server(("127.0.0.1", 0)) as listener:
        return int(listener.getsockname()[1])


class SmallDisk:
    """A folder on a file system of its own, which can be filled up.

    Args:
        folder: on such a one; None mounts one in memory, on Linux as root.
        size: of that, in bytes.
    """

    def __init__(self, folder: str | None, size: int):
        self._mounted = folder is None
        self.folder = Path(folder or tempfile.mkdtemp())
        if self._mounted:
            command = ["mount", "-t", "tmpfs", "-o", f"size={size}", "tmpfs", str(self.folder)]
            if not hasattr(os, "geteuid") or os.geteuid() != 0 or subprocess.run(command).returncode != 0:
                raise SystemExit("--small-disk must be a folder on a file system of its own")
        self._ballast = self.folder / "ballast"

    def fill(self) -> None:
        with contextlib.suppress(OSError), self._ballast.open("wb", buffering=0) as file:
            while True:
                file.write(bytes(1 << 16))

    def clear(self) -> None:
        self._ballast.unlink(missing_ok=True)

    def close(self) -> None:
        self.clear()
        if self._mounted:
            subprocess.run(["umount", str(self.folder)], check=True)
            self.folder.rmdir()


# Its answers, alone


class Alone:
    """transformers' own model: one request at a time, with a cache of its own for each agent."""

    def __init__(self, folder: Path):
        from transformers import AutoModelForCausalLM, AutoTokenizer, DynamicCache

        from torch_moe_mps.serving.http.protocols.messages import Messages
        from torch_moe_mps.serving.http.protocols.responses import Responses
        from torch_moe_mps.serving.http.served import Served
        from torch_moe_mps.serving.media.loading import Media
        from torch_moe_mps.transformers.upstream.calls import cache_argument

        self._model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()
        tokenizer = AutoTokenizer.from_pretrained(folder)
        context = self._model.config.max_position_embeddings
        self._served = Served(folder.name, self._model, tokenizer, context, None, Media())  # type: ignore[arg-type]
        self._protocols = {protocol.path: protocol for protocol in (Responses(), Messages())}
        self._new_cache, self._cache_argument = DynamicCache, cache_argument
        self._computed: dict[int, tuple[Tensor, DynamicCache]] = {}

    def answer(self, asked: Asked) -> tuple[Tensor, list[tuple[str, str]]]:
        """The tokens of a request's prompt, and what is said to it."""
        from torch_moe_mps.serving.http.preparing import prepare

        protocol = self._protocols[asked.path]
        request = protocol.read(asked.body, self._served)
        shown = []
        answers = prepare(self._served, request, lambda number, event: shown.append(event))
        (job,), (answer,) = answers.jobs, answers.answers
        ids = job.inputs["input_ids"]
        before, cache = self._computed.get(asked.agent, (ids[0, :0], self._new_cache()))
        if len(before):
            cache.crop(min(common(before, ids[0]), ids.shape[1] - 1) - len(before))
        with torch.no_grad():
            result = self._model.generate(
                **job.inputs,
                generation_config=job.config,
                logits_processor=job.processors,
                **self._cache_argument(self._model, cache),
            )
        self._computed[asked.agent] = result[0, : cache.get_seq_length()], cache
        for token in result[0, ids.shape[1] :].tolist():
            if job.append(token):
                break
        job.end("stop" if token in answer._ends else "length")
        for event in shown:
            answer.read(event)
        return ids[0], parts(protocol.whole(request, answers, self._served))


def common(ids: Tensor, other: Tensor) -> int:
    """The tokens that two prompts [T] begin with in common."""
    most = min(len(ids), len(other))
    different = (ids[:most] != other[:most]).nonzero()
    return int(different[0]) if len(different) else most


def compared(asked: list[Asked], alone: Alone) -> tuple[int, int, int]:
    """How many answers are wrong, the tokens of all prompts, and those of them that were read again."""
    wrong, again, prompts = 0, 0, list[tuple[float, Tensor]]()
    for each in sorted(asked, key=lambda each: (each.agent, each.sent)):
        ids, said = alone.answer(each)
        assert len(ids) == each.tokens
        wrong += said != each.said
        each.ids = ids
    for each in sorted(asked, key=lambda each: each.ended):
        known = max((common(ids, each.ids) for ended, ids in prompts if ended < each.sent), default=0)
        again += max(0, min(known, each.tokens - 1) - each.cached)
        prompts.append((each.ended, each.ids))
    return wrong, sum(each.tokens for each in asked), again


# The hour


def play(server: Server, disk: SmallDisk, options: argparse.Namespace) -> Played:
    """Three agents ask; at parts of the hour something happens to the server or to its disk."""
    played = Played()
    shapes = (CODEX, CLAUDE, CODEX)
    agents = [
        Agent(number, shape, server, played, options.requests, options.shrink)
        for number, shape in enumerate(shapes)
    ]

    def killed() -> None:
        server.stop(signal.SIGKILL)
        server.start()

    def restarted() -> None:
        server.stop(signal.SIGINT)
        server.start()

    events = [
        (0.35, killed), (0.42, restarted), (0.5, killed), (0.55, killed), (0.62, disk.fill), (0.75, killed),
        (0.85, disk.clear), (0.92, restarted),
    ]  # fmt: skip
    total, samples = len(agents) * options.requests, [part / 20 for part in range(1, 20)]
    server.start()
    for agent in agents:
        agent.start()
    while any(agent.is_alive() for agent in agents):
        part = len(played.asked) / total
        if events and part >= events[0][0]:
            events.pop(0)[1]()
        if samples and part >= samples[0]:
            samples.pop(0)
            server.sample()
        server.look()
        time.sleep(0.3)
    server.sample()
    server.stop(signal.SIGINT)
    return played


def checkpoint(folder: Path, layers: int) -> Path:
    """The first layers of the trained model, with a chat template of ours."""
    from support import trained, trained_models

    file = trained.needed()
    model = trained_models.first_layers(trained_models.dense(file), layers)
    model.save_pretrained(folder)
    tokenizer = trained_models.tokenizer_of(file)
    tokenizer.chat_template = TEMPLATE
    tokenizer.save_pretrained(folder)
    return folder


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--requests", type=int, default=24, help="of each agent")
    parser.add_argument("--shrink", type=float, default=8.0)
    parser.add_argument("--layers", type=int, default=3)
    parser.add_argument("--memory", type=float, default=1.5, help="GB of the server's budget")
    parser.add_argument("--prompt-memory", type=float, default=0.2, help="GB")
    parser.add_argument("--disk", type=float, default=0.6, help="GB of prompts")
    parser.add_argument("--small-disk", metavar="FOLDER", help="on a small disk, to be filled up")
    parser.add_argument("--log", type=Path, help="of the server")
    options = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        model = checkpoint(Path(folder) / "model", options.layers)
        disk = SmallDisk(options.small_disk, int(options.disk * 1e9))
        log = options.log or Path(folder) / "log"
        server = Server(model, 8192, disk.folder / "prompts", options, log)
        try:
            begun = time.monotonic()
            played = play(server, disk, options)
            seconds = time.monotonic() - begun
        finally:
            server.end()
            disk.close()
        wrong, tokens, again = compared(played.asked, Alone(model))
    table(played, server, options, seconds, wrong, tokens, again)


def table(played: Played, server: Server, options, seconds, wrong, tokens, again) -> None:
    samples = max(server.samples, key=len)
    room, most = server.metrics["memory_room_bytes"] / 1e6, {n: b / 1e6 for n, b in server.most.items()}
    kept, disk = options.prompt_memory * 1e3, options.disk * 1e3
    rows = {
        "requests answered": f"{len(played.asked)} of {played.conversations} conversations",
        "minutes": f"{seconds / 60:.1f}",
        "left by their clients": f"{played.left}",
        "failed as the server ended, and asked again": f"{played.again}",
        "servers, of which 4 were killed": f"{server.begun}",
        "wrong answers": f"{wrong}",
        "lost requests": f"{played.lost}",
        "tokens of prompts": f"{tokens:,}",
        "of these read again": f"{again:,} ({100 * again / tokens:.2f} %)",
        "MB beside the model, at most": f"{most['process']:.0f} of {room:.0f}",
        "MB of cached prefixes, at most": f"{most['prefix_cache_bytes']:.0f} of {kept:.0f}",
        "MB on the disk, at most": f"{most['disk_bytes']:.0f} of {disk:.0f}",
        "MB of the longest server beside cached prefixes": ", ".join(f"{b / 1e6:.0f}" for b, _ in samples),
        "objects of that server": ", ".join(f"{objects:,}" for _, objects in samples),
    }
    print("| | |\n| --- | --- |")
    for name, value in rows.items():
        print(f"| {name} | {value} |")


if __name__ == "__main__":
    if sys.argv[1:2] == ["--serves"]:
        serves(float(sys.argv[2]), sys.argv[3:])
    main()
