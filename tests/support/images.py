"""A model that sees, with its processor, written by transformers' own code; and pictures for it."""

import base64
import io
from pathlib import Path

import numpy as np
import torch
import transformers
from PIL import Image
from transformers.models.clip.image_processing_pil_clip import CLIPImageProcessorPil

from support import tiny_models
from support.checkpoints import LETTERS, tokenizer_of

TEMPLATE = """\
{%- for message in messages -%}
{%- if message.content is string -%}{{ message.content }}
{%- else -%}
{%- for part in message.content -%}
{%- if part.type == 'text' -%}{{ part.text }}{%- else -%}<image>{%- endif -%}
{%- endfor -%}
{%- endif -%}
{%- endfor -%}"""


def llava(layers: int) -> transformers.LlavaForConditionalGeneration:
    """A Mixtral behind a CLIP of so many layers and 16 x 16 pixels, four tokens an image (number 27)."""
    with tiny_models.groups_of_32():
        text = tiny_models.tiny_config("mixtral", head_dim=32, vocab_size=28)
    vision = transformers.CLIPVisionConfig(
        hidden_size=32,
        intermediate_size=32,
        num_hidden_layers=layers,
        num_attention_heads=2,
        image_size=16,
        patch_size=8,
    )
    config = transformers.LlavaConfig(vision_config=vision, text_config=text, image_token_index=27)
    torch.manual_seed(0)
    return transformers.LlavaForConditionalGeneration(config).eval()


def write_llava(folder: Path) -> None:
    """A model that sees, with its processor; the tokens that are no image are letters."""
    llava(layers=1).save_pretrained(folder)
    tokenizer = tokenizer_of(
        [*LETTERS, "<image>"],
        unk_token="?",
        pad_token="?",
        additional_special_tokens=["<image>"],
        clean_up_tokenization_spaces=False,
    )
    pixels = {"height": 16, "width": 16}
    processor = transformers.LlavaProcessor(
        CLIPImageProcessorPil(size=pixels, crop_size=pixels),
        tokenizer,
        patch_size=8,
        vision_feature_select_strategy="default",
        num_additional_image_tokens=1,
        chat_template=TEMPLATE,
    )
    processor.save_pretrained(folder)


def picture(seed: int) -> Image.Image:
    return Image.fromarray(np.random.default_rng(seed).integers(0, 255, (20, 24, 3), dtype=np.uint8))


def as_url(image: Image.Image) -> str:
    file = io.BytesIO()
    image.save(file, "PNG")
    return "data:image/png;base64," + base64.b64encode(file.getvalue()).decode()
