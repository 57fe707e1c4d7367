"""A Qwen3-VL of a quarter of a million random weights, built on the spot: it reads real prompts and videos on a CPU.

Its sizes follow what transformers and the architecture ask for: the rotary sections sum to half a head, the vision
tower's output is as wide as the text, and the tokenizer is Qwen's kind (bytes, every digit alone).
"""

import copy
from functools import cache
from pathlib import Path

import torch
from tokenizers import Regex, Tokenizer, decoders, models, pre_tokenizers
from transformers import (
    PreTrainedTokenizerFast,
    Qwen2VLImageProcessor,
    Qwen3VLConfig,
    Qwen3VLForConditionalGeneration,
    Qwen3VLProcessor,
    Qwen3VLVideoProcessor,
)

MARKS = {
    "end": "<|endoftext|>",
    "turn": "<|im_start|>",
    "close": "<|im_end|>",
    "vision_start": "<|vision_start|>",
    "vision_end": "<|vision_end|>",
    "image": "<|image_pad|>",
    "video": "<|video_pad|>",
}
THINK = ("<think>", "</think>")
WORDS = ("ĠTrue", "ĠFalse")
"""Words that are one token, with their leading space, as in real vocabularies."""
PIECES = r"[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}| ?[^\s\p{L}\p{N}]+[\r\n]*|\s+"
CONTEXT = 16384
PATCH = {"patch_size": 16, "temporal_patch_size": 2, "merge_size": 2}

PLACE = "{{ '<|vision_start|>' + ('<|video_pad|>' if part.type == 'video' else '<|image_pad|>') + '<|vision_end|>' }}"
TEMPLATE = (
    "{% for message in messages %}{{ '<|im_start|>' + message.role + '\n' }}"
    "{% if message.content is string %}{{ message.content }}{% else %}{% for part in message.content %}"
    "{% if part.type == 'text' %}{{ part.text }}{% else %}" + PLACE + "{% endif %}{% endfor %}{% endif %}"
    "{{ '<|im_end|>\n' }}{% endfor %}{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}"
)
PLAIN_TEMPLATE = TEMPLATE + "{% endif %}"
THINKING_TEMPLATE = TEMPLATE + "{{ '<think>\n' if enable_thinking else '<think>\n\n</think>\n\n' }}{% endif %}"


def build_tokenizer(template: str) -> PreTrainedTokenizerFast:
    """Bytes, the words, and the marks."""
    vocabulary = {symbol: number for number, symbol in enumerate(sorted(pre_tokenizers.ByteLevel.alphabet()))}
    merges = []
    for word in WORDS:
        for end in range(2, len(word) + 1):
            merges.append((word[: end - 1], word[end - 1]))
            vocabulary.setdefault(word[:end], len(vocabulary))
    tokenizer = Tokenizer(models.BPE(vocab=vocabulary, merges=list(dict.fromkeys(merges))))
    split = pre_tokenizers.Split(Regex(PIECES), "isolated")
    byte_level = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence([split, byte_level])
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens(list(MARKS.values()))
    tokenizer.add_tokens(list(THINK))
    return PreTrainedTokenizerFast(
        tokenizer_object=tokenizer,
        eos_token=MARKS["close"],
        pad_token=MARKS["end"],
        model_max_length=CONTEXT,
        chat_template=template,
        extra_special_tokens={
            "image_token": MARKS["image"],
            "video_token": MARKS["video"],
            "vision_bos_token": MARKS["vision_start"],
            "vision_eos_token": MARKS["vision_end"],
        },
    )


def build_model(tokenizer: PreTrainedTokenizerFast) -> Qwen3VLForConditionalGeneration:
    """Two layers of text and two of vision, with the same weights every time."""
    ids = {name: tokenizer.convert_tokens_to_ids(mark) for name, mark in MARKS.items()}
    text = {
        "vocab_size": len(tokenizer),
        "hidden_size": 64,
        "intermediate_size": 128,
        "num_hidden_layers": 2,
        "num_attention_heads": 2,
        "num_key_value_heads": 1,
        "head_dim": 32,
        "max_position_embeddings": CONTEXT,
        "rope_parameters": {
            "rope_type": "default",
            "rope_theta": 10000.0,
            "mrope_section": [8, 4, 4],
            "mrope_interleaved": True,
        },
        "eos_token_id": ids["close"],
        "pad_token_id": ids["end"],
    }
    vision = {
        "depth": 2,
        "hidden_size": 32,
        "intermediate_size": 64,
        "num_heads": 2,
        "patch_size": PATCH["patch_size"],
        "temporal_patch_size": PATCH["temporal_patch_size"],
        "spatial_merge_size": PATCH["merge_size"],
        "out_hidden_size": text["hidden_size"],
        "num_position_embeddings": 256,
        "deepstack_visual_indexes": [0],
    }
    config = Qwen3VLConfig(
        text_config=text,
        vision_config=vision,
        image_token_id=ids["image"],
        video_token_id=ids["video"],
        vision_start_token_id=ids["vision_start"],
        vision_end_token_id=ids["vision_end"],
        tie_word_embeddings=True,
    )
    with torch.random.fork_rng():
        torch.manual_seed(7)
        model = Qwen3VLForConditionalGeneration(config)
    assert model.generation_config is not None
    model.generation_config.eos_token_id = ids["close"]
    model.generation_config.pad_token_id = ids["end"]
    return model


@cache
def _parts(template: str) -> tuple[Qwen3VLForConditionalGeneration, Qwen3VLProcessor]:
    tokenizer = build_tokenizer(template)
    norm = {"image_mean": [0.5] * 3, "image_std": [0.5] * 3}
    smallest = 32 * 32
    images = Qwen2VLImageProcessor(**PATCH, **norm, size={"shortest_edge": smallest, "longest_edge": 128 * 128})
    videos = Qwen3VLVideoProcessor(**PATCH, **norm, size={"shortest_edge": smallest, "longest_edge": 64 * 96 * 96})
    processor = Qwen3VLProcessor(
        image_processor=images, tokenizer=tokenizer, video_processor=videos, chat_template=template
    )
    return build_model(tokenizer), processor


def write_tiny_judge(folder: Path, *, thinking: bool = False, gain: float = 1.0) -> Path:
    """Write the model and its processor as a hub's folder holds them, and return the folder.

    Args:
        folder: Where to.
        thinking: Whether its template knows of thinking.
        gain: Multiplies every matrix. Weights as small as those of a large model (1) let a narrow one learn nothing for
            long; at 4 they fit its width.
    """
    model, processor = _parts(THINKING_TEMPLATE if thinking else PLAIN_TEMPLATE)
    model = copy.deepcopy(model)
    with torch.no_grad():
        for weight in model.parameters():
            weight.mul_(gain if weight.ndim > 1 else 1.0)
    model.save_pretrained(folder)
    processor.save_pretrained(folder)
    return folder
